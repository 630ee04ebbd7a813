"""KV cache groups of a model: the form in which each is stored, and the blocks that a resume point needs.

A resume point is a length of a session at which every stored group has the blocks that a request needs to go on.
`SPECS` has an entry for each class of vLLM's KV cache specs. A group whose layout no codec knows is stored as bytes.
"""

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple, TypeAlias

from vllm.config import CacheConfig, VllmConfig
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    SparseCacheRole,
)

from manthan.codec.block import Scales
from manthan.codec.gpu.paged import DTYPES
from manthan.manager.config.model import ManthanConfig
from manthan.manager.transfer import Transfer
from manthan.vllm_hooks.compat import manager_of
from manthan.vllm_hooks.settled import AS_THEY_ARE
from manthan.vllm_hooks.support import DS_MLA, E4M3, FP8, Latents, UnsupportedError, blocks_computed_again, is_packed
from manthan.vllm_hooks.transfer_config import from_vllm_config

NO_LATENTS = Latents()
UNIT = 16
"""Number of bytes that kernels copy at once. A layer's bytes in `opaque` must be a multiple of this."""
EVERY = 1 << 40
"""Reach of a layer with full attention, in tokens: more than any context. See `SpecEntry`."""


class StoredAs(StrEnum):
    """Form in which a KV cache group's blocks are stored."""

    CODED = "coded"  # by a codec, if codecs know the layers' layout; else as bytes
    BYTES = "bytes"
    NOTHING = "nothing"  # not stored, because vLLM does not look for such blocks in the prefix cache
    REFUSED = "refused"  # not stored, although requests need the blocks: the engine's start fails with UnsupportedError


Coded: TypeAlias = tuple[int, Scales | None]  # layout that codecs know: `latent` and `scales` of `KvCacheGroup`


class SpecEntry(NamedTuple):
    """Storage of the groups whose specs are of one class. Each of `layouts` returns the layout if a codec knows it.

    reach: takes a spec, and returns the number of last tokens whose KV a layer reads for a token, that token included.
    """

    stored: StoredAs
    reach: Callable[[Any], int] = lambda spec: EVERY
    layouts: tuple[Callable[[Any, str, Latents], Coded | None], ...] = ()


def _keys_and_values(spec: Any, dtype: str, latents: Latents) -> Coded | None:
    """Return the layout of keys and values, if a block has equally many numbers for both, in a known dtype."""
    heads = 2 * spec.num_kv_heads * spec.block_size * spec.head_size * spec.dtype.itemsize
    is_known = dtype in FP8 or spec.dtype in DTYPES
    fits = is_known and spec.head_size_v == spec.head_size and spec.unpadded_page_size_bytes == heads
    return (0, None) if fits else None


def _latents(spec: Any, dtype: str, latents: Latents) -> Coded | None:
    """Return the layout of MLA: for each token a latent, then the key's part with RoPE, in the spec's dtype or fp8."""
    nbytes = spec.block_size * spec.head_size * spec.dtype.itemsize
    is_known = spec.dtype.itemsize == 1 if dtype in FP8 else spec.dtype in DTYPES
    is_index = getattr(spec, "cache_role", None) is SparseCacheRole.INDEXER
    is_latent = 0 < latents.numbers < spec.head_size == sum(latents)
    fits = is_known and is_latent and not is_index and spec.page_size_bytes == nbytes
    return (latents.numbers, None) if fits else None


def _rows_of_656(spec: Any, dtype: str, latents: Latents) -> Coded | None:
    """Return layout fp8_ds_mla of DeepSeek V3.2. A token has 656 bytes: 512 fp8, 4 float32 scales, 64 bf16 for RoPE."""
    is_known = dtype == DS_MLA and latents.numbers == 512 and spec.state_content_bytes == 656
    fits = is_known and spec.page_size_bytes == spec.block_size * 656
    return (512, Scales(row=656, piece=128, nbytes=4, stride=144, place=0, rope_at=16)) if fits else None


def _states_of_584(spec: Any, dtype: str, latents: Latents) -> Coded | None:
    """Return layout fp8_ds_mla of DeepSeek V4. A state, for four tokens, has 448 numbers in fp8, 64 in bf16 for RoPE.

    Behind all states of a block come 8 bytes for each state: the exponents of seven scales, and a 0. Padding follows.
    """
    is_known = dtype == DS_MLA and spec.state_content_bytes == 584 and spec.tokens_per_state == 4
    fits = is_known and spec.head_size == 512 and spec.page_size_bytes >= spec.block_size // 4 * 584
    return (448, Scales(row=576, piece=64, nbytes=1, stride=8, place=2, rope_at=0)) if fits else None


def _window(spec: Any) -> int:
    return int(spec.sliding_window + spec.extra_retained_tokens)


SPECS: Mapping[str, SpecEntry] = {
    "FullAttentionSpec": SpecEntry(StoredAs.CODED, layouts=(_keys_and_values,)),
    "RSWASpec": SpecEntry(StoredAs.CODED, layouts=(_keys_and_values,)),
    "SinkFullAttentionSpec": SpecEntry(StoredAs.CODED, layouts=(_keys_and_values,)),
    "MLAAttentionSpec": SpecEntry(StoredAs.CODED, layouts=(_latents, _rows_of_656, _states_of_584)),
    "HiddenStateCacheSpec": SpecEntry(StoredAs.BYTES),
    "SlidingWindowSpec": SpecEntry(StoredAs.CODED, _window, (_keys_and_values,)),
    "SlidingWindowMLASpec": SpecEntry(StoredAs.CODED, _window, (_latents,)),
    "ChunkedLocalAttentionSpec": SpecEntry(StoredAs.CODED, lambda spec: spec.attention_chunk_size, (_keys_and_values,)),
    "MambaSpec": SpecEntry(StoredAs.CODED, lambda spec: 1),  # as bytes, which `codec.state` encodes
    "CircularBufferSpec": SpecEntry(StoredAs.NOTHING),
    "EncoderOnlyAttentionSpec": SpecEntry(StoredAs.NOTHING),
    "HiSparseHotSpec": SpecEntry(StoredAs.NOTHING),
    "HiSparseResidentSpec": SpecEntry(StoredAs.NOTHING),
    "CrossAttentionSpec": SpecEntry(StoredAs.REFUSED),
}
"""Entries by the name of vLLM's class of specs. Names, because no release has all classes."""


def entry_of(spec: KVCacheSpec) -> SpecEntry | None:
    """Return the entry of the spec's class, or else of the nearest base class that has one; None without any."""
    names = [each.__name__ for each in type(spec).__mro__]
    found = next((SPECS[name] for name in names if name in SPECS), None)
    if found is None or names[0] in SPECS or found.stored is not StoredAs.CODED:
        return found
    return found._replace(stored=StoredAs.BYTES)  # the derived class may have another layout


class Context(NamedTuple):
    """Decode context parallelism: runs of `run` consecutive tokens are dealt round-robin to `ranks` ranks."""

    ranks: int = 1
    run: int = 1

    def first_tokens(self, tokens: int) -> int:
        """Return the most tokens, in whole runs, that any rank can have of a session's first `tokens` tokens."""
        return -(-tokens // (self.run * self.ranks)) * self.run


ALONE = Context()


@dataclass(frozen=True)
class KvCacheGroup:
    """KV cache group that is stored. A codec encodes the numbers of coded layers. Other layers are kept as bytes."""

    index: int  # among vLLM's groups
    spec: Any  # vLLM's spec of the coded layers; of the first layer if there are none
    layers: int  # number of coded layers, or of all layers if there are none
    names: Sequence[str] = ()  # of these layers
    cache_dtype: str = "auto"  # of the numbers, as in --kv-cache-dtype; of a state, dtypes and shapes of the tensors
    layer_nbytes: tuple[int, ...] = ()  # bytes of a block in each layer, if all layers are kept as bytes; else empty
    latent: int = 0  # count of numbers of a token's latent in a layer (MLA); 0 for keys and values
    context: Context = ALONE
    opaque: "KvCacheGroup | None" = None
    """Group of bytes in the same compressed blocks: layers that are not coded, and scales behind a block's states."""
    scales: Scales | None = None  # position of the scales if latents are in fp8 with scales
    starts: tuple[int, ...] = ()  # by layer, offset of the `layer_nbytes` bytes in a block; empty if all offsets are 0

    @property
    def states(self) -> int:
        """Number of states (entries of the cache) in a rank's block: one for each `state_tokens` tokens."""
        return int(self.spec.block_size / self.state_tokens)

    @property
    def state_tokens(self) -> int:
        """Number of tokens for which a coded layer has one state: 1, but 4 in DeepSeek V4."""
        return int(self.spec.tokens_per_state) if self.scales else 1

    def first_states(self, tokens: int) -> int:
        """Return the most states that any rank can have of a session's first `tokens` tokens."""
        return -(-self.context.first_tokens(tokens) // self.state_tokens)

    def of_a_rank(self, transfer: Transfer) -> Transfer:
        """Return a transfer whose `first_token` and `exact_tokens` count states of one rank instead of tokens."""
        first = transfer.first_token // (self.context.ranks * self.state_tokens)
        return replace(transfer, first_token=first, exact_tokens=self.first_states(transfer.exact_tokens))

    @property
    def tokens(self) -> int:
        """Number of tokens in a block, on all ranks of decode context parallelism together."""
        return int(self.spec.block_size) * self.context.ranks

    @property
    def is_packed(self) -> bool:
        """True if all layers are stored as bytes."""
        return bool(self.layer_nbytes)

    @property
    def is_state(self) -> bool:
        """True if a block is the recurrent state (Mamba) of the layers after the block's last token."""
        return isinstance(self.spec, MambaSpec)

    @property
    def dtype_name(self) -> str:
        """Name of the dtype, different for all dtypes, equally large ones included."""
        if self.is_packed or self.scales:
            return self.cache_dtype
        return FP8[self.cache_dtype].name if self.cache_dtype in FP8 else str(self.spec.dtype)

    @property
    def shape(self) -> list[int]:
        """Layers, KV heads and head size, and `latent` if not 0, of a rank; if `is_packed`, instead `layer_nbytes`."""
        latent = [self.latent] if self.latent else []
        return list(self.layer_nbytes) or [self.layers, self.spec.num_kv_heads, self.spec.head_size, *latent]

    @property
    def page_nbytes(self) -> int:
        """Number of bytes of a rank's block in vLLM's pool, in all layers, without padding behind scales."""
        page = self.scales.row * self.states if self.scales else self.spec.page_size_bytes
        own = sum(self.layer_nbytes) or page * self.layers
        return own + (self.opaque.page_nbytes if self.opaque else 0)


class Part(NamedTuple):
    """Block that a resume point needs: block `at` of a session in the group, with tokens `first_token` to `end - 1`."""

    group: int
    at: int
    first_token: int
    end: int


class PointGroup(NamedTuple):
    """Group with blocks that are stored for resume points only: any group but a main group with full attention."""

    group: KvCacheGroup
    reach: int  # see `SpecEntry`; 1 for states

    def needed(self, tokens: int) -> Iterator[Part]:
        """Yield the blocks that a resume point at `tokens` tokens needs. vLLM allocates the same blocks for a load."""
        size = self.group.tokens
        start = manager_of(self.group.spec).get_num_skipped_tokens(tokens) // size
        return (Part(self.group.index, at, at * size, (at + 1) * size) for at in range(start, tokens // size))


class Groups(NamedTuple):
    """KV cache groups of a model."""

    main: KvCacheGroup  # its block hashes make up sessions; also in `at_points` if no group has full attention
    at_points: Sequence[PointGroup] = ()  # groups with blocks that are stored for resume points only
    again: int = 0  # number of blocks at the end of a prefix cache hit that vLLM computes again: 1 for some drafts
    unstored: Sequence[int] = ()  # for each group that is not stored, the number of tokens in a block
    replicas: int = 1  # number of consecutive tensor-parallel ranks that have the same blocks, as with latents (MLA)
    unit: int | None = None  # tokens between two of vLLM's hashes; None for the gcd of stored block sizes

    @property
    def is_whole(self) -> bool:
        """True if a resume point needs all earlier blocks of the main group, not only a window."""
        return len(self.others) == len(self.at_points)

    @property
    def is_even(self) -> bool:
        """True if `is_whole`, and all groups have equally large blocks, in tokens, and therefore the same hashes."""
        return self.is_whole and len(set(self._sizes)) == 1

    @property
    def fails_whole(self) -> bool:
        """True if one unreadable block fails a request's whole load: vLLM has no other way for several groups."""
        return bool(self.at_points or self.unstored)

    @property
    def others(self) -> list[PointGroup]:
        """Stored groups except the main group."""
        return [each for each in self.at_points if each.group.index != self.main.index]

    @property
    def stored(self) -> list[KvCacheGroup]:
        """All stored groups, the main group first."""
        return [self.main, *(each.group for each in self.others)]

    @property
    def hash_tokens(self) -> int:
        """Number of tokens between two of vLLM's hashes. Every block ends at a hash."""
        return self.unit or math.gcd(*self._sizes)

    @property
    def resume_tokens(self) -> int:
        """Number of tokens from a possible resume point to the next; see `deepest`."""
        return math.lcm(*self._sizes, *self.unstored)

    @property
    def is_expected(self) -> bool:
        """True if vLLM would find blocks that are prefetched (loaded before a request comes).

        All groups must have the same hashes. If vLLM computes `again` blocks again, vLLM finds the blocks of a sliding
        window only with another block after the window.
        """
        return self.is_even and not (self.again and any(1 < each.reach < EVERY for each in self.at_points))

    @property
    def last_tokens(self) -> int:
        """Number of last prompt tokens that vLLM never looks up: 1; 0 with `again` and several stored groups."""
        return 0 if self.again and self.others else 1

    def deepest(self, depth: int) -> int:
        """Return the greatest possible depth of a resume point up to `depth`; 0 if there is none.

        A depth is a number of first blocks of the main group. In every group, a block ends `again` such blocks earlier.
        """
        end = depth - self.again
        end -= end % (self.resume_tokens // self.main.tokens)
        return end + self.again if end > 0 else 0

    def parts(self, depth: int) -> Iterator[Part]:
        """Yield the blocks of `at_points` that a resume point at `depth` needs, group by group."""
        end = max(0, depth - self.again)
        tokens = end * self.main.tokens
        return (part for each in self.at_points for part in each.needed(tokens)) if end else iter(())

    def held(self, tokens: int, in_flight: int) -> int:
        """Return the most blocks, of all groups, that a request of `tokens` tokens uses.

        in_flight: most tokens of a request in steps that vLLM has scheduled and that have not ended. In a group of
        states, a request has the last block, the next block, and those of `_further`. A group that is not stored counts
        as one block.
        """
        main = -(-tokens // self.main.tokens) if self.is_whole else 0
        others = 0
        for each in self.at_points:
            looked_back = tokens if each.group.is_state else min(tokens, each.reach + in_flight)
            blocks = -(-looked_back // each.group.tokens)
            others += min(blocks, 2) if each.group.is_state else blocks + (looked_back < tokens)
        return main + others + len(self.unstored) + self._further

    def taken(self, tokens: int, requests: int) -> int:
        """Return the most blocks, of all groups, that a step takes from the pool for its tokens and requests."""
        sizes = self._sizes if self.is_whole else self._sizes[1:]
        return sum(-(-tokens // size) + requests for size in (*sizes, *self.unstored)) + requests * self._further

    @property
    def _further(self) -> int:
        """Number of blocks of states for tokens that a draft proposes, and for vLLM's checkpoints in a prefill."""
        names = "num_speculative_blocks", "num_prefill_checkpoint_blocks"
        return sum(getattr(each.group.spec, name, 0) for each in self.at_points for name in names)

    @property
    def _sizes(self) -> list[int]:
        return [self.main.tokens, *(each.group.tokens for each in self.at_points)]


def groups_of(
    kv_cache_config: KVCacheConfig,
    cache: CacheConfig | None = None,
    latents: Latents = NO_LATENTS,
    context: Context = ALONE,
    as_bytes: Container[int] = (),
) -> Groups:
    """Return a model's KV cache groups. Raises UnsupportedError if none can be main, or a needed one cannot be stored.

    The main group has full attention if any group has, and never consists of states. Among several candidates, coded
    groups go before groups of bytes, and then the group with the largest blocks is taken.

    Args:
        cache: vLLM's configuration of the cache; None for a cache that is not quantized.
        context: decode context parallelism, for groups whose tokens are spread over ranks.
        as_bytes: indices of groups that are stored as bytes in any case.
    """
    pages, found, unstored = page_nbytes(kv_cache_config), list[PointGroup](), list[int]()
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        spec: Any = group.kv_cache_spec
        entry = entry_of(_one_of(spec))
        if entry is None or entry.stored is StoredAs.REFUSED or group.host_resident:
            where = " in the host's memory" if group.host_resident else ""
            raise UnsupportedError(
                f"Manthan cannot be used here: the model has a {type(spec).__name__}{where}, whose blocks can be "
                "neither stored nor left out; serve it without Manthan."
            )
        if entry.stored is StoredAs.NOTHING or not spec.prefix_cacheable or not group.enable_kv_transfer:
            unstored.append(spec.block_size * (context.ranks if spec.dcp_sharded else 1))
        else:
            stored = _group(index, group, pages, cache, latents, can_code=index not in as_bytes)
            if stored.spec.dcp_sharded:
                stored = replace(stored, context=context)
            found.append(PointGroup(stored, entry.reach(stored.spec)))
    mains = [each for each in found if each.reach >= EVERY] or [each for each in found if not each.group.is_state]
    if not mains:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in kv_cache_config.kv_cache_groups) or "none"
        raise UnsupportedError(
            f"Manthan cannot be used here: the model's KV cache groups are {kinds}; one with attention is needed."
        )
    main = max(mains, key=lambda each: (not each.group.is_packed, each.group.page_nbytes, -each.group.index))
    at_points = [each for each in found if each is not main or main.reach < EVERY]
    made = Groups(main.group, at_points, unstored=tuple(unstored), replicas=kv_cache_config.kv_tp_replicas)
    if any(each.group.is_state and each.group.spec.mamba_cache_mode != "align" for each in at_points):
        return made._replace(unit=made.resume_tokens)  # vLLM then hashes once a scheduler block
    return made._replace(unit=None if cache is None else cache.prefix_match_unit)


def groups_for(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, as_bytes: Container[int] = ()) -> Groups:
    """Return the KV cache groups of an engine; see `groups_of`."""
    latents, parallel = Latents.of(vllm_config), vllm_config.parallel_config
    ranks = parallel.decode_context_parallel_size
    context = Context(ranks, parallel.cp_kv_cache_interleave_size) if ranks > 1 else ALONE
    groups = groups_of(kv_cache_config, vllm_config.cache_config, latents, context, as_bytes)
    return groups._replace(again=blocks_computed_again(vllm_config))


def config_for(vllm_config: VllmConfig, groups: Groups) -> ManthanConfig:
    """Return an engine's configuration, with codec exact if all layers of the main group are stored as bytes."""
    config = from_vllm_config(vllm_config)
    if not groups.main.is_packed:
        return config
    return config.model_copy(update={"codec": config.codec.model_copy(update=AS_THEY_ARE)})


def on_all_ranks(told: Sequence[Groups]) -> Groups:
    """Return the groups of an engine, each as on the rank with the largest blocks, because stages may differ in layers.

    told: groups of each rank. vLLM's scheduler knows only one spec of a group whose layers have several. Raises
    UnsupportedError if a rank has no layer of a group.
    """

    def largest(group: KvCacheGroup) -> KvCacheGroup:
        found = [next((each for each in groups.stored if each.index == group.index), None) for groups in told]
        for rank, each in enumerate(found):
            if each is None or not each.layers:
                raise UnsupportedError(
                    f"Manthan cannot be used here: rank {rank} of the pipeline has no layer of KV cache group "
                    f"{group.index}: use fewer stages, or tensor parallelism."
                )
        return max((each for each in found if each is not None), key=lambda each: each.page_nbytes)

    at_points = [each._replace(group=largest(each.group)) for each in told[0].at_points]
    return told[0]._replace(main=largest(told[0].main), at_points=at_points)


def _one_of(spec: Any) -> Any:
    """Return the spec of a group's first layer."""
    several = getattr(spec, "kv_cache_specs", None)
    return spec if several is None else next(iter(several.values()))


def _group(
    index: int,
    group: KVCacheGroupSpec,
    pages: Mapping[str, int],
    cache: CacheConfig | None,
    latents: Latents,
    *,
    can_code: bool,
) -> KvCacheGroup:
    """Return a stored group, with its layers divided into coded layers and layers stored as bytes.

    All are stored as bytes if coded layers differ in shape or dtype, or if a layer of bytes does not fit UNIT.
    """
    names = tuple(group.layer_names)
    specs: Mapping[str, Any] = getattr(group.kv_cache_spec, "kv_cache_specs", dict.fromkeys(names, group.kv_cache_spec))

    def page(name: str) -> int:
        return pages[name] if name in pages else int(specs[name].page_size_bytes)

    def packed(names: tuple[str, ...]) -> KvCacheGroup:
        spec: Any = specs[names[0]] if names else _one_of(group.kv_cache_spec)
        nbytes = tuple(page(name) for name in names)
        kind = _dtype_of(spec, cache)
        if hasattr(spec, "shapes"):
            tensors = zip(spec.shapes, spec.dtypes, strict=True)
            kind = f"state of {', '.join(f'{dtype} {list(shape)}' for shape, dtype in tensors)}"
        return KvCacheGroup(index, spec, len(names), names, kind, nbytes)

    coded = {each: layout for each in set(specs.values()) if can_code and (layout := _coded(each, cache, latents))}
    ours = tuple(name for name in names if specs[name] in coded)
    others = tuple(sorted((name for name in names if specs[name] not in coded), key=page))
    raw = packed(others) if others else None
    shapes = {
        (each.num_kv_heads, each.head_size, each.dtype, _dtype_of(each, cache), layout)
        for each, layout in coded.items()
    }
    if len(shapes) != 1 or (raw is not None and any(nbytes % UNIT for nbytes in raw.layer_nbytes)):
        return packed(names)
    spec = specs[ours[0]]
    latent, scales = coded[spec]
    made = KvCacheGroup(index, spec, len(ours), ours, _dtype_of(spec, cache), (), latent, opaque=raw, scales=scales)
    return replace(made, opaque=_scales_behind(made)) if scales and scales.place else made


def _scales_behind(group: KvCacheGroup) -> KvCacheGroup:
    """Return the group of bytes for `opaque`: the scales behind all states of a block, then the earlier `opaque`."""
    assert group.scales is not None
    sizes, starts = (tuple([each * group.states] * group.layers) for each in (group.scales.stride, group.scales.row))
    names, other = group.names, group.opaque
    if other is not None:
        names, sizes, starts = (*names, *other.names), (*sizes, *other.layer_nbytes), (*starts, *[0] * other.layers)
    return KvCacheGroup(group.index, group.spec, len(names), names, group.cache_dtype, sizes, starts=starts)


def _coded(spec: Any, cache: CacheConfig | None, latents: Latents) -> Coded | None:
    entry = entry_of(spec)
    if entry is None or entry.stored is not StoredAs.CODED or (cache is not None and is_packed(cache)):
        return None
    return next(filter(None, (layout(spec, _dtype_of(spec, cache), latents) for layout in entry.layouts)), None)


def _dtype_of(spec: KVCacheSpec, cache: CacheConfig | None) -> str:
    """Return the dtype of a group's numbers, as a value of --kv-cache-dtype or as the spec names the dtype."""
    dtype = getattr(spec, "cache_dtype_str", None) or ("auto" if cache is None else cache.cache_dtype)
    if dtype == "auto" and getattr(spec, "kv_quant_mode", None) is KVQuantMode.FP8_PER_TENSOR:
        return E4M3  # the model asks for fp8, not the flag
    return str(dtype)


def page_nbytes(kv_cache_config: KVCacheConfig) -> dict[str, int]:
    """Return the number of bytes of a block in one layer, by the layer's name."""
    tensors = kv_cache_config.kv_cache_tensors  # a layer's blocks or a block's layers are adjacent in memory
    return {name: min(each.layer_stride, each.block_stride) for each in tensors for name in each.layers}
