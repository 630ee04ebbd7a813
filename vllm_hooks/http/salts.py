"""Cache salts, by which tenants share no block with each other, and different LoRA adapters share none.

vLLM hashes a request's `cache_salt` into the hash of the first block, and thereby of all later blocks. A tenant's salt
is a digest of the tenant's name and the client's salt. A salt also has a digest of the files of the request's adapter,
because vLLM tells adapters apart by name and path only, while compressed blocks may outlive the engine.
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
"""Begin of all salts made here. A client's salt with this begin is replaced by a salt made here."""
NBYTES = 24  # of a tenant's digest
PURPOSE = "cache salts of tenants"
FILES = ("adapter_config.json", "*.safetensors", "*.bin", "*.pt")
"""Patterns of files in an adapter's folder that decide the adapter's results."""


class Salts:
    """Cache salts of an engine. key: of the tenants' digests, at most 64 bytes. isolate: True if tenants have salts.

    A client's salt that looks like a salt made here is replaced even without `isolate`. A client could otherwise find
    blocks that another engine stored for a tenant.
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
        """Return the salt of a request. params, envelope: its kv_transfer_params and kv_hints. salt: the client's.

        is_known: False if the content of the request's media is unknown. No other engine may then use its blocks.
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
    """Return an engine's salts. Engines on one disk or Redis have the same key, so that tenants find their blocks."""
    store, isolate = config.tiers, config.tenants.isolate
    if keys := keys_of(config.sealing):
        return Salts(derived(keys[-1], PURPOSE), isolate)
    return Salts(PURPOSE.encode() if store.is_lasting else secrets.token_bytes(32), isolate)


# -- LoRA adapters ------------------------------------------------------------------------------------


class FileState(NamedTuple):
    """State of a file, to detect a change."""

    path: Path
    nbytes: int
    changed_ns: int  # st_ctime_ns, which programs cannot set, unlike st_mtime_ns
    inode: int


class Adapters:
    """Digest of each adapter's files, by `lora_int_id`.

    vLLM may read the files at any time. Therefore files that changed after this object was made get a random name
    instead of a digest, so that no other engine finds the blocks.
    """

    def __init__(self) -> None:
        self._began_ns = time.time_ns()
        self._known: dict[int, tuple[list[FileState], str]] = {}

    def content(self, adapter: "LoRARequest") -> str:
        """Return the digest of the adapter's files; or a random name, if vLLM may read files other than these."""
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
    """Return an adapter's folder, by path or by name. A name is looked up once, because the lookup asks the hub."""
    from vllm.lora.utils import get_adapter_absolute_path

    return Path(get_adapter_absolute_path(path))


def files_in(folder: Path) -> list[FileState]:
    """Return the states of an adapter's files; none if the folder is missing, or a file is removed during the call."""
    try:
        stats = [(path, path.stat()) for path in sorted({path for name in FILES for path in folder.glob(name)})]
    except OSError:
        return []
    return [FileState(path, stat.st_size, stat.st_ctime_ns, stat.st_ino) for path, stat in stats]


def digest_of(files: list[FileState]) -> str:
    """Return a digest of the names and content of files; empty if a file changed after its state was taken."""
    digest = hashlib.sha256()
    try:
        for each in files:
            digest.update(f"{each.path.name}:{each.nbytes}:".encode())
            with each.path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    except OSError:
        return ""
    return digest.hexdigest()[:32] if files == files_in(files[0].path.parent) else ""
