"""Cache salts, so that tenants share no block with each other, nor LoRA adapters of different content.

vLLM hashes a request's `cache_salt` into the first block, and thereby into all later blocks. A tenant's salt is made of
the tenant's name and the client's salt. A salt also has a digest of the request's adapter, because vLLM tells adapters
apart by name and path only, and compressed blocks outlive the engine.
"""

import hashlib
import secrets
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.logger import init_logger

from manthan.manager.config.resolve import ManthanConfig
from manthan.manager.tiers.sealed import derived, keys_of
from manthan.vllm_hooks.http.hints import CONTENT, merged_hints

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.kv_hints import KvHintsEnvelope

logger = init_logger("vllm.manthan")

MARK = "manthan-"
"""Begin of all salts made here. A client's salt that begins so is replaced."""
NBYTES = 24
PURPOSE = "cache salts of tenants"
FILES = ("adapter_config.json", "*.safetensors", "*.bin", "*.pt")
"""Files of an adapter's folder that decide the adapter's results."""


class Salts:
    """Cache salts of an engine. key: of the digests, at most 64 bytes. isolate: True if each tenant has a salt.

    A client's salt that looks like a tenant's is replaced in any case, because another engine may have stored blocks
    under that tenant's salt.
    """

    def __init__(self, key: bytes, isolate: bool) -> None:
        self._key, self._isolate = key, isolate
        self.adapters = Adapters()
        self._unknown = f"unknown-{secrets.token_hex(16)}"

    def of(
        self,
        params: Any,
        envelope: "KvHintsEnvelope | None",
        salt: str | None,
        adapter: "LoRARequest | None",
        is_known: bool,
    ) -> str | None:
        """Return the salt of a request. params, envelope: its kv_transfer_params and kv_hints.

        is_known: False if the media's content is not known here, so that no other engine may use the blocks.
        """
        tenant, own, salted = merged_hints(params, envelope).tenant if self._isolate else "", salt or "", salt
        if tenant or own.startswith(MARK):
            parts = [part.encode("utf-8", "surrogatepass") for part in (tenant, own)]
            said = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
            salted = MARK + hashlib.blake2b(said, digest_size=NBYTES, key=self._key).hexdigest()
        contents = ["" if adapter is None else self.adapters.content(adapter), "" if is_known else self._unknown]
        content = "-".join(filter(None, contents))
        return f"{CONTENT}{content}/{salted or ''}" if content else salted


def salts_of(config: ManthanConfig) -> Salts:
    """Return an engine's salts. If compressed blocks outlive the engine, all engines of the store have the same key."""
    store, isolate = config.tiers, config.tenants.isolate
    if keys := keys_of(config.sealing):
        return Salts(derived(keys[-1], PURPOSE), isolate)
    return Salts(PURPOSE.encode() if store.is_lasting else secrets.token_bytes(32), isolate)


# -- LoRA adapters ------------------------------------------------------------------------------------


class FileState(NamedTuple):
    """State of a file, to detect a change. changed_ns: st_ctime_ns, a time of the file system that no user can set."""

    path: Path
    nbytes: int
    changed_ns: int
    inode: int


class Adapters:
    """Digest of each adapter's files, by vLLM's number of the adapter.

    vLLM may read the files at any time. Therefore files that changed since this object was made have no digest.
    """

    def __init__(self) -> None:
        self._began_ns = time.time_ns()
        self._known: dict[int, tuple[list[FileState], str]] = {}

    def content(self, adapter: "LoRARequest") -> str:
        """Return the digest of the files; if vLLM may have read other files, a name that no other engine has."""
        files = files_in(folder_of(adapter.lora_path))
        known = self._known.get(adapter.lora_int_id)
        if known is None or known[0] != files:
            is_settled = known is None and files and max(file.changed_ns for file in files) < self._began_ns
            digest = digest_of(files) if is_settled and not adapter.load_inplace else ""
            if not digest:
                logger.warning(
                    f"Manthan: LoRA adapter {adapter.lora_name}: its files in {adapter.lora_path} have changed since "
                    "the engine began, or may be loaded anew at any time: its sessions are kept for this engine alone."
                )
            known = self._known[adapter.lora_int_id] = files, digest or f"unknown-{secrets.token_hex(16)}"
        return known[1]


@cache
def folder_of(path: str) -> Path:
    """Return an adapter's folder. A name of the Hugging Face Hub is looked up once, because the lookup asks the hub."""
    from vllm.lora.utils import get_adapter_absolute_path

    return Path(get_adapter_absolute_path(path))


def files_in(folder: Path) -> list[FileState]:
    """Return the states of an adapter's files; none if the folder is missing, or changes meanwhile."""
    try:
        stats = [(path, path.stat()) for path in sorted({path for name in FILES for path in folder.glob(name)})]
    except OSError:
        return []
    return [FileState(path, stat.st_size, stat.st_ctime_ns, stat.st_ino) for path, stat in stats]


def digest_of(files: list[FileState]) -> str:
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
