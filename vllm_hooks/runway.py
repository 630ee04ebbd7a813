"""How far vLLM is from overwriting KV that exists nowhere else."""

from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import get_block_hash

from manthan.manager.block_table import BlockTable
from manthan.manager.session import CodeState

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool


class Runway:
    """The free blocks that vLLM takes before it comes to one worth keeping.

    vLLM takes free blocks from the head of its queue, so what counts is not how many of them are worthless but how many
    stand before the first that is not. Walking the queue is linear; it is walked `ahead` blocks far, and again only
    when as many may have been taken that fewer are left than are asked for.
    """

    def __init__(self, pool: "BlockPool", blocks: BlockTable, ahead: int) -> None:
        self._pool, self._blocks, self._ahead = pool, blocks, ahead
        self._left = 0

    def taken(self, at_most: int) -> None:
        """vLLM may have taken so many blocks out of the queue."""
        self._left -= at_most

    def forget(self) -> None:
        """Blocks in the queue may be worth keeping now that were not before."""
        self._left = 0

    def length(self, wanted: int) -> int:
        """Blocks before the first one worth keeping; only exact below `wanted`."""
        if not (self._blocks.exposed or self._blocks.queued):
            return self._pool.get_num_free_blocks()
        if self._left < wanted:
            self._left = self._walk(max(wanted, self._ahead))
        return self._left

    def _walk(self, limit: int) -> int:
        for count, free in enumerate(self._pool.free_block_queue.iter_blocks_after(None)):
            if count == limit or (free.block_hash is not None and self._keeps(get_block_hash(free.block_hash))):
                return count
        return self._pool.get_num_free_blocks()

    def _keeps(self, key: bytes) -> bool:
        block = self._blocks.get(key)
        return block is not None and (block.exposed or block.code is CodeState.QUEUED)
