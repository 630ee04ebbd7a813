"""What must agree for codes to be read: the model, how it was loaded, the codec and the shard."""

import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from manthan.codec import wire

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import FullAttentionSpec


def fingerprint(vllm_config: "VllmConfig", spec: "FullAttentionSpec", codec: str, namespace: str = "") -> bytes:
    """16 bytes over everything that decides what a block of this rank means.

    `ModelConfig.compute_hash` covers the model's name, revision, quantization, dtype and rotary settings.
    namespace: of a store that outlives the engine; its name covers the weights.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    parts = {
        "wire": wire.VERSION,
        "codec": codec,
        "namespace": namespace,
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


WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
SAMPLES, SAMPLE_BYTES = 64, 4096


def weights_digest(vllm_config: "VllmConfig") -> str:
    """What tells a model's weights from others that were in the same place: codes in Redis outlive the engine.

    The files' names, sizes and SAMPLES pieces of each, the first of which names the tensors and their shapes. For
    weights that do not lie in files, what made them.
    """
    model, load = vllm_config.model_config, vllm_config.load_config
    if load.load_format == "dummy":
        return f"dummy:{model.seed}"
    folder = _folder(model.model, model.revision)
    return "unknown" if folder is None else _digest(folder)


def _folder(model: str, revision: str | None) -> Path | None:
    """Where the model's files are: its own path, or the hub's cache."""
    if Path(model).exists():
        return Path(model)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except Exception:  # some other source; the model's name and revision must do
        return None


@lru_cache(maxsize=8)
def _digest(folder: Path) -> str:
    files = [folder] if folder.is_file() else sorted({path for ending in WEIGHTS for path in folder.glob(ending)})
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            for sample in range(SAMPLES):
                file.seek(max(0, size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:32]
