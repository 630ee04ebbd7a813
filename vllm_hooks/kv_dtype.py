"""What the numbers of vLLM's KV cache are, as --kv-cache-dtype names it."""

from typing import TYPE_CHECKING

from manthan.codec.base import Dtype

if TYPE_CHECKING:
    from vllm.config import CacheConfig

PLAIN = ("auto", "bfloat16", "float16", "float32")
"""Each number is one of the model's kind."""
E4M3 = "fp8_e4m3"
FP8 = {"fp8": Dtype.FLOAT8_E4M3, E4M3: Dtype.FLOAT8_E4M3, "fp8_e5m2": Dtype.FLOAT8_E5M2}
"""Each number is a byte, over a scale that a layer has for good: it is nothing that a codec need know."""


def is_plain(cache: "CacheConfig") -> bool:
    """Whether all numbers are of the model's kind."""
    return cache.cache_dtype in PLAIN


def is_packed(cache: "CacheConfig") -> bool:
    """Whether a block is bytes that only vLLM's kernels can read, such as codes with scales of their own, or whether
    its layers are of several kinds."""
    return not is_plain(cache) and (cache.cache_dtype not in FP8 or bool(cache.kv_cache_dtype_skip_layers))
