"""Dtypes of the numbers in vLLM's KV cache, by their names in --kv-cache-dtype."""

from typing import TYPE_CHECKING

from manthan.codec.base import Dtype

if TYPE_CHECKING:
    from vllm.config import CacheConfig

PLAIN = ("auto", "bfloat16", "float16", "float32")
"""Names for caches that are not quantized."""
E4M3 = "fp8_e4m3"
FP8 = {"fp8": Dtype.FLOAT8_E4M3, E4M3: Dtype.FLOAT8_E4M3, "fp8_e5m2": Dtype.FLOAT8_E5M2}
"""Dtypes with one byte a number. Codecs ignore a layer's scale, because it never changes while the engine runs."""


def is_plain(cache: "CacheConfig") -> bool:
    """True if the cache is not quantized."""
    return cache.cache_dtype in PLAIN


def is_packed(cache: "CacheConfig") -> bool:
    """True if blocks are stored as bytes: only vLLM's kernels can read them, or layers have different dtypes."""
    return not is_plain(cache) and (cache.cache_dtype not in FP8 or bool(cache.kv_cache_dtype_skip_layers))
