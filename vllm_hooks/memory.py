"""Sizes of a model's blocks, by KV cache group: bytes in vLLM's pool, and bytes of the compressed block."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from manthan.codec.base import Dtype
from manthan.codec.block import BlockFormat, BlockShape
from manthan.codec.cpu.exact import EXACT
from manthan.codec.cpu.state import STATE_CODECS, StateLayout, StatePart
from manthan.codec.gpu.paged import DTYPES
from manthan.codec.model import NO_FACTS, ModelFacts
from manthan.codec.profile import LEVELS, Profile
from manthan.codec.registry import FALLBACK, finer_codecs, needs_profile
from manthan.codec.wht import NAME as WHT
from manthan.codec.wire import FINGERPRINT_LEN
from manthan.manager.config.model import CodecConfig, ConfigError
from manthan.manager.session.blocks import HIGH, GroupShape, Level, MemoryShape
from manthan.manager.session.blocks import LEVELS as DEFAULT_LEVELS
from manthan.manager.tiers.arena import room
from manthan.vllm_hooks.groups import Groups, KvCacheGroup
from manthan.vllm_hooks.support import FP8

HIGH_RATIO = 9
"""Largest compression ratio at which blocks without refinements serve requests with the hint `quality: high`.

Refinements, parts of a compressed block that make the KV finer, can be cut off. A block's level is their number.
"""
MOST = 0xFFFF  # largest dimension in a compressed block's header


class Shards(NamedTuple):
    """Ranks of an engine, each with a shard (its part) of a block."""

    ranks: int
    room: Callable[[int], int] = room  # bytes that a compressed shard takes of a tier's budget, by the shard's bytes
    can_trim: bool = True  # True if tiers can cut refinements off
    copies: int = 1  # number of consecutive ranks with the same shard, which only the first of them stores

    @property
    def stored(self) -> int:
        """Number of shards of a block that are stored."""
        return self.ranks // self.copies


def block_shape(group: KvCacheGroup) -> BlockShape:
    """Return the shape, for codecs, of a rank's block of a KV cache group."""
    if group.is_packed:
        return packed_shape(group.layer_nbytes, group.spec.block_size)
    spec, raw = group.spec, block_shape(group.opaque) if group.opaque else None
    dim, dtype = spec.head_size - group.latent, FP8.get(group.cache_dtype)
    if group.scales is not None:
        dim, dtype = group.scales.row - group.latent, Dtype.FLOAT8_E4M3
    dtype = dtype or DTYPES[spec.dtype]
    return BlockShape(group.layers, spec.num_kv_heads, group.states, dim, dtype, group.latent, raw, group.scales)


def packed_shape(layer_nbytes: Sequence[int], tokens: int) -> BlockShape:
    """Return a shape with all bytes of a block that is stored as bytes. Its head size is at most MOST."""
    common = math.gcd(*layer_nbytes)
    rows = math.gcd(common, tokens)
    run = next(run for run in range(min(common // rows, MOST), 0, -1) if common // rows % run == 0)
    return BlockShape(1, sum(layer_nbytes) // rows // run, rows, run, Dtype.UINT8)


def block_format(
    codec: str,
    group: KvCacheGroup,
    fingerprint: bytes = bytes(FINGERPRINT_LEN),
    facts: ModelFacts = NO_FACTS,
    first_head: int = 0,
) -> BlockFormat:
    """Return the format of a rank's compressed blocks of a KV cache group."""
    return BlockFormat(codec, block_shape(group), fingerprint, group.index, facts, first_head)


def memory_shapes(
    codec: CodecConfig, groups: Groups, shards: Shards, profile: Profile | None = None
) -> list[MemoryShape]:
    """Return the sizes of blocks in the configured codec, then in each codec that the guard may choose instead.

    The guard measures losses, and may choose a finer codec or, last, codec exact for all tokens. Raises ConfigError.
    """
    group, finer = groups.main, finer_codecs(codec.name)
    mains = [group_shape(codec, group, shards, profile)]
    mains += [
        replace(group_shape(codec.model_copy(update={"name": name}), group, shards), codec=name) for name in finer
    ]
    mains.append(_all_exact(mains[0], group, shards))
    levels: Sequence[Level] = DEFAULT_LEVELS
    if profile is not None and profile.info.divergences:
        told = zip((*profile.info.divergences, 0.0), profile.info.bits, strict=True)
        levels = tuple(Level(divergence, 16 / bits) for divergence, bits in told)
    shapes = []
    for main, name in zip(mains, [codec.name, *finer, None], strict=True):
        others = {each.group.index: _other(codec, name, main.codec, each.group, shards) for each in groups.others}
        shapes.append(MemoryShape({group.index: main} | others, group.index, groups.is_whole, levels))
    return shapes


def group_shape(codec: CodecConfig, group: KvCacheGroup, shards: Shards, profile: Profile | None = None) -> GroupShape:
    """Return the sizes of a group's blocks in the codec `codec.name`. Raises ConfigError."""
    count, room = shards.ranks, shards.room
    firsts = range(0, count, shards.copies)
    facts = [with_states(codec.name, group, rank_facts(profile, group, rank, count)) for rank in firsts]
    made = [block_format(codec.name, group, facts=of_rank) for of_rank in facts]
    bounds = {
        exact: shards.stored * max(room(form.max_nbytes(of_rank)) for form in made)
        for exact, of_rank in exact_counts(codec, group).items()
    }
    typical = sum(room(form.expected_nbytes(0)) for form in made)
    nbytes, level = group.page_nbytes * count, LEVELS.get(codec.name, 0)
    shape = GroupShape(group.tokens, nbytes, bounds, typical, is_lossless=codec.name == EXACT)
    if needs_profile(codec.name):
        return replace(shape, levels=level + 1) if shards.can_trim else replace(shape, level=level)
    is_high = group.page_nbytes * shards.stored <= HIGH_RATIO * shape.cold_nbytes
    return replace(shape, level=HIGH if is_high else 0)


def _all_exact(shape: GroupShape, group: KvCacheGroup, shards: Shards) -> GroupShape:
    whole = shards.stored * shards.room(block_format(EXACT, group).max_nbytes(group.states))
    return replace(shape, typical=0, bounds=dict.fromkeys({*shape.bounds, shape.tokens}, whole))


def _other(codec: CodecConfig, name: str | None, chosen: str, group: KvCacheGroup, shards: Shards) -> GroupShape:
    """Return the sizes of blocks of a group that is not the main group (`Groups.main`).

    name: main group's codec; None to store every token with codec exact. chosen: value for `GroupShape.codec`.
    """
    own = codec.model_copy(update={"name": codec_of_other(name or FALLBACK, group, codec.state)})
    shape = group_shape(own, group, shards)
    if group.is_packed:
        return replace(shape, bounds={0: shape.bounds[0]})
    if name is None:
        shape = _all_exact(shape, group, shards)
    return replace(shape, codec=chosen, is_lossless=codec_of_other(codec.name, group, codec.state) == EXACT)


def codec_of_other(name: str, group: KvCacheGroup, state: str) -> str:
    """Return the codec of a group that is not the main group. name: codec of the main group.

    A profile (statistics that some codecs need) is of the main group only. Recurrent states have codecs of their own.
    state: `codec.state` of the configuration.
    """
    if group.is_packed:
        return STATE_CODECS.get(state, EXACT) if group.is_state else EXACT
    return WHT if needs_profile(name) else name


def with_states(codec: str, group: KvCacheGroup, facts: ModelFacts) -> ModelFacts:
    """Return `facts`, and with them the layout of the group's recurrent states if the codec is for such states.

    That codec encodes states that are matrices for each head. It keeps other states, such as a convolution's, exact.
    """
    if codec not in STATE_CODECS.values():
        return facts
    spec: Any = group.spec
    parts = []
    for at, (shape, dtype) in enumerate(zip(spec.shapes, spec.dtypes, strict=True)):
        is_recurrent = len(shape) == 3 and at == min(1, len(spec.shapes) - 1) and dtype in DTYPES
        nbytes = math.prod(shape) * dtype.itemsize
        parts.append(StatePart(nbytes, shape[-1], DTYPES[dtype]) if is_recurrent else StatePart(nbytes))
    return replace(facts, state=StateLayout(group.layers, group.layer_nbytes[0], tuple(parts)))


def rank_facts(profile: Profile | None, group: KvCacheGroup, rank: int, ranks: int) -> ModelFacts:
    """Return the facts of a profile for a rank. Raises ConfigError if the profile has another number of layers."""
    if profile is None:
        return NO_FACTS
    if profile.info.layers != group.layers:
        raise ConfigError(
            f"the profile of {profile.info.model} is of {profile.info.layers} layers, but {group.layers} have a KV "
            "cache of their own: use a codec without a profile."
        )
    return ModelFacts(profile.info.rope, profile.for_rank(rank, ranks))


def exact_counts(codec: CodecConfig, group: KvCacheGroup) -> dict[int, int]:
    """Return each possible number of a block's first tokens that are stored by codec exact.

    Each is mapped to the most states (entries of the cache) that a rank can have of the tokens. The exact tokens are:
    none; those of a session's first `codec.sink_tokens` tokens in the block; or all, if sessions share the block.
    """
    counts = 0, codec.sink_tokens % group.tokens, group.tokens
    return {exact: group.first_states(exact) for exact in counts}
