"""What tests do inside the worker of an engine on a GPU; see `Engine.on_worker`."""

import hashlib
from typing import Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group

from manthan.codec.gpu.paged import PagedLayout
from manthan.manager.stores.arena import room
from manthan.vllm_hooks.worker.blocks import DeviceMemory


def path() -> Any:
    return get_kv_transfer_group().worker.path


def path_name(worker: Any) -> str:
    return type(path()).__name__


def blocks_name(worker: Any) -> str:
    """What encodes, where the path has threads."""
    [blocks] = path().blocks.values()
    return type(blocks).__name__


def codec() -> Any:
    """What encodes the blocks of chains on the GPU."""
    return next(iter(path().codecs.values()))


def layout() -> PagedLayout:
    if hasattr(path(), "tiers"):
        return codec().layout
    [blocks] = path().blocks.values()
    return blocks.codec.layout if hasattr(blocks, "codec") else blocks._memory._layout


def digests(worker: Any, tokens: int) -> list[str]:
    """Of the first tokens of each block of the pool, in all layers."""
    torch.cuda.synchronize()
    memory, blocks = DeviceMemory(layout()), len(layout().caches[0])
    both = ([part[:, :, :tokens].tobytes() for part in memory.gather(block)] for block in range(blocks))
    return [hashlib.sha256(keys + values).hexdigest() for keys, values in both]


def stored(worker: Any) -> int:
    """Bytes in the rank's tiers, or in RAM."""
    return path().tiers.used if hasattr(path(), "tiers") else path().store.used


def tiers(worker: Any) -> dict[str, tuple[int, int, int]]:
    """For each tier: blocks in it, bytes that are free, bytes in all."""
    both = {"device": path().tiers.device, "host": path().tiers.host}
    return {name: (len(t), t.arena.available, t.arena.nbytes) for name, t in both.items() if t is not None}


def in_flight(worker: Any) -> int:
    """Bytes of the tiers that are taken and hold no block."""
    if not hasattr(path(), "tiers"):
        return 0
    blocks = [block for tier in path().tiers.all for block in tier.blocks().values()]
    return path().tiers.used - sum(room(block.nbytes) for block in blocks)


def damage(worker: Any, exact: int) -> None:
    """One byte changes of one block with so many exact tokens."""
    if hasattr(path(), "tiers"):
        found = [(tier, block) for tier in path().tiers.all for block in tier.blocks().values() if block.exact == exact]
        tier, block = found[len(found) // 3]
        tier.codes[block.extents[0].start + 1000] ^= 1
        return
    [blocks] = path().blocks.values()
    store, most = path().store, blocks.format.max_nbytes(exact)
    least = most if exact else 0  # codes may take less than their bound
    found = [(name, kept) for name, kept in store._blocks.items() if least <= kept.nbytes <= most]
    (group, key), _ = found[len(found) // 3]
    [buf] = store.read(group, [key])
    buf[1000] ^= 1
    store.put_all(group, {key: buf})
