"""Models and settings of vLLM that Manthan refuses. Each stops the server at start, with a one-sentence error."""

import re
from typing import TYPE_CHECKING, NamedTuple, Self

from manthan.codec.base import Dtype
from manthan.manager.config.model import TenantsConfig, TiersConfig
from manthan.manager.config.resolve import ConfigError
from manthan.vllm_hooks.transfer_config import CONNECTOR, SEVERAL, entries, from_vllm_config

if TYPE_CHECKING:
    from vllm.config import CacheConfig, VllmConfig

DEVICES = ("cpu", "cuda")
VLLM = ">=0.32,<0.34"  # releases of vLLM whose private parts Manthan knows; see docs/compatibility.md
RELEASES = ("0.32", "0.33")
DRAFTS = ("eagle", "eagle3", "mtp", "draft_model")
"""Methods of --speculative-config with a draft whose KV Manthan stores together with the model's KV."""
NOT_BESIDE = {CONNECTOR, "DecodeBenchConnector", "HiSparseConnector", SEVERAL}
"""Connectors refused together with Manthan: a second Manthan, a MultiConnector inside a MultiConnector, and two more.

DecodeBenchConnector fills the cache with made-up KV, and HiSparseConnector keeps KV outside of vLLM's blocks.
"""
PLAIN = ("auto", "bfloat16", "float16", "float32")  # values of `cache_dtype` that name no quantized dtype
E4M3 = "fp8_e4m3"
FP8 = {"fp8": Dtype.FLOAT8_E4M3, E4M3: Dtype.FLOAT8_E4M3, "fp8_e5m2": Dtype.FLOAT8_E5M2}
"""Dtypes of one byte, by --kv-cache-dtype. Codecs ignore a layer's scale, because the scale changes only when the
weights do."""
DS_MLA = "fp8_ds_mla"  # --kv-cache-dtype of latents (MLA) in fp8, for which the cache has scales of each token


class UnsupportedError(ConfigError):
    """Unsupported model or setting of vLLM."""


def check_supported(vllm_config: "VllmConfig") -> None:
    """Raise UnsupportedError for a model or a setting of vLLM that Manthan does not support."""
    import vllm
    from vllm import envs
    from vllm.platforms import current_platform

    check_version(vllm.__version__)
    model, cache = vllm_config.model_config, vllm_config.cache_config
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    config = from_vllm_config(vllm_config)
    on_device = config.tiers.kind == "device"
    speculative = vllm_config.speculative_config
    device = current_platform.device_type
    without = "serve it without Manthan"
    names = [each.get("kv_connector") for each in entries(transfer)]
    strange = sorted(name for name in NOT_BESIDE if names.count(name) > (name == CONNECTOR))  # one entry is Manthan's
    hashes = hash_refusal(config.tiers, cache.prefix_caching_hash_algo, config.tenants)
    backend, on_cuda = config.codec.backend, current_platform.is_cuda()
    has_strange_draft = has_draft(vllm_config) and speculative is not None and speculative.method not in DRAFTS
    uncached_latents = model.use_mla and device == "cpu" and not cache.enable_prefix_caching
    quantized_on_rocm = current_platform.is_rocm() and cache.cache_dtype not in PLAIN
    no_headers = bool(config.tenants.header) and envs.VLLM_USE_RUST_FRONTEND
    refusals = {
        f"vLLM runs on {device}; {' and '.join(DEVICES)} are supported": device not in DEVICES,
        "tiers.kind is device, but vLLM runs on the CPU: use host": device == "cpu" and on_device,
        f"codec.backend is cuda, but vLLM runs on {current_platform.device_name}: use auto or numpy": backend == "cuda"
        and not on_cuda,
        "tiers.kind is device, but codec.backend numpy keeps blocks in RAM: use kind host, or codec.backend auto": (
            on_device and backend == "numpy"
        ),
        "prefix caching is off: vLLM's CPU build may disable it for models with latents (MLA), such as "
        f"{model.model}; serve the model on a GPU, or without Manthan": uncached_latents,
        f"{model.model} has no attention layers, but states only; {without}": model.is_attention_free,
        f"{model.model} is an encoder-decoder model; {without}": model.is_encoder_decoder,
        f"--kv-cache-dtype {cache.cache_dtype} is untried on ROCm, whose fp8 may be of another kind; use bfloat16": (
            quantized_on_rocm
        ),
        hashes: bool(hashes),
        "prefix caching is off; use --enable-prefix-caching": not cache.enable_prefix_caching,
        f"--speculative-config has method {speculative and speculative.method}, whose draft's KV was never tried; "
        f"use {', '.join(DRAFTS)}, or ngram": has_strange_draft,
        f"tenants.header is {config.tenants.header}, but VLLM_USE_RUST_FRONTEND is set, and that front end hands "
        "no headers on; unset one of the two": no_headers,
        f"kv_role of {transfer.kv_connector} is {transfer.kv_role}, but Manthan saves and loads KV: use "
        "kv_both, and name the role of any further connector in its own entry": transfer.kv_role != "kv_both",
        f"--kv-transfer-config must not have {', '.join(strange)} next to Manthan's own entry": bool(strange),
        f"kv_load_failure_policy of {transfer.kv_connector} is {transfer.kv_load_failure_policy}: set it to "
        "recompute, so that a lost block costs time and not the request": (
            transfer.kv_load_failure_policy != "recompute"
        ),
    }
    if why := next((reason for reason, is_refused in refusals.items() if is_refused), ""):
        raise UnsupportedError(f"Manthan cannot be used here: {why}.")


def check_version(version: str) -> None:
    """Raise UnsupportedError for a release of vLLM that is not in RELEASES. A version without a number is accepted."""
    release = re.match(r"\d+\.\d+", version)
    if release and release[0] not in RELEASES:
        raise UnsupportedError(
            f"Manthan cannot be used here: vLLM is {version}, but this version of Manthan was made for "
            f"{' and '.join(RELEASES)} and no other: install vllm{VLLM}."
        )


def hash_refusal(store: TiersConfig, algorithm: str, tenants: TenantsConfig) -> str:
    """Return why --prefix-caching-hash-algo `algorithm` is refused for these tiers and tenants; empty if accepted."""
    is_apart = tenants.isolate and bool(tenants.header or tenants.shares)
    if not (store.is_lasting or is_apart) or "xxhash" not in algorithm:
        return ""
    setting = f"tiers.kind is {store.kind}" if store.is_lasting else "tenants.isolate is true"
    return (
        f"{setting}, but --prefix-caching-hash-algo {algorithm} does not resist collisions, and "
        "whoever finds one is served another's blocks: use sha256"
    )


class Latents(NamedTuple):
    """Count of a token's numbers in one layer of a model with latents (MLA); 0 for a model with keys and values."""

    numbers: int = 0  # of the latent
    turned: int = 0  # of the part of the key that RoPE turns

    @classmethod
    def of(cls, vllm_config: "VllmConfig") -> Self:
        model = vllm_config.model_config
        numbers = int(getattr(model.hf_text_config, "kv_lora_rank", None) or 0) if model.use_mla else 0
        return cls(numbers, model.get_head_size() - numbers) if numbers else cls()


def has_draft(vllm_config: "VllmConfig") -> bool:
    """True if speculative decoding has a draft with layers in the KV cache."""
    speculative = vllm_config.speculative_config
    return speculative is not None and bool(speculative.uses_draft_kv_cache())


def blocks_computed_again(vllm_config: "VllmConfig") -> int:
    """Number of blocks at the end of a prefix cache hit that vLLM computes again: 1 for some drafts, such as EAGLE."""
    speculative = vllm_config.speculative_config
    return int(speculative is not None and speculative.use_eagle_block_drop())


def is_packed(cache: "CacheConfig") -> bool:
    """True if blocks are stored as opaque bytes, because no codec knows the dtype, or layers have different dtypes."""
    is_unknown = cache.cache_dtype not in (*FP8, DS_MLA) or bool(cache.kv_cache_dtype_skip_layers)
    return cache.cache_dtype not in PLAIN and is_unknown
