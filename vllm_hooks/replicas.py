"""Ranks that have the same KV, of which one stores it for all: latents (MLA)."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from manthan.vllm_hooks.transfer_config import from_vllm_config, is_on_gpu

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig

    from manthan.vllm_hooks.support import Groups


def copies_of(vllm_config: "VllmConfig", groups: "Groups") -> int:
    """How many ranks have the same blocks, each of which one of them stores for all: all ranks, or 1.

    All need to reach one store: Redis, or that of the first rank, which it serves on its machine. Memory of a GPU, and
    RAM that GPUs read themselves, are of one rank.
    """
    parallel, store = vllm_config.parallel_config, from_vllm_config(vllm_config).cold_store
    if groups.replicas == 1 or groups.replicas != parallel.world_size or not vllm_config.model_config.use_mla:
        return 1
    if store.kind == "redis":
        return groups.replicas
    is_one_machine = parallel.distributed_executor_backend == "mp" and parallel.nnodes_within_dp == 1
    is_of_a_rank = is_on_gpu(vllm_config) and not store.is_lasting
    return groups.replicas if is_one_machine and sys.platform == "linux" and not is_of_a_rank else 1


def storing(parallel: "ParallelConfig", copies: int) -> Callable[[bytes], bool]:
    """Whether this rank stores the block of a key: keys are digests, so that each has as many."""
    mine = parallel.rank % copies
    return lambda key: int.from_bytes(key[-8:], "big") % copies == mine
