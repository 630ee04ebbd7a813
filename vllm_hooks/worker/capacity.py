"""Bytes of the tiers, which hold compressed blocks: room for the blocks, and memory that vLLM must leave free."""

import math
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, NamedTuple

from vllm.logger import init_logger
from vllm.third_party.pynvml import NVMLError

from manthan.manager.config.model import ManthanConfig, TiersConfig
from manthan.manager.config.resolve import ConfigError, human_bytes
from manthan.manager.session.blocks import FrontTier, MemoryShape
from manthan.manager.tiers import arena, disk
from manthan.manager.tiers.arena import GRANULE
from manthan.manager.tiers.sealed import OVERHEAD
from manthan.vllm_hooks.transfer_config import from_vllm_config, is_on_gpu

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.manthan")

STAGING_BYTES = 32 << 20  # least size of a GPU's staging buffer for stores, and of one for prefetches
COPIES_BYTES = 128 << 20
"""Limit on a rank's bytes of blocks copied to be encoded on the CPU, unless one block is larger."""
RESTORE_STAGING_BYTES = 128 << 20
"""Least size of a staging buffer for restores: large, because each filling costs time of the model's thread."""
RESTORE_STAGINGS = 2  # number of staging buffers for restores: one is filled while the other is decoded
PRIMARY_BYTES = 256 << 20
"""Least pinned RAM of a rank in front of a disk, Redis or another rank's tiers, if the codec runs on a GPU."""
CPU_ENCODE_THREADS = 4
"""Number of threads that encode on the CPU if the KV cache is on a GPU. With vLLM's CPU build, one thread does."""
STAGINGS_BYTES = 2 * STAGING_BYTES + RESTORE_STAGINGS * RESTORE_STAGING_BYTES


class TierBytes(NamedTuple):
    """Bytes of a rank's tiers in GPU memory (device) and in all else (host); 0 for none."""

    device: int
    host: int

    @classmethod
    def of_a_rank(cls, store: TiersConfig, ranks: int) -> "TierBytes":
        if store.kind == "device":
            return cls(store.max_bytes // ranks, store.host_bytes // ranks)
        return cls(0, store.max_bytes // ranks)

    def usable(self, sizes: Collection[int]) -> int:
        """Return the bytes that blocks of these sizes can surely take.

        With several sizes, a part of each tier stays free, so that free extents stay large. With two tiers, room for
        one block of the largest size stays free, because no block is split between the tiers.
        """
        device, host = (tier - tier % GRANULE for tier in self)
        if len(sizes) > 1:
            device, host = arena.usable(device), arena.usable(host)
        return max(0, device + host - max(sizes)) if device and host else device + host


def usable_nbytes(vllm_config: "VllmConfig", store: TiersConfig, ranks: int, shape: MemoryShape) -> int:
    """Return the bytes that blocks can surely take, on all ranks together. ranks: number of ranks that store blocks."""
    if store.places[-1] == "disk":
        return disk.usable(store.max_bytes // ranks) * ranks
    sizes = {nbytes // ranks for nbytes in shape.sizes}
    if not is_on_gpu(vllm_config) or store.is_lasting:  # only a GPU codec's own tiers need large extents
        sizes = {max(sizes)}
    return TierBytes.of_a_rank(store, ranks).usable(sizes) * ranks


def room_in(config: ManthanConfig) -> Callable[[int], int]:
    """Return a function from the size of a compressed block to the bytes that the block takes of the budget."""
    room = disk.room if config.tiers.places[-1] == "disk" else arena.room
    return (lambda nbytes: room(nbytes + OVERHEAD)) if config.sealing.key_file else room


def fast_tiers(store: TiersConfig, ranks: int) -> list[FrontTier]:
    """Return the tiers in front of the last tier, the fastest first. ranks: number of ranks that store blocks."""
    if store.kind == "device" and store.host_bytes:
        return [FrontTier(int(store.max_bytes), fills_on_read=False)]
    budgets = [store.front_bytes] if store.front_bytes else []
    if store.disk_bytes:
        budgets.append(disk.usable(store.disk_bytes // ranks) * ranks)
    return [FrontTier(int(nbytes), fills_on_read=True) for nbytes in budgets]


def _device_nbytes() -> int:
    """Return the bytes of a GPU's memory, its own or shared; with vLLM's CPU build, those of NUMA node 0."""
    import torch
    from vllm.platforms import current_platform

    try:
        return int(current_platform.get_device_total_memory())
    except NVMLError:  # NVML does not know it where CPU and GPU share one memory
        return torch.cuda.get_device_properties(0).total_memory


def share_memory(vllm_config: "VllmConfig") -> None:
    """Set vLLM's share of the machine's memory to `memory_bytes` less what Manthan takes in RAM.

    Do nothing if `memory_bytes` is 0. Raises ConfigError if CPU and GPU have separate memories, if the KV pool has a
    configured size, or if `memory_bytes` is too small or too large.
    """
    from vllm.platforms import current_platform

    config, cache = from_vllm_config(vllm_config), vllm_config.cache_config
    budget, ranks = int(config.memory_bytes), vllm_config.parallel_config.world_size
    if not budget:
        return
    if not (current_platform.is_cpu() or current_platform.is_integrated_gpu()):
        raise ConfigError(
            "memory_bytes is for machines whose CPU and GPU share one memory, and this GPU has its own: leave it out"
        )
    if cache.kv_cache_memory_bytes:
        raise ConfigError(
            "memory_bytes decides the size of the KV pool, but --kv-cache-memory-bytes (or "
            "VLLM_CPU_KVCACHE_SPACE) gives the pool a size: use one of them"
        )
    tiers, on_gpu = config.tiers, is_on_gpu(vllm_config)
    ram = int(tiers.max_bytes if tiers.kind == "host" else tiers.host_bytes)
    if on_gpu and tiers.is_lasting:
        ram = max(ram, PRIMARY_BYTES * ranks)
    ours = ram + (0 if on_gpu else COPIES_BYTES * ranks)
    total = _device_nbytes()
    if not ours < budget <= total * ranks:
        raise ConfigError(
            f"memory_bytes is {human_bytes(budget)}: it must be more than the {human_bytes(ours)} that Manthan takes "
            f"in RAM, and at most {human_bytes(total)} for each rank"
        )
    cache.gpu_memory_utilization = math.floor((budget - ours) / ranks / total * 1e6) / 1e6
    logger.info(
        f"Manthan: of memory_bytes {human_bytes(budget)}, Manthan takes {human_bytes(ours)} in RAM, and vLLM "
        f"{human_bytes(budget - ours)}: --gpu-memory-utilization is now {cache.gpu_memory_utilization:g}"
    )


def set_gpu_memory_aside(vllm_config: "VllmConfig") -> None:
    """Lower vLLM's share of each GPU by its tier and STAGINGS_BYTES. Raises ConfigError if nothing is left."""
    if not is_on_gpu(vllm_config):
        return
    cache, store = vllm_config.cache_config, from_vllm_config(vllm_config).tiers
    ours = TierBytes.of_a_rank(store, vllm_config.parallel_config.world_size).device + STAGINGS_BYTES
    total = _device_nbytes()
    given = cache.kv_cache_memory_bytes or cache.gpu_memory_utilization * total
    if ours >= given:
        what = "--kv-cache-memory-bytes" if cache.kv_cache_memory_bytes else "--gpu-memory-utilization"
        what = "memory_bytes" if from_vllm_config(vllm_config).memory_bytes else what
        lower = ", or lower tiers.max_bytes" if ours > STAGINGS_BYTES else ""
        raise ConfigError(
            f"{what} gives vLLM {human_bytes(int(given))} of each GPU's {human_bytes(total)}, and Manthan takes "
            f"{human_bytes(ours)} out of that for compressed blocks: raise {what}{lower}."
        )
    changed = ""
    if cache.kv_cache_memory_bytes:
        cache.kv_cache_memory_bytes -= ours
    else:
        cache.gpu_memory_utilization = math.floor((given - ours) / total * 1e6) / 1e6
        changed = f": --gpu-memory-utilization is now {cache.gpu_memory_utilization:g}"
    logger.info(
        f"Manthan: {human_bytes(ours)} of each GPU's memory are set aside for compressed blocks, out of the KV pool's "
        f"share{changed}"
    )
