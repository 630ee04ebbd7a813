"""Cache salts of tenants: no two of them share a prefix in vLLM's cache, in the cold store or in KV events.

vLLM makes a request's `cache_salt` part of the hash of its first block, and so of all that follow; these hashes are the
keys of whatever knows blocks. A request of a tenant gets a salt made of the tenant's name and of the salt that its
client gave, so who sends another's prompt, name or salt still asks for blocks of its own. A salt also holds the content
of the request's LoRA adapter, which vLLM tells apart by name and path only.
"""

import hashlib
import secrets
from typing import TYPE_CHECKING, Any

from manthan.manager.config.resolve import ManthanConfig
from manthan.manager.tiers.sealed import derived, keys_of
from manthan.vllm_hooks.adapters import Adapters
from manthan.vllm_hooks.http.hints import CONTENT, Asked, hints_of

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.kv_hints import KvHintsEnvelope

MARK = "manthan-"
"""What all of them begin with. Nobody else has one that does: a client's that does is made anew, too."""
NBYTES = 24
PURPOSE = "cache salts of tenants"


class Salts:
    """key: of the digest that salts are, 64 bytes at most: who has it not cannot tell a tenant or a salt by them.
    isolate: whether tenants have salts of their own; in any case nobody comes by another's, which another engine may
    have stored by."""

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
        """Return the salt of a request with these kv_transfer_params, kv_hints, salt and LoRA adapter.

        Args:
            is_known: False if media of the prompt are missing, so that no other engine may have the request's blocks.
        """
        salted = self._of_tenant(params, envelope, salt)
        parts = ["" if adapter is None else self.adapters.content(adapter), "" if is_known else self._unknown]
        content = "-".join(filter(None, parts))
        return f"{CONTENT}{content}/{salted or ''}" if content else salted

    def _of_tenant(self, params: Any, envelope: "KvHintsEnvelope | None", salt: str | None) -> str | None:
        tenant = hints_of(Asked(params, envelope, salt)).tenant if self._isolate else ""
        own = salt or ""
        if not tenant and not own.startswith(MARK):
            return salt
        parts = [part.encode("utf-8", "surrogatepass") for part in (tenant, own)]
        said = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
        return MARK + hashlib.blake2b(said, digest_size=NBYTES, key=self._key).hexdigest()


def salts_of(config: ManthanConfig) -> Salts:
    """Those of an engine; where codes outlive it, they are the same at its next start, and on all that share them."""
    store, isolate = config.tiers, config.tenants.isolate
    if keys := keys_of(config.sealing):
        return Salts(derived(keys[-1], PURPOSE), isolate)
    return Salts(PURPOSE.encode() if store.is_lasting else secrets.token_bytes(32), isolate)
