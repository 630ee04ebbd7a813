"""LoRA adapters told apart by their files, because compressed blocks outlive the engine that loaded an adapter."""

import hashlib
import secrets
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

logger = init_logger("vllm.manthan")

FILES = ("adapter_config.json", "*.safetensors", "*.bin", "*.pt")
"""Files of an adapter's folder that decide what it computes."""


class FileState(NamedTuple):
    """What changes when a file does. changed_ns: the file system's own time, which nobody can set."""

    path: Path
    nbytes: int
    changed_ns: int
    inode: int


Files = tuple[FileState, ...]


class Adapters:
    """Digest of each adapter's files, by the number that vLLM gives the adapter.

    vLLM may read the files at any time. Files that changed since this object was made therefore have no digest.
    """

    def __init__(self) -> None:
        self._began_ns = time.time_ns()
        self._known: dict[int, tuple[Files, str]] = {}

    def content(self, adapter: "LoRARequest") -> str:
        """Return the digest of the files; a name that no other engine has, if vLLM may have read others."""
        files = files_in(folder_of(adapter.lora_path))
        known = self._known.get(adapter.lora_int_id)
        if known is None or known[0] != files:
            is_settled = known is None and files and max(file.changed_ns for file in files) < self._began_ns
            digest = digest_of(files) if is_settled and not adapter.load_inplace else ""
            if not digest:
                logger.warning(
                    "Manthan: LoRA adapter %s: its files in %s have changed since the engine began, or may be loaded "
                    "anew at any time: its sessions are kept for this engine alone.",
                    adapter.lora_name,
                    adapter.lora_path,
                )
            known = self._known[adapter.lora_int_id] = files, digest or f"unknown-{secrets.token_hex(16)}"
        return known[1]


@cache
def folder_of(path: str) -> Path:
    """Return where an adapter's files are. A name of the Hugging Face Hub is looked up once, because that asks the
    hub."""
    from vllm.lora.utils import get_adapter_absolute_path

    return Path(get_adapter_absolute_path(path))


def files_in(folder: Path) -> Files:
    """Return the states of an adapter's files; none if its folder is missing or changes just now."""
    try:
        stats = [(path, path.stat()) for path in sorted({path for name in FILES for path in folder.glob(name)})]
    except OSError:
        return ()
    return tuple(FileState(path, stat.st_size, stat.st_ctime_ns, stat.st_ino) for path, stat in stats)


def digest_of(files: Files) -> str:
    """Return the digest of the files' names and content; empty if they change meanwhile."""
    digest = hashlib.sha256()
    try:
        for each in files:
            digest.update(f"{each.path.name}:{each.nbytes}:".encode())
            with each.path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    except OSError:
        return ""
    return digest.hexdigest()[:32] if files == files_in(files[0].path.parent) else ""
