"""Files and folders of a disk store: made for their owner only, and set aside where they are damaged."""

import errno
import fcntl
import logging
import os
import shutil
from pathlib import Path
from typing import IO

logger = logging.getLogger("vllm.manthan.disk")

_OF_THE_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ENOMEM, errno.EMFILE, errno.ENFILE}
"""Errors that say nothing about a file."""


def is_damage(error: OSError) -> bool:
    """True if the file is at fault, not the disk."""
    return error.errno not in _OF_THE_DISK


def set_aside(path: Path, why: object) -> bool:
    """Rename a damaged file or folder to `.bad`, over what was set aside before. False if that is not possible."""
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
    """Make a folder and those above it, for their owner only. A damaged one is set aside. Raises OSError."""
    if not path.parent.exists():
        make_folder(path.parent)
    try:
        _make_usable(path)
    except OSError as error:
        if not (is_damage(error) and set_aside(path, error.strerror)):
            raise
        path.mkdir(mode=0o700)


def _make_usable(path: Path) -> None:
    path.mkdir(mode=0o700, exist_ok=True)
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def lock(path: Path) -> IO[bytes] | None:
    """Lock a file, made if it is not there, for its owner only. A damaged one is set aside.

    Returns: the file, which is locked until it is closed; None if another process has locked it, or another
        user owns it.
    Raises: OSError if it cannot be opened.
    """
    try:
        fd = _opened(path)
    except PermissionError:
        if path.stat().st_uid != os.geteuid():
            return None
        set_aside(path, os.strerror(errno.EACCES))
        fd = _opened(path)
    except OSError as error:
        if not (is_damage(error) and set_aside(path, error.strerror)):
            raise
        fd = _opened(path)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return os.fdopen(fd, "r+b", buffering=0)


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
