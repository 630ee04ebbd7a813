"""What tests do inside the worker of an engine on a GPU; see `Engine.on_worker`."""

from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group


def engine() -> Any:
    return get_kv_transfer_group().worker.engine


def engine_name(worker: Any) -> str:
    return type(engine()).__name__


def tiers(worker: Any) -> dict[str, tuple[int, int, int]]:
    """For each tier: blocks in it, bytes that are free, bytes in all."""
    both = {"device": engine().tiers.device, "host": engine().tiers.host}
    return {name: (len(t.blocks()), t.arena.available, t.arena.nbytes) for name, t in both.items() if t is not None}


def codecs(worker: Any) -> list[str]:
    """Return the codecs of the blocks in all tiers."""
    blocks = [found for tier in engine().tiers.all for found in tier.blocks().items()]
    return sorted({engine().codecs[group][block.codec].format.codec for (group, _), block in blocks})


def damage(worker: Any) -> None:
    """One byte changes of one block without exact tokens."""
    found = [(tier, block) for tier in engine().tiers.all for block in tier.blocks().values() if block.exact == 0]
    tier, block = found[len(found) // 3]
    tier.buffer[block.extents[0].start + 1000] ^= 1
