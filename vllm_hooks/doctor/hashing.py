"""How vLLM names blocks: the same in all processes that are to find the same codes."""

from manthan.manager.config.model import ColdStoreConfig
from manthan.manager.doctor.finding import Finding, Mark
from manthan.vllm_hooks.support import hash_refusal

HASH = "block hashes"


def check_hashing(store: ColdStoreConfig, algorithm: str) -> Finding:
    """algorithm: as --prefix-caching-hash-algo names it."""
    if why := hash_refusal(store, algorithm):
        return Finding(HASH, Mark.WRONG, f"{why}.")
    if not store.is_lasting:
        return Finding(HASH, Mark.OK, f"{algorithm}; kind {store.kind} is of one engine alone, for which any will do.")
    return Finding(HASH, Mark.OK, f"{algorithm} names a block alike in every process.")
