"""A disk that fails when it is told to, under a process that is started with `environment`; a small disk of its own."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_suffix(".c")


class Faults:
    """folder: for the library, and for the file that says what happens."""

    def __init__(self, folder: Path) -> None:
        self._library, self._told = folder / "faults.so", folder / "fault"
        made = ["cc", "-shared", "-fPIC", "-O1", "-o", str(self._library), str(SOURCE), "-ldl"]
        subprocess.run(made, check=True)
        self.now("")

    @property
    def environment(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self._library), "DISK_FAULT": str(self._told)}

    def now(self, fault: str) -> None:
        """eio, enospc, erofs, slow, hang, hang-writes, or nothing."""
        new = self._told.with_suffix(".new")
        new.write_text(fault)
        new.replace(self._told)


@contextmanager
def small_disk(folder: Path, nbytes: int) -> Iterator[None]:
    """The folder is a file system of so many bytes, in RAM."""
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(folder)], check=False).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def resize(folder: Path, nbytes: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={nbytes}", str(folder)], check=True)
