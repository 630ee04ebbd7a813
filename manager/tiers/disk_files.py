"""Making, locking and erasing a disk tier's files and folders, which only the owner may read.

A damaged file or folder, such as one of a wrong type or owner, is renamed to NAME.bad, and made anew.
"""

import ctypes
import errno
import fcntl
import logging
import os
import shutil
from pathlib import Path
from typing import IO

logger = logging.getLogger("vllm.manthan.disk")

ERASE_BYTES = 1 << 20  # bytes that `erase` overwrites at a time, if the file system has no holes
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_FALLOCATE = ctypes.CDLL(None).fallocate
_FALLOCATE.argtypes = ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64

_OF_THE_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ENOMEM, errno.EMFILE, errno.ENFILE}
"""Errors of the disk or of the process, not of a single file."""


def is_damage(error: OSError) -> bool:
    """True if the error is of the file or folder itself, not of the disk or of the process."""
    return error.errno not in _OF_THE_DISK


def set_aside(path: Path, why: object) -> bool:
    """Rename a damaged file or folder to NAME.bad, and remove an earlier NAME.bad. Return False if this fails."""
    bad, why = path.with_name(f"{path.name}.bad"), " ".join(str(why).split())  # one line
    try:
        if bad.is_dir() and not bad.is_symlink():
            shutil.rmtree(bad)
        bad.unlink(missing_ok=True)
        path.rename(bad)
    except OSError as error:
        logger.warning("Manthan: %s is damaged (%s) and stays, since it cannot be renamed: %s", path, why, error)
        return False
    logger.warning("Manthan: %s is damaged (%s): it is set aside as .bad, and what it had is lost.", path, why)
    return True


def make_folder(path: Path) -> None:
    """Make a folder and all missing parents, for the owner only. Set a damaged folder aside. Raises OSError."""
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


def open_file(path: Path) -> int:
    """Return a descriptor of a file, made for the owner only if missing. Set a damaged file aside. Raises OSError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o600)
    except OSError as error:
        if not (is_damage(error) and set_aside(path, error.strerror)):
            raise
        return os.open(path, flags, 0o600)


def lock(path: Path, is_shared: bool = False) -> IO[bytes]:
    """Open a file by `open_file`, and lock it until it is closed. is_shared: several processes may hold the lock.

    Raises:
        BlockingIOError: another process holds the lock, or this user may not use the file of another user.
        OSError: the file cannot be opened.
    """
    is_ours = not path.exists() or path.stat().st_uid == os.geteuid()
    if not (is_ours or os.access(path, os.R_OK | os.W_OK, effective_ids=True)):
        raise BlockingIOError(errno.EAGAIN, "another user has it", str(path))
    file = os.fdopen(open_file(path), "r+b", buffering=0)
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise
    return file


def sync_folder(folder: Path) -> None:
    """Flush the names of a folder's files to the disk, so that they outlast a crash of the machine. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, data: memoryview, at: int) -> None:
    """Write all of `data` at offset `at` of a file. Raises OSError."""
    while data:
        done = os.pwritev(fd, [data], at)
        data, at = data[done:], at + done


def erase(fd: int, start: int, nbytes: int) -> None:
    """Erase bytes of a file: punch a hole, or write zeros if the file system has no holes. Raises OSError."""
    if not _FALLOCATE(fd, _KEEP_SIZE | _PUNCH_HOLE, start, nbytes):
        return
    for at in range(start, start + nbytes, ERASE_BYTES):
        some = os.pread(fd, min(ERASE_BYTES, start + nbytes - at), at)
        if some.count(0) < len(some):
            write_all(fd, memoryview(bytes(len(some))), at)
