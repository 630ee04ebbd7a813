"""What Manthan can serve. Everything else stops the server at start with one sentence."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from manthan.manager.config.resolve import ConfigError
from manthan.vllm_hooks.kv_dtype import E4M3, FP8, PLAIN, is_packed, is_plain
from manthan.vllm_hooks.transfer_config import from_vllm_config

if TYPE_CHECKING:
    from vllm.config import CacheConfig, VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, MambaSpec

DEVICES = ("cpu", "cuda")
VLLM = ">=0.32,<0.33"
"""The releases of vLLM whose insides Manthan knows."""


class UnsupportedError(ConfigError):
    """A model or a setting of vLLM that Manthan does not support."""


def check_supported(vllm_config: "VllmConfig") -> None:
    """Refuse what can be told from vLLM's configuration alone; raises UnsupportedError."""
    import vllm
    from vllm import envs
    from vllm.platforms import current_platform

    check_version(vllm.__version__)
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    config = from_vllm_config(vllm_config)
    on_device = config.cold_store.kind == "device"
    speculative = vllm_config.speculative_config
    device = current_platform.device_type
    without = "serve it without Manthan"
    shared, hash_algo = config.cold_store.is_shared, cache.prefix_caching_hash_algo
    store = f"cold_store.kind is {config.cold_store.kind}"
    refusals = [
        (device not in DEVICES, f"vLLM runs on {device}; {' and '.join(DEVICES)} are supported"),
        (device == "cpu" and on_device, "cold_store.kind is device, but vLLM runs on the CPU: use host"),
        (device == "cpu" and config.backend == "cuda", "backend is cuda, but vLLM runs on the CPU: use auto or numpy"),
        (
            on_device and config.backend == "numpy",
            "cold_store.kind is device, but backend numpy keeps codes in RAM: use kind host, or backend auto",
        ),
        (
            model.use_mla and on_device,
            "cold_store.kind is device, but latents (MLA) are encoded by the CPU: use host",
        ),
        (
            model.use_mla and config.backend == "cuda",
            "backend is cuda, but there are no CUDA kernels for latents (MLA): use auto or numpy",
        ),
        (
            model.use_mla and not is_plain(cache),
            f"--kv-cache-dtype is {cache.cache_dtype}, but latents (MLA) are kept in the model's dtype only: use auto",
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
            on_device and not is_plain(cache),
            f"cold_store.kind is device, but --kv-cache-dtype {cache.cache_dtype} is encoded by the CPU: use host",
        ),
        (
            config.backend == "cuda" and not is_plain(cache),
            f"backend is cuda, but there are no CUDA kernels for --kv-cache-dtype {cache.cache_dtype}: use auto",
        ),
        (
            current_platform.is_rocm() and not is_plain(cache),
            f"--kv-cache-dtype {cache.cache_dtype} was never tried on ROCm, whose fp8 may be of another kind; use auto",
        ),
        (
            shared and "xxhash" in hash_algo and not os.environ.get("PYTHONHASHSEED"),
            f"{store}, but --prefix-caching-hash-algo {hash_algo} gives the same tokens another key in each process: "
            "set the environment variable PYTHONHASHSEED to one number for all engines, or use sha256",
        ),
        (
            shared and vllm_config.lora_config is not None,
            f"{store}, whose codes outlive the engine, but --enable-lora is on, and adapters are told apart by name "
            "and path only; use cold store host or device",
        ),
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
            speculative is not None and speculative.use_eagle(),
            "speculative decoding with a draft model is on; remove --speculative-config or use ngram",
        ),
        (
            bool(config.quotas.header) and envs.VLLM_USE_RUST_FRONTEND,
            f"quotas.header is {config.quotas.header}, but VLLM_USE_RUST_FRONTEND is set, and that front end hands no "
            "headers on; unset one of the two",
        ),
        (
            transfer.kv_role != "kv_both",
            f"kv_role is {transfer.kv_role}: prefill/decode disaggregation is not supported; use kv_both",
        ),
        (
            transfer.kv_load_failure_policy != "recompute",
            f"kv_load_failure_policy is {transfer.kv_load_failure_policy}: set it to recompute, so that a lost block "
            "costs time and not the request",
        ),
    ]
    for refused, why in refusals:
        if refused:
            raise UnsupportedError(f"Manthan cannot be used here: {why}.")


@dataclass(frozen=True)
class Group:
    """A KV cache group that Manthan keeps: its place among vLLM's groups, its spec, and how many layers it has.

    names: of the layers. cache_dtype: of its numbers, as --kv-cache-dtype names it, or what a state is made of.
    layer_nbytes: where blocks are bytes that nobody looks into, what one takes in each layer; the layers may be of
    several kinds then, and the spec is that of one. latent: how many of the spec's head_size numbers are a latent
    (MLA), ahead of the part of the key that RoPE turns; 0 where there are keys and values.
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
        """Whether blocks are bytes that nobody looks into."""
        return bool(self.layer_nbytes)

    @property
    def dtype_name(self) -> str:
        """What tells its numbers from others of as many bytes."""
        if self.is_packed:
            return self.cache_dtype
        return FP8[self.cache_dtype].name if self.cache_dtype in FP8 else str(self.spec.dtype)

    @property
    def shape(self) -> list[int]:
        """What tells its blocks from others of as many tokens: layers, heads, head_dim, a latent's numbers, or the
        bytes of each layer."""
        latent = [self.latent] if self.latent else []
        return list(self.layer_nbytes) or [self.layers, self.spec.num_kv_heads, self.spec.head_size, *latent]

    @property
    def page_nbytes(self) -> int:
        """What a block takes in vLLM's pool, in all layers."""
        return sum(self.layer_nbytes) or self.spec.page_size_bytes * self.layers


class Window(NamedTuple):
    """A group whose layers look back so many tokens, their own included; None for a state, which is that behind the
    last token of a block."""

    group: Group
    tokens: int | None

    def needed(self, depth: int) -> range:
        """Which blocks who goes on behind so many blocks of a chain needs of it."""
        if self.tokens is None:
            return range(depth - 1, depth)
        size = self.group.spec.block_size
        return range(max(0, depth * size - self.tokens + 1) // size, depth)


class Groups(NamedTuple):
    """chain: the one with full attention, whose blocks make up chains. windows: the others."""

    chain: Group
    windows: Sequence[Window] = ()

    def beside(self, depth: int) -> Iterator[tuple[int, int]]:
        """Group and place in the chain of each block that is needed behind so many blocks of it."""
        if not depth:
            return iter(())
        return ((window.group.index, at) for window in self.windows for at in window.needed(depth))


def check_version(version: str) -> None:
    """Refuse a vLLM whose insides are others; raises UnsupportedError. A build that knows no version is let in."""
    release = re.match(r"\d+\.\d+", version)
    if release and release[0] != "0.32":
        raise UnsupportedError(
            f"Manthan cannot be used here: vLLM is {version}, but this version of Manthan was made for 0.32 and no "
            f"other: install vllm{VLLM}."
        )


def latent_of(vllm_config: "VllmConfig") -> int:
    """How many numbers a token's latent has in a layer; 0 for a model whose cache has keys and values."""
    model = vllm_config.model_config
    return int(model.hf_text_config.kv_lora_rank) if model.use_mla else 0


def groups_of(kv_cache_config: "KVCacheConfig", cache: "CacheConfig | None" = None, latent: int = 0) -> Groups:
    """The KV cache groups that Manthan reads: one of full attention, and any with windows or states, in blocks of one
    size.

    cache: vLLM's configuration of it; None for numbers of the model's kind. latent: see `latent_of`. Raises
    UnsupportedError for others.
    """
    packed, groups = cache is not None and is_packed(cache), kv_cache_config.kv_cache_groups
    layer_nbytes = _layer_nbytes(kv_cache_config) if packed and len(groups) == 1 else ()
    found = [_group(index, group, cache, layer_nbytes) for index, group in enumerate(groups)]
    chains = [replace(group, latent=latent) for group in found if _is_chain(group, latent)]
    windows = [window for window in map(_window, found) if window is not None]
    sizes = {group.spec.block_size for group in found}
    if len(chains) != 1 or len(windows) < len(groups) - 1 or len(sizes) > 1 or (packed and windows):
        kinds = ", ".join(_described(group.kv_cache_spec) for group in groups) or "none"
        raise UnsupportedError(
            f"Manthan cannot be used here: the model's KV cache groups are {kinds}; one group of full attention is "
            "supported, or of latents (MLA) without padding or quantization, and sliding windows and states beside it "
            "in blocks as large."
        )
    return Groups(chains[0], windows)


def _group(index: int, group: "KVCacheGroupSpec", cache: "CacheConfig | None", layer_nbytes: tuple[int, ...]) -> Group:
    """layer_nbytes: see `Group`."""
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    spec: Any = group.kv_cache_spec
    names = tuple(group.layer_names)
    if layer_nbytes and isinstance(spec, UniformTypeKVCacheSpecs):
        spec = next(iter(spec.kv_cache_specs.values()))  # so it is for workers; the scheduler gets one of them
    return Group(index, spec, len(names), names, _dtype_of(spec, cache), layer_nbytes)


def _is_chain(group: Group, latent: int) -> bool:
    """Whether the group's blocks may make up chains: of keys and values of all tokens, or of latents, if there are any,
    that have all of their numbers, of the model's kind, and nothing else."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    spec = group.spec
    if latent:
        nbytes = spec.block_size * spec.head_size * spec.dtype.itemsize
        return type(spec) is MLAAttentionSpec and group.cache_dtype in PLAIN and spec.page_size_bytes == nbytes
    return type(spec) is FullAttentionSpec and not (spec.sliding_window or spec.attention_chunk_size)


def _window(group: Group) -> Window | None:
    """The group as one beside the chain's, if it is one."""
    from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec

    spec: KVCacheSpec = group.spec
    if type(spec) is SlidingWindowSpec:
        return Window(group, spec.sliding_window)
    if type(spec) is MambaSpec:
        pages = (spec.page_size_bytes,) * group.layers
        return Window(replace(group, cache_dtype=_state_dtype(spec), layer_nbytes=pages), None)
    return None


def _state_dtype(spec: "MambaSpec") -> str:
    """What a state's bytes are, as far as they are not padding: its tensors, one behind the other."""
    tensors = [f"{dtype} {list(shape)}" for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)]
    return f"state of {', '.join(tensors)}"


def _described(spec: "KVCacheSpec") -> str:
    limits = {name: getattr(spec, name, None) for name in ("sliding_window", "attention_chunk_size")}
    limited = "".join(f" with {name} {value}" for name, value in limits.items() if value)
    return f"{type(spec).__name__}{limited} in blocks of {spec.block_size}"


def _dtype_of(spec: "KVCacheSpec", cache: "CacheConfig | None") -> str:
    """Of a group's numbers, as --kv-cache-dtype names it."""
    from vllm.v1.kv_cache_interface import KVQuantMode

    dtype = "auto" if cache is None else cache.cache_dtype
    if dtype == "auto" and getattr(spec, "kv_quant_mode", None) is KVQuantMode.FP8_PER_TENSOR:
        return E4M3  # the model says so
    return str(dtype)


def _layer_nbytes(kv_cache_config: "KVCacheConfig") -> tuple[int, ...]:
    """What a block takes in each layer: the distance of blocks where layers lie apart, of layers where blocks do."""
    tensors = kv_cache_config.kv_cache_tensors
    return tuple(min(each.layer_stride, each.block_stride) for each in tensors for _ in each.layers)
