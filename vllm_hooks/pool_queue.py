"""vLLM's free blocks, as the manager looks at them."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import get_block_hash

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool


class PoolQueue:
    """The free queue of vLLM's block pool; see `FreeQueue`."""

    def __init__(self, pool: "BlockPool") -> None:
        self._pool = pool

    def __len__(self) -> int:
        return self._pool.get_num_free_blocks()

    def keys(self) -> Iterator[bytes | None]:
        for block in self._pool.free_block_queue.iter_blocks_after(None):
            yield None if block.block_hash is None else get_block_hash(block.block_hash)
