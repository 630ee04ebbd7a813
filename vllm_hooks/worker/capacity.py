"""Memory of the tiers: usable bytes, and the share of RAM and GPU memory withheld from vLLM."""

import math
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, NamedTuple

from vllm.logger import init_logger

from manthan.manager.config.model import ManthanConfig, TiersConfig
from manthan.manager.config.resolve import ConfigError
from manthan.manager.session.blocks import FrontTier
from manthan.manager.tiers import arena, disk
from manthan.manager.tiers.arena import GRANULE
from manthan.manager.tiers.sealed import OVERHEAD
from manthan.vllm_hooks.telemetry.log import human_bytes
from manthan.vllm_hooks.transfer_config import from_vllm_config, is_on_gpu

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.manthan")

STAGING_BYTES = 32 << 20
"""Size of each staging buffer on the GPU for stores and for prefetches."""
COPIES_BYTES = 128 << 20
"""Most bytes of a rank's blocks copied by the CPU and not encoded yet."""
RESTORE_STAGING_BYTES = 128 << 20
"""Size of a staging buffer for restores: large, because each chunk costs time of the model's thread."""
RESTORE_STAGINGS = 2
"""Number of staging buffers for restores. The next buffer is filled during decoding."""
PRIMARY_BYTES = 256 << 20
"""Least RAM, with a GPU, of the primary tier in front of a secondary tier."""
CPU_ENCODE_THREADS = 4
"""Number of threads that encode on the CPU for a GPU, as on a GB10. vLLM's CPU build uses a single thread."""
STAGINGS_BYTES = 2 * STAGING_BYTES + RESTORE_STAGINGS * RESTORE_STAGING_BYTES
"""Size of all staging buffers."""


class TierBytes(NamedTuple):
    """Budget of each primary tier; 0 for none."""

    device: int
    host: int

    @classmethod
    def of_a_rank(cls, store: TiersConfig, ranks: int) -> "TierBytes":
        """Return the budgets of a single rank of `ranks`."""
        if store.kind == "device":
            return cls(store.max_bytes // ranks, store.host_bytes // ranks)
        return cls(0, store.max_bytes // ranks)

    def usable(self, sizes: Collection[int]) -> int:
        """Number of bytes to promise to blocks of these sizes.

        Blocks of several sizes leave a part of each tier free, so that holes stay large. A block lies in one tier.
        """
        device, host = (tier - tier % GRANULE for tier in self)
        if len(sizes) > 1:
            device, host = arena.usable(device), arena.usable(host)
        return max(0, device + host - max(sizes)) if device and host else device + host


def usable_nbytes(store: TiersConfig, ranks: int, sizes: Collection[int], in_arenas: bool) -> int:
    """Number of bytes to promise to blocks of these sizes, on all ranks together.

    Args:
        sizes: bytes of a block on each rank.
        in_arenas: True if a tier is a single range of addresses.
    """
    if store.places[-1] == "disk":
        return disk.usable(store.max_bytes // ranks) * ranks
    return TierBytes.of_a_rank(store, ranks).usable(sizes if in_arenas else {max(sizes)}) * ranks


def room_in(config: ManthanConfig) -> Callable[[int], int]:
    """Return the function from a compressed block's bytes to the most bytes of the budget."""
    room = disk.room if config.tiers.places[-1] == "disk" else arena.room
    return (lambda nbytes: room(nbytes + OVERHEAD)) if config.sealing.key_file else room


def fast_tiers(store: TiersConfig, ranks: int) -> list[FrontTier]:
    """Return the tiers in front of the last, the fastest first, on all `ranks` together."""
    if store.kind == "device" and store.host_bytes:
        return [FrontTier(int(store.max_bytes), fills_on_read=False)]
    budgets = [store.front_bytes] if store.front_bytes else []
    if store.front_disk_bytes:
        budgets.append(disk.usable(store.front_disk_bytes // ranks) * ranks)
    return [FrontTier(int(nbytes), fills_on_read=True) for nbytes in budgets]


def share_memory(vllm_config: "VllmConfig") -> None:
    """Give vLLM the rest of `memory_bytes`, without the tiers in RAM, for weights, activations and the KV pool.

    Raises ConfigError if CPU and GPU have separate memories, or for an impossible budget.
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
            "memory_bytes leaves the KV pool what is left of it, but --kv-cache-memory-bytes (or "
            "VLLM_CPU_KVCACHE_SPACE) gives the pool a size: use one of them"
        )
    tiers = config.tiers
    ram = tiers.max_bytes if tiers.kind == "host" else tiers.host_bytes
    ours = ram + (0 if is_on_gpu(vllm_config) else COPIES_BYTES * ranks)
    total = current_platform.get_device_total_memory()
    if not ours < budget <= total * ranks:
        raise ConfigError(
            f"memory_bytes is {human_bytes(budget)}: it must be more than the {human_bytes(ours)} that Manthan takes "
            f"in RAM, and no more than the machine's {human_bytes(total)} for each rank"
        )
    cache.gpu_memory_utilization = math.floor((budget - ours) / ranks / total * 1e6) / 1e6
    logger.info(
        "Manthan: of %s, %s are for compressed blocks in RAM and %s for vLLM: --gpu-memory-utilization is now %g",
        human_bytes(budget),
        human_bytes(ours),
        human_bytes(budget - ours),
        cache.gpu_memory_utilization,
    )


def set_gpu_memory_aside(vllm_config: "VllmConfig") -> None:
    """Take the tier on the device and the staging buffers out of the memory of vLLM's KV pool.

    Raises ConfigError if the remaining memory is too small.
    """
    from vllm.platforms import current_platform

    if not is_on_gpu(vllm_config):
        return
    cache, store = vllm_config.cache_config, from_vllm_config(vllm_config).tiers
    ours = TierBytes.of_a_rank(store, vllm_config.parallel_config.world_size).device + STAGINGS_BYTES
    total = current_platform.get_device_total_memory()
    given = cache.kv_cache_memory_bytes or cache.gpu_memory_utilization * total
    if ours >= given:
        what = "--kv-cache-memory-bytes" if cache.kv_cache_memory_bytes else "--gpu-memory-utilization"
        raise ConfigError(
            f"tiers.max_bytes is {human_bytes(store.max_bytes)} of GPU memory: {what} leaves vLLM only "
            f"{human_bytes(int(given))} of each GPU's {human_bytes(total)}; lower the one or raise the other."
        )
    if cache.kv_cache_memory_bytes:
        cache.kv_cache_memory_bytes -= ours
    else:
        cache.gpu_memory_utilization = math.floor((given - ours) / total * 1e6) / 1e6
    logger.info(
        "Manthan: %s of each GPU's memory are set aside for compressed blocks, out of the KV pool's share%s",
        human_bytes(ours),
        "" if cache.kv_cache_memory_bytes else f": --gpu-memory-utilization is now {cache.gpu_memory_utilization:g}",
    )
