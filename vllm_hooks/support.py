"""Models and settings that Manthan can serve. All others stop the server at start with one sentence."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from manthan.manager.config.model import TenantsConfig, TiersConfig
from manthan.manager.config.resolve import ConfigError
from manthan.vllm_hooks.kv_dtype import E4M3, FP8, PLAIN, is_packed, is_plain
from manthan.vllm_hooks.transfer_config import CONNECTOR, SEVERAL, from_vllm_config, is_on, is_on_gpu, others

if TYPE_CHECKING:
    from vllm import EngineArgs
    from vllm.config import CacheConfig, VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

DEVICES = ("cpu", "cuda")
VLLM = ">=0.32,<0.34"
"""Releases of vLLM whose insides Manthan knows; see docs/compatibility.md."""
RELEASES = ("0.32", "0.33")
DRAFTS = ("eagle", "eagle3", "mtp", "draft_model")
"""Methods of --speculative-config whose draft's KV is stored with the model's."""
NOT_BESIDE = {CONNECTOR, "DecodeBenchConnector", "HiSparseConnector", SEVERAL}
"""Connectors that are refused beside Manthan. They make KV up, keep KV outside of vLLM's blocks, or hold several
connectors; or they are a second Manthan."""


class UnsupportedError(ConfigError):
    """Model or setting of vLLM that Manthan does not support."""


def check_arguments(arguments: "EngineArgs") -> None:
    """Refuse arguments with which vLLM would replace Manthan in its configuration. Raises UnsupportedError."""
    size = arguments.kv_offloading_size
    if size is not None and is_on(arguments):
        raise UnsupportedError(
            f"Manthan cannot be used here: --kv-offloading-size is {size:g}, with which vLLM's own offloading takes "
            "Manthan's place; remove it, or name OffloadingConnector in --kv-transfer-config."
        )


def check_supported(vllm_config: "VllmConfig") -> None:
    """Refuse a configuration of vLLM that Manthan cannot serve. Raises UnsupportedError."""
    import vllm
    from vllm import envs
    from vllm.platforms import current_platform

    check_version(vllm.__version__)
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    config = from_vllm_config(vllm_config)
    on_device = config.tiers.kind == "device"
    speculative = vllm_config.speculative_config
    device = current_platform.device_type
    without = "serve it without Manthan"
    hashes = hash_refusal(config.tiers, cache.prefix_caching_hash_algo, config.tenants)
    refusals = [
        (device not in DEVICES, f"vLLM runs on {device}; {' and '.join(DEVICES)} are supported"),
        (device == "cpu" and on_device, "tiers.kind is device, but vLLM runs on the CPU: use host"),
        (
            device == "cpu" and config.codec.backend == "cuda",
            "codec.backend is cuda, but vLLM runs on the CPU: use auto or numpy",
        ),
        (
            on_device and config.codec.backend == "numpy",
            "tiers.kind is device, but codec.backend numpy keeps codes in RAM: use kind host, or codec.backend auto",
        ),
        (
            model.use_mla and not is_plain(cache) and not is_on_gpu(vllm_config),
            f"--kv-cache-dtype is {cache.cache_dtype}, but the CPU encodes latents (MLA) of the model's dtype only: "
            "use auto",
        ),
        (
            model.use_mla and getattr(model.hf_text_config, "index_topk", None) is not None,
            f"{model.model} uses sparse attention, whose index is a cache of its own; {without}",
        ),
        (
            model.use_mla and device == "cpu" and not cache.enable_prefix_caching,
            f"vLLM's CPU build switches prefix caching off for models with multi-head latent attention (MLA), such as "
            f"{model.model}; serve it on a GPU, or without Manthan",
        ),
        (model.is_attention_free, f"{model.model} has no attention layers, but states only; {without}"),
        (model.is_encoder_decoder, f"{model.model} is an encoder-decoder model; {without}"),
        (
            current_platform.is_rocm() and not is_plain(cache),
            f"--kv-cache-dtype {cache.cache_dtype} was never tried on ROCm, whose fp8 may be of another kind; use auto",
        ),
        (bool(hashes), hashes),
        (not cache.enable_prefix_caching, "prefix caching is off; remove --no-enable-prefix-caching"),
        (
            parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
            "context parallelism is on; set --decode-context-parallel-size and --prefill-context-parallel-size to 1",
        ),
        (
            parallel.pipeline_parallel_size > 1,
            f"--pipeline-parallel-size is {parallel.pipeline_parallel_size}; use tensor parallelism instead",
        ),
        (
            speculative is not None and speculative.method not in DRAFTS and has_draft(vllm_config),
            f"--speculative-config has method {speculative and speculative.method}, whose draft's KV was never tried; "
            f"use {', '.join(DRAFTS)}, or ngram",
        ),
        (
            bool(config.tenants.header) and envs.VLLM_USE_RUST_FRONTEND,
            f"tenants.header is {config.tenants.header}, but VLLM_USE_RUST_FRONTEND is set, and that front end hands "
            "no headers on; unset one of the two",
        ),
        (
            transfer.kv_role != "kv_both",
            f"kv_role of {transfer.kv_connector} is {transfer.kv_role}, but Manthan loads KV on every side: use "
            "kv_both, and name the role of a connector beside Manthan in that one's own entry",
        ),
        (
            bool(strange := sorted(NOT_BESIDE & {*others(transfer)})),
            f"--kv-transfer-config names {', '.join(strange)} beside Manthan: leave that out",
        ),
        (
            transfer.kv_load_failure_policy != "recompute",
            f"kv_load_failure_policy of {transfer.kv_connector} is {transfer.kv_load_failure_policy}: set it to "
            "recompute, so that a lost block costs time and not the request",
        ),
    ]
    for refused, why in refusals:
        if refused:
            raise UnsupportedError(f"Manthan cannot be used here: {why}.")


@dataclass(frozen=True)
class KvCacheGroup:
    """KV cache group that Manthan stores.

    Args:
        index: number among vLLM's groups.
        layers: number of layers.
        names: names of the layers.
        cache_dtype: dtype of its numbers, as --kv-cache-dtype names it; for a state, dtypes and shapes of its tensors.
        layer_nbytes: bytes of a block in each layer, if blocks are bytes that are not looked into. The layers may then
            be of several kinds, and `spec` is the spec of one.
        latent: number of `head_size` numbers that are a latent (MLA), ahead of the part of the key that RoPE turns; 0
            for keys and values.
    """

    index: int
    spec: "AttentionSpec"
    layers: int
    names: Sequence[str] = ()
    cache_dtype: str = "auto"
    layer_nbytes: tuple[int, ...] = ()
    latent: int = 0

    @property
    def is_packed(self) -> bool:
        """True if blocks are bytes that are not looked into."""
        return bool(self.layer_nbytes)

    @property
    def is_state(self) -> bool:
        """True if a block is the state of its layers behind its last token."""
        from vllm.v1.kv_cache_interface import MambaSpec

        return isinstance(self.spec, MambaSpec)

    @property
    def dtype_name(self) -> str:
        """Name of the kind of its numbers. Kinds of the same size have different names."""
        if self.is_packed:
            return self.cache_dtype
        return FP8[self.cache_dtype].name if self.cache_dtype in FP8 else str(self.spec.dtype)

    @property
    def shape(self) -> list[int]:
        """Layers, heads, head_dim, and a latent's numbers; or the bytes of each layer."""
        latent = [self.latent] if self.latent else []
        return list(self.layer_nbytes) or [self.layers, self.spec.num_kv_heads, self.spec.head_size, *latent]

    @property
    def page_nbytes(self) -> int:
        """Number of bytes of a block in vLLM's pool, in all layers."""
        return sum(self.layer_nbytes) or self.spec.page_size_bytes * self.layers


class Part(NamedTuple):
    """Block of another group that a resume point needs.

    at: number of the block among its group's. first_token, end: positions of its first token, and behind its last.
    """

    group: int
    at: int
    first_token: int
    end: int


class Window(NamedTuple):
    """Group with sliding windows or states.

    tokens: number of tokens that its layers look back, their own included; None for states. A block has the state
    behind its last token.
    """

    group: KvCacheGroup
    tokens: int | None

    def needed(self, tokens: int) -> Iterator[Part]:
        """Blocks that a resume point behind `tokens` needs. `tokens` are whole blocks of the group."""
        size = self.group.spec.block_size
        end = tokens // size
        start = end - 1 if self.tokens is None else max(0, end * size - self.tokens + 1) // size
        return (Part(self.group.index, at, at * size, (at + 1) * size) for at in range(start, end))


class Groups(NamedTuple):
    """KV cache groups of a model.

    chain: group whose blocks make up sessions, with full attention. Where no layer has full attention, it is a window's
    group, which is among `windows` as well. windows: the other groups. again: number of found blocks at the end of a
    chain that are computed nevertheless; see `blocks_computed_again`.
    """

    chain: KvCacheGroup
    windows: Sequence[Window] = ()
    again: int = 0

    @property
    def is_whole(self) -> bool:
        """True if a resume point needs all of a chain's blocks, and not a window's last ones."""
        return len(self.others) == len(self.windows)

    @property
    def is_even(self) -> bool:
        """True if each group has the chain's block hashes: the chain is stored, and all blocks have as many tokens."""
        return self.is_whole and len(set(self._sizes)) == 1

    @property
    def others(self) -> list[Window]:
        """Groups that are not the chain's."""
        return [window for window in self.windows if window.group.index != self.chain.index]

    @property
    def hash_tokens(self) -> int:
        """Number of tokens between two of vLLM's hashes, which are at the ends of every group's blocks."""
        return math.gcd(*self._sizes)

    @property
    def is_expected(self) -> bool:
        """True if vLLM finds a prefetched session: all groups have the same hashes, and no window lacks a block.

        Where a draft has blocks computed again, vLLM believes in a window only with another block behind it.
        """
        return self.is_even and not (self.again and any(window.tokens is not None for window in self.windows))

    @property
    def last_tokens(self) -> int:
        """Number of prompt tokens that are computed on a full hit: 1, or 0 if several groups have a block computed."""
        return 0 if self.again and self.others else 1

    def deepest(self, depth: int) -> int:
        """Number of a chain's first `depth` blocks up to the last resume point; 0 without one.

        Blocks of all groups end at a resume point, and the blocks that are computed again come behind it.
        """
        end = depth - self.again
        end -= end % (math.lcm(*self._sizes) // self.chain.spec.block_size)
        return end + self.again if end > 0 else 0

    def beside(self, depth: int) -> Iterator[Part]:
        """Blocks of other groups that are needed if `depth` blocks of a chain are found, group by group."""
        end = max(0, depth - self.again)
        tokens = end * self.chain.spec.block_size
        return (part for window in self.windows for part in window.needed(tokens)) if end else iter(())

    def held(self, tokens: int, in_flight: int) -> int:
        """Most blocks of all groups that a request with `tokens` uses, of which `in_flight` are being computed.

        A window's blocks are free when those are settled. A state has its last block and the next, and one for each
        token that is proposed.
        """
        chain = -(-tokens // self.chain.spec.block_size) if self.is_whole else 0
        beside = 0
        for window in self.windows:
            looked_back = tokens if window.tokens is None else min(tokens, window.tokens + in_flight)
            blocks = -(-looked_back // window.group.spec.block_size)
            beside += min(blocks, 2) if window.tokens is None else blocks + (looked_back < tokens)
        return chain + beside + self._proposed

    def taken(self, tokens: int, requests: int) -> int:
        """Most blocks of all groups that a step takes in which `tokens` of `requests` are computed."""
        sizes = self._sizes if self.is_whole else self._sizes[1:]
        return sum(-(-tokens // size) + requests for size in sizes) + requests * self._proposed

    @property
    def _proposed(self) -> int:
        """Number of a request's blocks of states behind proposed tokens."""
        return sum(getattr(window.group.spec, "num_speculative_blocks", 0) for window in self.windows)

    @property
    def _sizes(self) -> list[int]:
        return [self.chain.spec.block_size, *(window.group.spec.block_size for window in self.windows)]


def check_version(version: str) -> None:
    """Refuse another release of vLLM. Raises UnsupportedError. A build without a version is let in."""
    release = re.match(r"\d+\.\d+", version)
    if release and release[0] not in RELEASES:
        raise UnsupportedError(
            f"Manthan cannot be used here: vLLM is {version}, but this version of Manthan was made for "
            f"{' and '.join(RELEASES)} and no other: install vllm{VLLM}."
        )


def hash_refusal(store: TiersConfig, algorithm: str, tenants: TenantsConfig) -> str:
    """Sentence that refuses this --prefix-caching-hash-algo for the store or the tenants; empty if it will do."""
    is_apart = tenants.isolate and bool(tenants.header or tenants.shares)
    if not (store.is_lasting or is_apart) or "xxhash" not in algorithm:
        return ""
    setting = f"tiers.kind is {store.kind}" if store.is_lasting else "tenants.isolate is true"
    return (
        f"{setting}, but --prefix-caching-hash-algo {algorithm} does not resist collisions, and "
        "whoever finds one is served another's blocks: use sha256"
    )


def latent_of(vllm_config: "VllmConfig") -> int:
    """Number of numbers of a token's latent in a layer; 0 for a cache of keys and values."""
    model = vllm_config.model_config
    return int(model.hf_text_config.kv_lora_rank) if model.use_mla else 0


def has_draft(vllm_config: "VllmConfig") -> bool:
    """True if a draft that proposes tokens has layers in the KV cache."""
    speculative = vllm_config.speculative_config
    return speculative is not None and bool(speculative.uses_draft_kv_cache())


def blocks_computed_again(vllm_config: "VllmConfig") -> int:
    """Number of blocks at the end of a hit that vLLM computes nevertheless.

    It is 1 for a draft that reads the next token: its KV of a block's last token depends on a token that the block's
    hash does not cover.
    """
    speculative = vllm_config.speculative_config
    return int(speculative is not None and speculative.use_eagle_block_drop())


def groups_of(
    kv_cache_config: "KVCacheConfig", cache: "CacheConfig | None" = None, latent: int = 0, as_bytes: bool = False
) -> Groups:
    """Return the KV cache groups of a model: one of full attention, and any with windows or states; or one of windows.

    Args:
        cache: vLLM's configuration of the cache; None for numbers of the model's kind.
        latent: see `latent_of`.
        as_bytes: True if blocks of keys and values are bytes that are not looked into, either.

    Raises:
        UnsupportedError: for other groups.
    """
    packed, groups = cache is not None and is_packed(cache), kv_cache_config.kv_cache_groups
    alone = tuple(page_nbytes(kv_cache_config).values()) if (packed or as_bytes) and len(groups) == 1 else ()
    found = [_group(index, group, cache, alone) for index, group in enumerate(groups)]
    if as_bytes and len(groups) > 1:
        found = [_in_pages(group) for group in found]
    latent = 0 if as_bytes else latent
    chains = [replace(group, latent=latent) for group in found if _is_chain(group, latent, as_bytes)]
    if len(groups) == 1 and not packed:
        chains = chains or [group for group in found if _is_window(group.spec)]
    windows = [window for window in map(_window, found) if window is not None]
    named = {group.index for group in chains} | {window.group.index for window in windows}
    if len(chains) != 1 or len(named) < len(groups) or (packed and windows):
        kinds = ", ".join(_described(group.kv_cache_spec) for group in groups) or "none"
        raise UnsupportedError(
            f"Manthan cannot be used here: the model's KV cache groups are {kinds}; one group of full attention is "
            "supported, of layers of one shape, a draft's too, or of latents (MLA) without padding or quantization, "
            "and sliding windows and states beside it; or one group of sliding windows."
        )
    made = Groups(chains[0], windows)
    unit = getattr(cache, "prefix_match_unit", None)
    if unit not in (None, made.hash_tokens):
        raise UnsupportedError(
            f"Manthan cannot be used here: --prefix-match-unit is {unit}, and the KV cache has blocks of "
            f"{made.hash_tokens} tokens; remove it."
        )
    return made


def _group(
    index: int, group: "KVCacheGroupSpec", cache: "CacheConfig | None", layer_nbytes: tuple[int, ...]
) -> KvCacheGroup:
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    spec: Any = group.kv_cache_spec
    names = tuple(group.layer_names)
    if layer_nbytes and isinstance(spec, UniformTypeKVCacheSpecs):
        spec = next(iter(spec.kv_cache_specs.values()))  # so it is for workers; the scheduler gets one of them
    return KvCacheGroup(index, spec, len(names), names, _dtype_of(spec, cache), layer_nbytes)


def _is_chain(group: KvCacheGroup, latent: int, as_bytes: bool) -> bool:
    """True if the group's blocks may make up chains: keys and values of all tokens, or plain latents.

    as_bytes: True if latents of any kind will do.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    spec = group.spec
    if latent:
        nbytes = spec.block_size * spec.head_size * spec.dtype.itemsize
        return type(spec) is MLAAttentionSpec and group.cache_dtype in PLAIN and spec.page_size_bytes == nbytes
    if as_bytes and type(spec) is MLAAttentionSpec:
        return True
    return type(spec) is FullAttentionSpec  # with windows too, where vLLM keeps the blocks of all tokens nevertheless


def _is_window(spec: "KVCacheSpec") -> bool:
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    return type(spec) is SlidingWindowSpec


def _window(group: KvCacheGroup) -> Window | None:
    """Return the group as one beside a chain's; None if it has neither windows nor states."""
    from vllm.v1.kv_cache_interface import MambaSpec

    spec: Any = group.spec
    if _is_window(spec):
        return Window(group, spec.sliding_window + spec.extra_retained_tokens)  # those vLLM has blocks for as well
    if type(spec) is MambaSpec:
        tensors = [f"{dtype} {list(shape)}" for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)]
        return Window(replace(_in_pages(group), cache_dtype=f"state of {', '.join(tensors)}"), None)
    return None


def _in_pages(group: KvCacheGroup) -> KvCacheGroup:
    """Return the group with blocks of bytes that are not looked into, a page in each layer."""
    return replace(group, layer_nbytes=(group.spec.page_size_bytes,) * group.layers)


def _described(spec: "KVCacheSpec") -> str:
    from vllm.v1.kv_cache_interface import AttentionSpec, UniformTypeKVCacheSpecs

    if isinstance(spec, UniformTypeKVCacheSpecs):  # of a model and its draft, say
        specs = [of for of in spec.kv_cache_specs.values() if isinstance(of, AttentionSpec)]
        shapes = {f"{of.num_kv_heads} KV heads of {of.head_size} {str(of.dtype).split('.')[-1]}" for of in specs}
        return f"layers of several shapes ({', '.join(sorted(shapes))}) in blocks of {spec.block_size}"
    limits = {name: getattr(spec, name, None) for name in ("sliding_window", "attention_chunk_size")}
    limited = "".join(f" with {name} {value}" for name, value in limits.items() if value)
    return f"{type(spec).__name__}{limited} in blocks of {spec.block_size}"


def _dtype_of(spec: "KVCacheSpec", cache: "CacheConfig | None") -> str:
    """Return the dtype of a group's numbers, as --kv-cache-dtype names it."""
    from vllm.v1.kv_cache_interface import KVQuantMode

    dtype = "auto" if cache is None else cache.cache_dtype
    if dtype == "auto" and getattr(spec, "kv_quant_mode", None) is KVQuantMode.FP8_PER_TENSOR:
        return E4M3  # the model says so
    return str(dtype)


def page_nbytes(kv_cache_config: "KVCacheConfig") -> dict[str, int]:
    """Number of bytes of a block in each layer: the distance of blocks or of layers, whichever lie side by side."""
    tensors = kv_cache_config.kv_cache_tensors
    return {name: min(each.layer_stride, each.block_stride) for each in tensors for name in each.layers}
