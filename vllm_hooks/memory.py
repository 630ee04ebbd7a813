"""What a block of this model weighs: as bf16 in vLLM's pool, and as codes."""

from dataclasses import replace
from typing import TYPE_CHECKING

from manthan.codec.block import BlockFormat, BlockShape
from manthan.codec.cpu.exact import EXACT
from manthan.codec.gpu.paged import DTYPES
from manthan.codec.model import NO_FACTS, ModelFacts
from manthan.codec.registry import finer_codecs
from manthan.codec.wire import FINGERPRINT_LEN
from manthan.manager.config.model import CodecConfig
from manthan.manager.sessions.session import MemoryShape
from manthan.manager.stores.arena import room

if TYPE_CHECKING:
    from manthan.vllm_hooks.support import Group


def block_shape(group: "Group") -> BlockShape:
    """One rank's block of a KV cache group."""
    spec = group.spec
    return BlockShape(group.layers, spec.num_kv_heads, spec.block_size, spec.head_size, DTYPES[spec.dtype])


def block_format(
    codec: str, group: "Group", fingerprint: bytes = bytes(FINGERPRINT_LEN), facts: ModelFacts = NO_FACTS
) -> BlockFormat:
    """What one rank's encoded blocks of a KV cache group have in common."""
    return BlockFormat(codec, block_shape(group), fingerprint, group.index, facts)


def memory_shape(codec: CodecConfig, group: "Group", ranks: int) -> MemoryShape:
    """A block's worth, all ranks together."""
    made, tokens = block_format(codec.name, group), group.spec.block_size
    bounds = {exact: ranks * room(made.max_nbytes(exact)) for exact in exact_counts(codec, tokens)}
    return MemoryShape(tokens, group.spec.page_size_bytes * group.layers * ranks, bounds, group.index)


def fallback_shapes(codec: CodecConfig, group: "Group", ranks: int) -> list[MemoryShape]:
    """The same in the codecs that the guard may choose instead, and with all tokens exact."""
    finer = [
        replace(memory_shape(codec.model_copy(update={"name": name}), group, ranks), codec=name)
        for name in finer_codecs(codec.name)
    ]
    tokens = group.spec.block_size
    whole = ranks * room(block_format(EXACT, group).max_nbytes(tokens))
    exact = memory_shape(codec, group, ranks)
    return [*finer, replace(exact, bounds=dict.fromkeys({*exact.bounds, tokens}, whole))]


def exact_counts(codec: CodecConfig, block_tokens: int) -> set[int]:
    """How many of a block's first tokens may have to be kept exact: none, what is left of the sink, or all of them."""
    whole = codec.window_tokens > 0 or codec.sink_tokens >= block_tokens
    return {0, codec.sink_tokens % block_tokens, *([block_tokens] if whole else [])}
