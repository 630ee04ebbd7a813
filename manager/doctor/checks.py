"""Checks of the machine, of key files and of Redis, for `manthan doctor`. Each finding is one sentence."""

import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import closing
from enum import StrEnum, auto
from pathlib import Path
from typing import NamedTuple

from redis.exceptions import RedisError

from manthan.manager.config.model import ConfigError, ManthanConfig, TiersConfig
from manthan.manager.config.sentences import human_bytes
from manthan.manager.tiers.disk_folder import FolderBusyError, check_folder
from manthan.manager.tiers.redis_client import check, connect, pipelined
from manthan.manager.tiers.sealed import keys_of

MOUNTS = Path("/proc/self/mounts")
IN_RAM = ("tmpfs", "ramfs", "devtmpfs")
REMOTE = ("nfs", "cifs", "smb", "9p", "ceph", "glusterfs", "lustre", "beegfs", "gpfs", "afs", "fuse.")
"""Prefixes of the names of file systems whose files are on other machines."""
REDIS_COMMANDS = "DEL, HSET f 1, HGET f, PEXPIREAT 1, SET 1 PX 1000, GET, STRLEN, EXISTS, UNLINK"
"""Commands that engines send to Redis. `check_redis` tries each, with a key inserted behind the command's name."""


class Grade(StrEnum):
    """Outcome of a check. SKIPPED: there is nothing to check. WARNING: Manthan works, but badly. WRONG: it fails."""

    OK = auto()
    SKIPPED = auto()
    WARNING = auto()
    WRONG = auto()


class Finding(NamedTuple):
    """Result of a check. said: one sentence; if something is wrong, it says what to do."""

    check: str
    mark: Grade
    said: str


def check_memlock(store: TiersConfig, has_gpu: bool) -> Finding:
    """Check that the limit for locked memory (memlock) allows the RAM that Manthan pins (page-locks) for a GPU."""
    wanted = store.max_bytes if store.kind == "host" else store.host_bytes
    if not has_gpu or not wanted:
        why = "no compressed blocks are kept in RAM" if has_gpu else "there is no GPU"
        return Finding("memlock", Grade.SKIPPED, f"{why}, so that no RAM is pinned.")
    limit, size = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], human_bytes(wanted)
    if limit == resource.RLIM_INFINITY or limit >= wanted:
        return Finding("memlock", Grade.OK, f"the limit allows the {size} that are pinned for the GPU.")
    return Finding(
        "memlock",
        Grade.WARNING,
        f"the limit is {human_bytes(limit)}, but {size} of RAM are pinned for the GPU, and some drivers keep to the "
        "limit: raise it (ulimit -l unlimited, LimitMEMLOCK=infinity, --ulimit memlock=-1).",
    )


def check_disk(config: ManthanConfig) -> Finding:
    """Check that the folder of a disk tier exists, can be written, is on a local disk, and has enough room."""
    store, path = config.tiers, config.tiers.disk.path
    if not store.is_on_disk:
        return Finding("disk", Grade.SKIPPED, f"tiers.kind is {store.kind}, which keeps nothing on a disk.")
    busy = ""
    try:
        check_folder(path)
    except FolderBusyError:
        busy = "; a server uses it now"
    except ConfigError as error:
        return Finding("disk", Grade.WRONG, str(error))
    kind = file_system(Path(path))
    budget = store.front_disk_bytes or store.max_bytes
    files = (Path(folder) / name for folder, _, names in os.walk(path) for name in names)
    taken = sum(file.lstat().st_blocks * 512 for file in files if file.exists())
    free = shutil.disk_usage(path).free
    room, size = human_bytes(taken + free), human_bytes(budget)
    if kind in IN_RAM:
        why = f"on {kind}, which is RAM and empty after a restart: name a folder on a disk"
    elif kind.startswith(REMOTE):
        why = f"on {kind}, which is not of this machine: name a folder on a local file system"
    elif taken + free < budget:
        why = f"too small: {room} for {size} of compressed blocks; lower that, or make room"
    else:
        said = f"{path} is a folder on {kind} with {human_bytes(free)} free, for {size} of compressed blocks{busy}."
        return Finding("disk", Grade.OK, said)
    return Finding("disk", Grade.WRONG, f"tiers.disk.path is {path!r}, which is {why}.")


def check_keys(config: ManthanConfig) -> Finding:
    """Check that the file of keys, by which blocks outside the process are sealed, can be used."""
    path = config.sealing.key_file
    if not path:
        return Finding("keys", Grade.SKIPPED, "sealing.key_file is empty, so that blocks are not sealed.")
    try:
        count = len(keys_of(config.sealing))
    except ConfigError as error:
        return Finding("keys", Grade.WRONG, str(error))
    return Finding("keys", Grade.OK, f"{path} has {count} keys; the first one seals new blocks.")


def file_system(path: Path) -> str:
    """Return the type of the file system that has a folder, such as ext4; empty if no mount point has the folder."""
    real, best, kind = path.resolve(), -1, ""
    for line in MOUNTS.read_text(errors="replace").splitlines():
        _, at, name, *_ = line.split(" ")
        mount = Path(at.encode().decode("unicode_escape"))  # a space in a name is \040
        if real.is_relative_to(mount) and len(mount.parts) >= best:  # a later mount hides an earlier one
            best, kind = len(mount.parts), name
    return kind


def check_redis(config: ManthanConfig) -> Iterator[Finding]:
    """Check that Redis answers, accepts the engines' commands, and evicts when full."""
    redis = config.tiers.redis
    if not config.tiers.is_shared:
        yield Finding("Redis", Grade.SKIPPED, f"tiers.kind is {config.tiers.kind}, which does not use Redis.")
        return
    try:
        with closing(connect(redis)) as client:
            said = check(client, redis)
            key = f"{redis.prefix}doctor"
            commands = [command.split() for command in REDIS_COMMANDS.split(", ")]
            pipelined(client, [(command, key, *more) for command, *more in commands])
    except ConfigError as error:
        yield Finding("Redis", Grade.WRONG, str(error))
        return
    except RedisError as error:
        yield Finding("Redis", Grade.WRONG, f"Redis at {redis.url} refuses a command that engines send: {error}.")
        return
    yield Finding("Redis", Grade.OK, f"{redis.url} answers, and takes keys that begin with {redis.prefix}.")
    yield Finding("Redis memory", Grade.WARNING if said else Grade.OK, said or "Redis evicts when it is full.")
