"""Compiled kernels on disk, so that a machine compiles them once and not again for each engine.

The folder is `manthan/kernels` in VLLM_CACHE_ROOT, by default `vllm` in XDG_CACHE_HOME. A file's name is a hash of all
that its content depends on. So a file never changes, and any file can be removed.
"""

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger("vllm.manthan")

DIGEST = hashlib.sha256


def cache_folder() -> Path:
    """Return the folder that this process's environment names."""
    xdg = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    root = os.environ.get("VLLM_CACHE_ROOT") or os.path.join(xdg, "vllm")
    return Path(root).expanduser() / "manthan" / "kernels"


class KernelCache:
    """Cache in a folder for any number of processes and threads. The folder may be missing or read-only."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._unwritten: dict[Path, bytes] = {}

    def compiled(self, named: tuple[str, ...], make: Callable[[], bytes]) -> bytes:
        """Return the kernels compiled for `named`: kept ones if any, else those of `make`, which are then kept.

        named: all that the kernels depend on.
        """
        path = self._folder / f"{DIGEST(repr(named).encode()).hexdigest()}.cubin"
        kept = self._unwritten.get(path) or self._read(path)
        if kept is not None:
            return kept
        made = make()
        try:
            self._write(path, made)
        except OSError as error:
            if not self._unwritten:
                logger.warning(
                    "Manthan: compiled kernels are not kept in %s: %s; they are compiled again at each start. "
                    "Make the folder writable, or set VLLM_CACHE_ROOT to another folder.",
                    self._folder,
                    error.strerror or error,
                )
            self._unwritten[path] = made
        return made

    def _read(self, path: Path) -> bytes | None:
        """Return the kernels in a file; None for a missing or damaged file."""
        try:
            content = path.read_bytes()
        except OSError:
            return None
        digest, kept = content[:32], content[32:]
        return kept if DIGEST(kept).digest() == digest else None

    def _write(self, path: Path, made: bytes) -> None:
        """Write the file whole or not at all, because several processes may read or write the file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        fd, name = tempfile.mkstemp(prefix=f".{path.stem[:16]}-", dir=path.parent)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(DIGEST(made).digest() + made)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
