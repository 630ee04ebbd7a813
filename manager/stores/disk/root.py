"""The folder that a server keeps its codes in: whose it is, and what of it is this server's.

    PATH/lock                        locked by the server that uses the folder; its process, and that one's parent
    PATH/NAME/                       what codes of one model and configuration mean; see `Namespace`
    PATH/NAME/sessions.sqlite        the sessions; see `manthan.manager.stores.disk.journal`
    PATH/NAME/rank-N/                one rank's blocks; see `manthan.manager.stores.disk.store`

Data-parallel replicas but the first each have a folder PATH/replica-N with all of that.
"""

import errno
import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from manthan.manager.config.model import ConfigError
from manthan.manager.stores.disk.journal import JOURNAL

LOCK = "lock"


class FolderBusyError(ConfigError):
    """A folder that another server has."""


def check_folder(path: str, patience_s: float = 0.0) -> None:
    """Raise ConfigError for a folder that cannot be used, be it that another server has it.

    patience_s: what is left of a server that was killed may need so long to end.
    """
    folder = Path(path)
    if not folder.is_dir():
        why = "that is no folder" if folder.exists() else "there is no such folder"
        raise ConfigError(f"disk.path is {path!r}, but {why}: name one that is there, on a local file system.")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise ConfigError(
                f"disk.path is {path!r}, but nothing can be written there ({error.strerror}): name a folder that this "
                "user may write to."
            ) from None
        raise ConfigError(f"disk.path is {path!r}, which cannot be used: {error.strerror}.") from None
    until = time.monotonic() + patience_s
    for lock in (folder / LOCK, *folder.glob(f"replica-*/{LOCK}")):
        while lock.exists() and not _is_ours(lock):
            if time.monotonic() >= until:
                raise _in_use(folder)
            time.sleep(0.1)


def open_root(path: Path) -> IO[str]:
    """The folder, made if need be, is this process's until the file that is returned is closed. Raises ConfigError."""
    path.mkdir(parents=True, exist_ok=True)
    file = (path / LOCK).open("a+")
    if not _lock(file):
        file.close()
        raise _in_use(path)
    file.truncate(0)
    file.write(f"{os.getpid()} {os.getppid()}\n")
    file.flush()
    return file


def remove_others(path: Path, name: str) -> dict[str, int]:
    """Remove what is in the folder of other names than this one. Returns their names, and how many bytes they had."""
    removed = {}
    for other in _others(path, name):
        removed[other.name] = sum(file.stat().st_size for file in other.rglob("*") if file.is_file())
        shutil.rmtree(other, ignore_errors=True)
    return removed


def _others(path: Path, name: str) -> Iterator[Path]:
    """Only what was made here, whatever else people keep in that folder."""
    for folder in path.iterdir():
        is_named = folder.is_dir() and re.fullmatch(r".+-[0-9a-f]{12}", folder.name) and folder.name != name
        if is_named and ((folder / JOURNAL).exists() or (folder / "rank-0" / LOCK).exists()):
            yield folder


def _lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_ours(lock: Path) -> bool:
    """Whether nobody has it, or a process of this server: this one, its child or one beside it."""
    with lock.open("a+") as file:
        if _lock(file):
            return True
        file.seek(0)
        holder, *parents = file.read().split() or [""]
    return holder == str(os.getpid()) or bool({*parents} & {str(os.getpid()), str(os.getppid())})


def _in_use(path: Path) -> FolderBusyError:
    return FolderBusyError(f"disk.path is {str(path)!r}, which another server uses: give each a folder of its own.")
