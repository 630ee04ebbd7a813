"""What a block of this model weighs: in vLLM's pool, and as codes."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from manthan.codec.base import Dtype
from manthan.codec.block import BlockFormat, BlockShape
from manthan.codec.cpu.exact import EXACT
from manthan.codec.cpu.state import STATE_CODECS, StateLayout, StatePart
from manthan.codec.gpu.paged import DTYPES
from manthan.codec.model import NO_FACTS, ModelFacts
from manthan.codec.profile import Profile
from manthan.codec.registry import FALLBACK, finer_codecs, needs_profile
from manthan.codec.wht import NAME as WHT
from manthan.codec.wire import FINGERPRINT_LEN
from manthan.manager.config.model import CodecConfig, ConfigError
from manthan.manager.sessions.session import MemoryShape
from manthan.manager.tiers.arena import room
from manthan.vllm_hooks.kv_dtype import FP8

if TYPE_CHECKING:
    from manthan.vllm_hooks.support import Groups, KvCacheGroup


class Shards(NamedTuple):
    """Of a block: on so many ranks. room: what an encoded one of so many bytes takes in the cold store, that of RAM and
    GPU memory unless it is said."""

    ranks: int
    room: Callable[[int], int] = room


def block_shape(group: "KvCacheGroup") -> BlockShape:
    """One rank's block of a KV cache group."""
    if group.is_packed:
        return packed_shape(group.layer_nbytes, group.spec.block_size)
    spec = group.spec
    dim, dtype = spec.head_size - group.latent, FP8.get(group.cache_dtype) or DTYPES[spec.dtype]
    return BlockShape(group.layers, spec.num_kv_heads, spec.block_size, dim, dtype, group.latent)


def packed_shape(layer_nbytes: Sequence[int], tokens: int) -> BlockShape:
    """Of a block of bytes, which layers may have different numbers of: as many runs of a token's as all of them have in
    common, since an encoded block has no place for larger numbers. Raises ConfigError."""
    if any(nbytes % tokens for nbytes in layer_nbytes):
        raise ConfigError(
            f"a KV block of {tokens} tokens takes {list(layer_nbytes)} bytes, which are no whole ones a token."
        )
    run = math.gcd(*layer_nbytes) // tokens
    return BlockShape(1, sum(layer_nbytes) // tokens // run, tokens, run, Dtype.UINT8)


def block_format(
    codec: str, group: "KvCacheGroup", fingerprint: bytes = bytes(FINGERPRINT_LEN), facts: ModelFacts = NO_FACTS
) -> BlockFormat:
    """What one rank's encoded blocks of a KV cache group have in common."""
    return BlockFormat(codec, block_shape(group), fingerprint, group.index, facts)


def memory_shape(
    codec: CodecConfig, group: "KvCacheGroup", shards: Shards, profile: Profile | None = None
) -> MemoryShape:
    """A block's worth, all ranks together. profile: that of the codec, if it takes one. Raises ConfigError."""
    tokens, count, room = group.spec.block_size, shards.ranks, shards.room
    facts = [with_states(codec.name, group, rank_facts(profile, group, rank, count)) for rank in range(count)]
    made = [block_format(codec.name, group, facts=of_rank) for of_rank in facts]
    bounds = {
        exact: count * max(room(form.max_nbytes(exact)) for form in made) for exact in exact_counts(codec, tokens)
    }
    typical = sum(room(form.expected_nbytes(0)) for form in made)
    return MemoryShape(tokens, group.page_nbytes * shards.ranks, bounds, group.index, typical=typical)


def with_windows(
    shapes: Sequence[MemoryShape], codec: CodecConfig, groups: "Groups", shards: Shards
) -> list[MemoryShape]:
    """The same with what blocks of other groups take, of which each rank has its own. shapes: of the configured codec,
    and of those that may follow."""
    names = [codec.name, *finer_codecs(codec.name)]
    tokens = {window.group.index: window.group.spec.block_size for window in groups.windows}
    hot = {window.group.index: window.group.page_nbytes * shards.ranks for window in groups.windows}
    settled = frozenset(window.group.index for window in groups.windows if window.group.is_packed)
    lossless = frozenset(
        window.group.index for window in groups.windows if codec_beside(codec.name, window.group, codec.state) == EXACT
    )
    made = []
    for at, shape in enumerate(shapes):
        beside = {w.group.index: _bounds(codec, names[at : at + 1], w.group, shards) for w in groups.others}
        if not groups.is_whole:
            beside[groups.chain.index] = shape.bounds
            shape = replace(shape, group=None, bounds=dict.fromkeys(shape.bounds, 0), hot_nbytes=0)
        shape = replace(shape, settled=settled, lossless=lossless)
        made.append(replace(shape, beside=beside, hot_beside=hot, tokens_beside=tokens))
    return made


def _bounds(codec: CodecConfig, names: Sequence[str], group: "KvCacheGroup", shards: Shards) -> Mapping[int, int]:
    """Of blocks of another group in this codec, or, without one, with all tokens exact."""
    if not names and not group.is_packed:
        return fallback_shapes(codec.model_copy(update={"name": FALLBACK}), group, shards)[-1].bounds
    name = codec_beside(names[0] if names else EXACT, group, codec.state)
    found = memory_shape(codec.model_copy(update={"name": name}), group, shards).bounds
    return {0: found[0]} if group.is_packed else found


def codec_beside(name: str, group: "KvCacheGroup", state: str) -> str:
    """What blocks of another group than that of chains are encoded in: a profile is of those, and states have codecs of
    their own. state: what the configuration says of them."""
    if group.is_packed:
        return STATE_CODECS.get(state, EXACT) if group.is_state else EXACT
    return WHT if needs_profile(name) else name


def with_states(codec: str, group: "KvCacheGroup", facts: ModelFacts) -> ModelFacts:
    """The same, for a codec of states with where they lie in the group's blocks."""
    return replace(facts, state=_state_layout(group)) if codec in STATE_CODECS.values() else facts


def _state_layout(group: "KvCacheGroup") -> StateLayout:
    """The recurrent state is a matrix for each head, behind a convolution's if there is one; everything else, such as
    Mamba 1's, which is none, is kept exact."""
    spec: Any = group.spec
    parts = []
    for at, (shape, dtype) in enumerate(zip(spec.shapes, spec.dtypes, strict=True)):
        is_recurrent = len(shape) == 3 and at == min(1, len(spec.shapes) - 1) and dtype in DTYPES
        nbytes = math.prod(shape) * dtype.itemsize
        parts.append(StatePart(nbytes, shape[-1], DTYPES[dtype]) if is_recurrent else StatePart(nbytes))
    return StateLayout(group.layers, group.layer_nbytes[0], tuple(parts))


def rank_facts(profile: Profile | None, group: "KvCacheGroup", rank: int, ranks: int) -> ModelFacts:
    """What a profile tells of a rank's layers and heads. Raises ConfigError for one of another number of layers."""
    if profile is None:
        return NO_FACTS
    if profile.info.layers != group.layers:
        raise ConfigError(
            f"the profile of {profile.info.model} is of {profile.info.layers} layers, but {group.layers} have a KV "
            "cache of their own: use a codec without a profile."
        )
    return ModelFacts(profile.info.rope, profile.for_rank(rank, ranks))


def fallback_shapes(
    codec: CodecConfig, group: "KvCacheGroup", shards: Shards, profile: Profile | None = None
) -> list[MemoryShape]:
    """The same in the codecs that the guard may choose instead, and with all tokens exact."""
    finer = [
        replace(memory_shape(codec.model_copy(update={"name": name}), group, shards), codec=name)
        for name in finer_codecs(codec.name)
    ]
    tokens = group.spec.block_size
    whole = shards.ranks * shards.room(block_format(EXACT, group).max_nbytes(tokens))
    exact = memory_shape(codec, group, shards, profile)
    return [*finer, replace(exact, typical=0, bounds=dict.fromkeys({*exact.bounds, tokens}, whole))]


def exact_counts(codec: CodecConfig, block_tokens: int) -> set[int]:
    """Numbers of a block's first tokens that may have to be kept exact: none, what is left of the sink, or all of them,
    in a head that sessions share."""
    return {0, codec.sink_tokens % block_tokens, block_tokens}
