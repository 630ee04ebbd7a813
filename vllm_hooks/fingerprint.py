"""What must agree for codes to be read: the model, how it was loaded, the codec with its profile, and the shard."""

import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from manthan.codec import wire
from manthan.codec.model import NO_FACTS, ModelFacts

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from manthan.vllm_hooks.support import Group


def fingerprint(
    vllm_config: "VllmConfig", group: "Group", codec: str, namespace: str = "", facts: ModelFacts = NO_FACTS
) -> bytes:
    """16 bytes over everything that decides what a block of this rank means.

    namespace: of a store that outlives the engine; its name covers the model. Without one, `ModelConfig.compute_hash`
    does: name, revision, quantization, dtype and rotary settings, and much that does not matter. facts: what the codec
    knows of the model.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    parts: dict[str, object] = {
        "wire": wire.VERSION,
        "codec": codec,
        "model": namespace or [model.model, model.revision, model.compute_hash()],
        "dtype": group.dtype_name,
        "group": group.index,
        "block_size": group.spec.block_size,
        **({"layers": group.shape} if group.is_packed else {"kv_heads": group.shape[1], "head_size": group.shape[2]}),
        "tensor_parallel": [parallel.rank, parallel.tensor_parallel_size],
    }
    if group.latent:
        parts["latent"] = group.latent
    if facts.rope is not None:
        parts["rope"] = [facts.rope.frequencies, facts.rope.interleaved]
    if facts.state is not None:
        parts["state"] = [[part.nbytes, part.row, part.dtype.name] for part in facts.state.parts]
    if facts.profile is not None:
        parts["profile"] = facts.profile.digest
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()[:16]


WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
SAMPLES, SAMPLE_BYTES = 64, 4096


def model_identity(vllm_config: "VllmConfig") -> dict[str, object]:
    """What decides the KV that a model computes: its configuration, with overrides, and its weights.

    Not where it lies, nor how much of it may be used at a time: an engine with another --max-model-len finds its
    sessions again.
    """
    model = vllm_config.model_config
    settings = model.hf_config.to_dict()
    named = {key: value for key, value in settings.items() if not key.startswith("_") and key != "transformers_version"}
    return {"config": named, "quantization": model.quantization, "weights": weights_digest(vllm_config)}


def weights_digest(vllm_config: "VllmConfig") -> str:
    """What tells a model's weights from others that were in the same place: codes in Redis outlive the engine.

    The files' names, sizes and SAMPLES pieces of each, the first of which names the tensors and their shapes. For
    weights that do not lie in files, what made them, or else their name and revision.
    """
    model, load = vllm_config.model_config, vllm_config.load_config
    if load.load_format == "dummy":
        return f"dummy:{model.seed}"
    folder = _folder(model.model, model.revision)
    return f"{model.model}@{model.revision}" if folder is None else _digest(folder)


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
