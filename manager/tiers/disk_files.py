"""Files and folders of a disk tier: made for their owner only, and set aside where they are damaged."""

import ctypes
import errno
import fcntl
import logging
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import IO

logger = logging.getLogger("vllm.manthan.disk")

_SYNCFS = ctypes.CDLL(None, use_errno=True).syncfs
_OF_THE_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ENOMEM, errno.EMFILE, errno.ENFILE}
"""Errors that say nothing about a file."""


def is_damage(error: OSError) -> bool:
    """True if the file is at fault, not the disk."""
    return error.errno not in _OF_THE_DISK


def set_aside(path: Path, why: object) -> bool:
    """Rename a damaged file or folder to `.bad`, over what was set aside before. False if that is not possible."""
    bad, why = path.with_name(f"{path.name}.bad"), " ".join(str(why).split())  # one line
    try:
        remove(bad)
        path.rename(bad)
    except OSError as error:
        logger.warning("Manthan: %s is damaged (%s) and stays, since it cannot be renamed: %s", path, why, error)
        return False
    logger.warning("Manthan: %s is damaged (%s): it is set aside as .bad, and what it had is lost.", path, why)
    return True


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it, as far as that is possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def make_folder(path: Path) -> None:
    """Make a folder and those above it, for their owner only. A damaged one is set aside. Raises OSError."""
    if not path.parent.exists():
        make_folder(path.parent)
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        if not os.access(path, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        if not (is_damage(error) and set_aside(path, error.strerror)):
            raise
        path.mkdir(mode=0o700)


def _opened(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o600)
    except OSError as error:
        if not (is_damage(error) and set_aside(path, error.strerror)):
            raise
        return os.open(path, flags, 0o600)


def lock(path: Path, is_shared: bool = False) -> IO[bytes]:
    """Lock a file, which is made if it is not there, for its owner only. A damaged one is set aside.

    Args:
        is_shared: True if other processes may lock it so, too.

    Returns: the file, which is locked until it is closed.
    Raises: BlockingIOError if another process has locked it, or another user owns it; OSError if it cannot be opened.
    """
    is_ours = not path.exists() or path.stat().st_uid == os.geteuid()
    if not (is_ours or os.access(path, os.R_OK | os.W_OK, effective_ids=True)):
        raise BlockingIOError(errno.EAGAIN, "another user has it", str(path))
    file = os.fdopen(_opened(path), "r+b", buffering=0)
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise
    return file


def sync_all(fd: int) -> None:
    """Make the file system of an open file or folder last if the machine stops. Raises OSError."""
    if _SYNCFS(fd):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def write_all(fd: int, data: memoryview, at: int) -> None:
    """Write data at an offset. Raises OSError."""
    while data:
        done = os.pwritev(fd, [data], at)
        data, at = data[done:], at + done
