"""What must agree for codes to be read: the model, how it was loaded, the codec and the shard."""

import hashlib
import json
from typing import TYPE_CHECKING

from manthan.codec import wire

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import FullAttentionSpec


def fingerprint(vllm_config: "VllmConfig", spec: "FullAttentionSpec", codec: str) -> bytes:
    """16 bytes over everything that decides what a block of this rank means.

    `ModelConfig.compute_hash` covers the model's name, revision, quantization, dtype and rotary settings.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    parts = {
        "wire": wire.VERSION,
        "codec": codec,
        "model": model.model,
        "revision": model.revision,
        "model_hash": model.compute_hash(),
        "dtype": str(spec.dtype),
        "block_size": spec.block_size,
        "kv_heads": spec.num_kv_heads,
        "head_size": spec.head_size,
        "tensor_parallel": [parallel.rank, parallel.tensor_parallel_size],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()[:16]
