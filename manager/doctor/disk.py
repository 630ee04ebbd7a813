"""The folder of a cold store on disk: that it is there, local, writable, and has room."""

import os
import shutil
from pathlib import Path

from pydantic import ByteSize

from manthan.manager.config.model import ConfigError, ManthanConfig
from manthan.manager.doctor.finding import Finding, Mark
from manthan.manager.stores.disk.root import FolderBusyError, check_folder

DISK = "disk"
IN_RAM = ("tmpfs", "ramfs", "devtmpfs")
REMOTE = ("nfs", "cifs", "smb", "9p", "ceph", "glusterfs", "lustre", "beegfs", "gpfs", "afs", "fuse.")
"""What names of file systems begin with whose files are on other machines, or may be."""


def check_disk(config: ManthanConfig, mounts: Path = Path("/proc/self/mounts")) -> Finding:
    """mounts: where the kernel tells what is mounted."""
    store = config.cold_store
    if not store.is_on_disk:
        return Finding(DISK, Mark.SKIPPED, f"cold_store.kind is {store.kind}, which keeps nothing on a disk.")
    path = config.disk.path
    busy = ""
    try:
        check_folder(path)
    except FolderBusyError:
        busy = "; a server uses it now"
    except ConfigError as error:
        return Finding(DISK, Mark.WRONG, str(error))
    kind = file_system(Path(path), mounts)
    if kind in IN_RAM:
        return _wrong(path, f"is on {kind}, which is RAM and empty after a restart: name a folder on a disk")
    if kind.startswith(REMOTE):
        return _wrong(path, f"is on {kind}, which is not of this machine: name a folder on a local file system")
    nbytes, key = _budget(config)
    free, taken = shutil.disk_usage(path).free, _taken(Path(path))
    said = f"{path} is a folder on {kind} with {_size(free)} free"
    if taken + free < nbytes:
        has = f", besides {_size(taken)} that are there already" if taken else ""
        return _wrong(path, f"has {_size(free)} free{has}, but {key} is {_size(nbytes)}: lower it, or make room")
    return Finding(DISK, Mark.OK, f"{said}, and {key} is {_size(nbytes)}{busy}.")


def file_system(path: Path, mounts: Path) -> str:
    """What the folder's file system is called, such as ext4; empty where that is not told."""
    real, best, kind = path.resolve(), -1, ""
    for line in mounts.read_text(errors="replace").splitlines():
        _, at, name, *_ = line.split(" ")
        mount = Path(at.encode().decode("unicode_escape"))  # a space in a name is \040
        if real.is_relative_to(mount) and len(mount.parts) >= best:  # the last of those at one place hides the others
            best, kind = len(mount.parts), name
    return kind


def _budget(config: ManthanConfig) -> tuple[int, str]:
    store = config.cold_store
    if store.front_disk_bytes:
        return store.front_disk_bytes, "cold_store.disk_bytes" if store.disk_bytes else "a quarter of max_bytes"
    return store.max_bytes, "cold_store.max_bytes"


def _taken(path: Path) -> int:
    """What the folder's files take on the disk."""
    files = (Path(folder) / name for folder, _, names in os.walk(path) for name in names)
    return sum(file.lstat().st_blocks * 512 for file in files if file.exists())


def _wrong(path: str, why: str) -> Finding:
    return Finding(DISK, Mark.WRONG, f"disk.path is {path!r}, which {why}.")


def _size(nbytes: int) -> str:
    return ByteSize(nbytes).human_readable()
