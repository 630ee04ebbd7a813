"""Folder on disk with a server's compressed blocks. docs/disk.md lists the folder's files.

The file `lock` has the ids of the process that locked the folder, and of this process's parent.
"""

import errno
import fcntl
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Container, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

from manthan.manager.config.model import ConfigError
from manthan.manager.pool import BlockName
from manthan.manager.tiers.arena_tier import ArenaTier, RamTier
from manthan.manager.tiers.disk import DISK, FILE, DiskTier, records_in, room
from manthan.manager.tiers.disk_files import lock, make_folder
from manthan.manager.tiers.journal import JOURNAL
from manthan.manager.tiers.shards import Shard
from manthan.manager.tiers.tier import Buffer

logger = logging.getLogger("vllm.manthan.disk")

LOCK = "lock"


class FolderBusyError(ConfigError):
    """Error: another server uses the folder."""


class NoTier(RamTier):
    """Tier that stores nothing, for a disk that cannot be used."""

    def __init__(self) -> None:
        super().__init__(0)

    def put_all(self, group: int, blocks: Mapping[bytes, Buffer], tenant: str = "") -> dict[bytes, str]:
        return dict.fromkeys(blocks, DISK)


def check_folder(path: str, patience_s: float = 0.0) -> None:
    """Raise ConfigError if a folder is missing, may not be written to by this user, or is used by another server.

    patience_s: Most seconds to wait until the folder is free, because processes of a killed server may end later.
    """
    folder = Path(path)
    if not folder.is_dir():
        why = "that is no folder" if folder.exists() else "there is no such folder"
        raise ConfigError(f"tiers.disk.path is {path!r}, but {why}: name one that is there, on a local file system.")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise ConfigError(
                f"tiers.disk.path is {path!r}, but nothing can be written there ({error.strerror}): name a folder that "
                "this user may write to."
            ) from None
        logger.warning("Manthan: nothing can be written to %s now: %s", path, error.strerror)
    until = time.monotonic() + patience_s
    for held in (folder / LOCK, *folder.glob(f"replica-*/{LOCK}")):
        while not _is_ours(held):
            if time.monotonic() >= until:
                raise _in_use(folder)
            time.sleep(0.1)


def open_root(path: Path) -> IO[bytes] | None:
    """Lock the folder of `tiers.disk.path` for this process. Make a missing folder.

    Returns: the lock's file, locked until closed; None if no file can be made.

    Raises: ConfigError if another server uses the folder.
    """
    try:
        if not path.is_dir():
            make_folder(path)
        file = lock(path / LOCK)
    except BlockingIOError:
        raise _in_use(path) from None
    except OSError as error:
        logger.warning("Manthan: %s cannot be locked: %s", path, error)
        return None
    with suppress(OSError):  # a full disk
        file.truncate(0)
        file.write(f"{os.getpid()} {os.getppid()}\n".encode())
    return file


def open_rank(path: Path, name: str, shard: Shard, max_bytes: int, is_left: bool = False) -> ArenaTier:
    """Return the tier of a rank, or NoTier if the disk cannot be used.

    Args:
        path: Folder that `open_root` locks.
        name: Name of the namespace, which is the name of a folder in `path`.
        shard: Part of each block that the rank stores: some of its KV heads.
        is_left: See `DiskTier`.

    Raises: ConfigError if another server uses the folder.
    """
    try:
        if not path.is_dir():
            make_folder(path)
        make_folder(path / name)
        return DiskTier(path / name / f"rank-{shard}", max_bytes, is_left=is_left)
    except BlockingIOError:
        raise _in_use(path) from None
    except OSError as error:
        logger.warning("Manthan: %s cannot be used: nothing is kept on this disk: %s", path / name, error)
        return NoTier()


def counts_in(folder: Path) -> list[int]:
    """Return each number of ranks, sorted, with which a server has stored blocks in the folder of a namespace."""
    return sorted({int(each.name.rpartition("-")[2]) for each in folder.glob("rank-*-of-*") if (each / FILE).exists()})


def found_in(folder: Path, shard: Shard) -> dict[BlockName, list[int]]:
    """Return the bytes that each stored block of a rank takes, even if another process has the rank's tier open.

    A block's list has the bytes of its first part, of its first two parts, and so on to all; see `tier.part_ends`.

    folder: Folder of a namespace. shard: Shard of each block that the rank stores.
    """
    found: dict[BlockName, list[int]] = {}
    with suppress(OSError):
        fd = os.open(folder / f"rank-{shard}" / FILE, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for name, placed in records_in(fd).items():
                found[name] = [room(end) for end in (*placed.inner, placed.nbytes)]
        finally:
            os.close(fd)
    return found


def remove_others(path: Path, name: str, counts: Container[int]) -> dict[str, int]:
    """Remove Manthan's folders of other namespaces than `name`, and in `name` the ranks' folders that are of no use.

    Args:
        counts: Numbers of ranks with which stored blocks can be read. Folders of any other number are of no use.

    Returns: Bytes of each removed folder, by name relative to `path`.
    """
    removed = {}
    unread = [
        folder for of in counts_in(path / name) if of not in counts for folder in path.glob(f"{name}/rank-*-of-{of}")
    ]
    for other in (*unread, *path.glob("*")):
        is_named = other.is_dir() and re.fullmatch(r".+-[0-9a-f]{12}", other.name) and other.name != name
        is_ours = is_named and ((other / JOURNAL).exists() or any(other.glob(f"rank-0*/{LOCK}")))
        if is_ours or other in unread:
            removed[str(other.relative_to(path))] = sum(
                file.stat().st_size for file in other.rglob("*") if file.is_file()
            )
            shutil.rmtree(other, ignore_errors=True)
    return removed


def _is_ours(path: Path) -> bool:
    """True if the file is not locked, or cannot be opened, or if this process, a child or a sibling has locked it."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return True  # `open_root` tells why
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        holder, *parents = os.pread(fd, 64, 0).decode(errors="replace").split() or [""]
    finally:
        os.close(fd)
    return holder == str(os.getpid()) or bool({*parents} & {str(os.getpid()), str(os.getppid())})


def _in_use(path: Path) -> FolderBusyError:
    return FolderBusyError(
        f"tiers.disk.path is {str(path)!r}, which another server uses: give each a folder of its own."
    )
