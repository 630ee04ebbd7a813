"""Kinds of numbers in vLLM's KV cache, as named in --kv-cache-dtype."""

from typing import TYPE_CHECKING

from manthan.codec.base import Dtype

if TYPE_CHECKING:
    from vllm.config import CacheConfig

PLAIN = ("auto", "bfloat16", "float16", "float32")
"""Dtypes of the model's kind."""
E4M3 = "fp8_e4m3"
FP8 = {"fp8": Dtype.FLOAT8_E4M3, E4M3: Dtype.FLOAT8_E4M3, "fp8_e5m2": Dtype.FLOAT8_E5M2}
"""Dtypes of a byte a number. A codec need not know the layer's scale, because the scale never changes."""


def is_plain(cache: "CacheConfig") -> bool:
    """True if all numbers are of the model's kind."""
    return cache.cache_dtype in PLAIN


def is_packed(cache: "CacheConfig") -> bool:
    """True if only vLLM's kernels can read a block, or if the layers are of several kinds."""
    return not is_plain(cache) and (cache.cache_dtype not in FP8 or bool(cache.kv_cache_dtype_skip_layers))
