"""LoRA adapters by what they are, not by where they lie: codes outlive the engine that loaded an adapter."""

import hashlib
import secrets
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

logger = init_logger("vllm.manthan")

FILES = ("adapter_config.json", "*.safetensors", "*.bin", "*.pt")
"""Of an adapter's folder, those that decide what it computes."""


class FileState(NamedTuple):
    """What changes when a file does. changed_ns: the file system's own time, which nobody can set."""

    path: Path
    nbytes: int
    changed_ns: int
    inode: int


Files = tuple[FileState, ...]


class Known(NamedTuple):
    """An adapter's files when it was first seen, and what stands for their content."""

    files: Files
    content: str


class Adapters:
    """What stands for each adapter's content, by the number that vLLM gives it; for any thread."""

    def __init__(self) -> None:
        self._known: dict[int, Known] = {}
        self._lock = threading.Lock()

    def content(self, adapter: "LoRARequest") -> str:
        """The digest of the files that vLLM has loaded, or is about to; of them all, the first time that it is asked.

        Where it cannot be said what is loaded, since the files have changed meanwhile or may be loaded anew at any
        time, something that no other engine has.
        """
        folder, number = folder_of(adapter.lora_path), adapter.lora_int_id
        with self._lock:
            known, files = self._known.get(number), files_in(folder)
            if known is None and not adapter.load_inplace:
                known = self._known[number] = Known(files, digest_of(files))
            elif known is None or known.files != files:
                logger.warning(
                    "Manthan: LoRA adapter %s: its files in %s have changed since it was loaded, or may be loaded anew "
                    "at any time: its sessions are kept for this engine alone.",
                    adapter.lora_name,
                    folder,
                )
                known = self._known[number] = Known(files, nobody_elses())
            return known.content

    @contextmanager
    def loading(self, adapter: "LoRARequest") -> Iterator[None]:
        """vLLM loads the adapter meanwhile, while its digest is made beside."""
        before = files_in(folder_of(adapter.lora_path))
        with ThreadPoolExecutor(1, "manthan-adapter") as beside:
            known = beside.submit(self.content, adapter)
            yield
        known.result()
        with self._lock:
            if self._known[adapter.lora_int_id].files != before:
                self._known[adapter.lora_int_id] = Known(before, nobody_elses())


def folder_of(path: str) -> Path:
    """Where vLLM finds the adapter's files."""
    from vllm.lora.utils import get_adapter_absolute_path

    return Path(get_adapter_absolute_path(path))


def files_in(folder: Path) -> Files:
    """None for a folder that is not there, or in which files come and go just now."""
    try:
        stats = [(path, path.stat()) for path in _paths(folder)]
    except OSError:
        return ()
    return tuple(FileState(path, stat.st_size, stat.st_ctime_ns, stat.st_ino) for path, stat in stats)


def digest_of(files: Files) -> str:
    """Of their names and content, wherever they lie."""
    digest = hashlib.sha256()
    try:
        for each in files:
            digest.update(f"{each.path.name}:{each.nbytes}:".encode())
            with each.path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    except OSError:
        return nobody_elses()
    is_settled = bool(files) and files == files_in(files[0].path.parent)
    return digest.hexdigest()[:32] if is_settled else nobody_elses()


def nobody_elses() -> str:
    """What no other engine has, nor this one at another time."""
    return f"unknown-{secrets.token_hex(16)}"


def _paths(folder: Path) -> Sequence[Path]:
    return sorted({path for name in FILES for path in folder.glob(name)})
