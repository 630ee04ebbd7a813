"""What Manthan can serve. Everything else stops the server at start with one sentence."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from manthan.manager.config.resolve import ConfigError
from manthan.vllm_hooks.transfer_config import from_vllm_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig

DEVICES = ("cpu", "cuda")
VLLM = ">=0.32,<0.33"
"""The releases of vLLM whose insides Manthan knows."""
KV_DTYPES = ("auto", "bfloat16", "float16", "float32")


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
            model.use_mla,
            f"{model.model} uses multi-head latent attention (MLA), whose cache is no keys and values; {without}",
        ),
        (model.is_hybrid or model.has_inner_state, f"{model.model} has Mamba or linear attention layers; {without}"),
        (model.is_encoder_decoder, f"{model.model} is an encoder-decoder model; {without}"),
        (
            cache.cache_dtype not in KV_DTYPES,
            f"--kv-cache-dtype {cache.cache_dtype} is quantized already; use auto, bfloat16 or float16",
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
    """A KV cache group that Manthan keeps: its place among vLLM's groups, its spec, and its layers. names: theirs."""

    index: int
    spec: "AttentionSpec"
    layers: int
    names: Sequence[str] = ()


class Window(NamedTuple):
    """A group whose layers look back so many tokens, their own included."""

    group: Group
    tokens: int

    def needed(self, depth: int) -> range:
        """Which blocks who goes on behind so many blocks of a chain needs of it."""
        size = self.group.spec.block_size
        return range(max(0, depth * size - self.tokens + 1) // size, depth)


class Groups(NamedTuple):
    """chain: the one with full attention, whose blocks make up chains. windows: the others."""

    chain: Group
    windows: Sequence[Window] = ()

    def beside(self, depth: int) -> Iterator[tuple[int, int]]:
        """Group and place in the chain of each block that is needed behind so many blocks of it."""
        return ((window.group.index, at) for window in self.windows for at in window.needed(depth))


def check_version(version: str) -> None:
    """Refuse a vLLM whose insides are others; raises UnsupportedError. A build that knows no version is let in."""
    release = re.match(r"\d+\.\d+", version)
    if release and release[0] != "0.32":
        raise UnsupportedError(
            f"Manthan cannot be used here: vLLM is {version}, but this version of Manthan was made for 0.32 and no "
            f"other: install vllm{VLLM}."
        )


def groups_of(kv_cache_config: "KVCacheConfig") -> Groups:
    """The KV cache groups that Manthan reads: one of full attention, and any with windows, in blocks of one size.

    Raises UnsupportedError for others.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    chains, windows = [], []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        spec, names = group.kv_cache_spec, tuple(group.layer_names)
        found = Group(index, spec, len(names), names)
        if type(spec) is FullAttentionSpec and not (spec.sliding_window or spec.attention_chunk_size):
            chains.append(found)
        elif type(spec) is SlidingWindowSpec:
            windows.append(Window(found, spec.sliding_window))
    groups = kv_cache_config.kv_cache_groups
    sizes = {group.kv_cache_spec.block_size for group in groups}
    if len(chains) != 1 or len(chains) + len(windows) < len(groups) or len(sizes) > 1:
        names = ", ".join(
            f"{type(group.kv_cache_spec).__name__} in blocks of {group.kv_cache_spec.block_size}" for group in groups
        )
        raise UnsupportedError(
            f"Manthan cannot be used here: the model's KV cache groups are {names or 'none'}; one group of full "
            "attention is supported, and sliding windows beside it in blocks as large."
        )
    return Groups(chains[0], windows)
