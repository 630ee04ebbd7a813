"""vLLM's block pool, for `Talks` to use instead of the simulator's."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from talks import text_of
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_block_hash

from manthan.vllm_hooks.compat import VllmPool

TOKENS = 16


class RealPool(VllmPool):
    """Has what Talks asks of a pool besides. The first block that is taken is block 1.

    windows: number of KV cache groups besides group 0. event: as VllmPool has it.
    """

    def __init__(self, blocks: int, windows: int = 0, event: Any = None) -> None:
        self.vllm = BlockPool(blocks + 1, True, TOKENS, enable_kv_cache_events=event is not None)
        super().__init__(self.vllm, dict.fromkeys(range(windows + 1), TOKENS), event)

    def users(self, block: int) -> int:
        """Return how many references a block has."""
        return self.vllm.blocks[block].ref_cnt

    def hit(
        self, block_hashes: Iterable[bytes], serves: Callable[[int], bool] = lambda block: True, group: int = 0
    ) -> list[int]:
        """Return the blocks up to the first that is not here, or that may not be served to who asks."""
        blocks = self.lookup(group, list(block_hashes))
        return blocks[: next((at for at, one in enumerate(blocks) if one < 0 or not serves(one)), len(blocks))]

    def cache_all(self, block_ids: Sequence[int], block_hashes: Sequence[bytes], group: int = 0) -> None:
        """Enter several blocks into the prefix cache."""
        for block, block_hash in zip(block_ids, block_hashes, strict=True):
            self.cache(block, group, block_hash, len(text_of(block_hash).split()) - 1)

    def queue(self) -> str:
        """Return the last words of free blocks, the next to be overwritten first; "-" for one that holds nothing."""
        held = [block.block_hash for block in self.vllm.free_block_queue.get_all_free_blocks()]
        return " ".join("-" if name is None else text_of(get_block_hash(name)).rpartition(" ")[2] for name in held)
