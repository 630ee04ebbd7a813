"""What Manthan can serve. Everything else stops the server at start with one sentence."""

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from manthan.manager.config.resolve import ConfigError
from manthan.vllm_hooks.transfer_config import from_vllm_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

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
    without, latents = "serve it without Manthan", "latents of multi-head latent attention (MLA)"
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
            f"cold_store.kind is device, but {latents} are encoded by the CPU: use host",
        ),
        (
            model.use_mla and config.backend == "cuda",
            f"backend is cuda, but there are no CUDA kernels for {latents}: use auto or numpy",
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
        (model.is_hybrid or model.has_inner_state, f"{model.model} has Mamba or linear attention layers; {without}"),
        (model.is_encoder_decoder, f"{model.model} is an encoder-decoder model; {without}"),
        (
            model.get_sliding_window() is not None,
            f"{model.model} uses sliding window attention (window {model.get_sliding_window()}); {without}",
        ),
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
    """A KV cache group that Manthan keeps: its place among vLLM's groups, its spec, and how many layers it has.

    latent: how many of the spec's head_size numbers are a latent (MLA), ahead of the part of the key that RoPE turns; 0
    where there are keys and values.
    """

    index: int
    spec: "FullAttentionSpec"
    layers: int
    latent: int = 0


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


def only_group(kv_cache_config: "KVCacheConfig", latent: int = 0) -> Group:
    """The kind of KV cache that Manthan reads; raises UnsupportedError for any other or several.

    latent: see `latent_of`.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    groups = kv_cache_config.kv_cache_groups
    names = ", ".join(type(group.kv_cache_spec).__name__ for group in groups) or "none"
    spec = groups[0].kv_cache_spec if len(groups) == 1 else None
    if (
        not isinstance(spec, FullAttentionSpec)
        or type(spec) is not (MLAAttentionSpec if latent else FullAttentionSpec)
        or (latent and spec.page_size_bytes != spec.block_size * spec.head_size * spec.dtype.itemsize)
        or spec.sliding_window
        or spec.attention_chunk_size
    ):
        raise UnsupportedError(
            f"Manthan cannot be used here: the model's KV cache groups are {names}; only one group of full attention "
            "or of latents (MLA) is supported, without padding or quantization."
        )
    return Group(0, spec, len(groups[0].layer_names), latent)
