"""What must agree for codes to be read: the model, how it was loaded, the codec with its profile, and the shard."""

import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from manthan.codec import wire
from manthan.codec.model import NO_FACTS, ModelFacts

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig

    from manthan.vllm_hooks.support import Group


def fingerprint(
    vllm_config: "VllmConfig",
    group: "Group",
    codec: str,
    namespace: str = "",
    facts: ModelFacts = NO_FACTS,
    copies: int = 1,
) -> bytes:
    """16 bytes over everything that decides what a block of this rank means.

    namespace: of a store that outlives the engine; its name covers the model. Without one, `ModelConfig.compute_hash`
    does: name, revision, quantization, dtype and rotary settings, and much that does not matter. facts: what the codec
    knows of the model. copies: see `manthan.vllm_hooks.replicas`; what one of these ranks has stored all may read.
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
        "tensor_parallel": [parallel.rank // copies, parallel.tensor_parallel_size // copies],
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
    """What decides the KV that a model computes: its configuration, with overrides, and its weights; so of its draft.

    Not where it lies, nor how much of it may be used at a time: an engine with another --max-model-len finds its
    sessions again.
    """
    model, speculative = vllm_config.model_config, vllm_config.speculative_config
    identity = _identity(model, vllm_config.load_config)
    if speculative is not None and speculative.uses_draft_kv_cache():
        load = speculative.draft_load_config or vllm_config.load_config
        identity["draft"] = {"method": speculative.method, **_identity(speculative.draft_model_config, load)}
    return identity


def _identity(model: "ModelConfig", load: "LoadConfig") -> dict[str, object]:
    settings = _settings(model.hf_config.to_dict())
    return {"config": settings, "quantization": model.quantization, "weights": weights_digest(model, load)}


def _settings(config: object) -> object:
    """A model's configuration, with those in it, but for where it lies and what wrote it."""
    if not isinstance(config, dict):
        return config
    named = {key: value for key, value in config.items() if not str(key).startswith("_")}
    return {key: _settings(value) for key, value in named.items() if key != "transformers_version"}


def weights_digest(model: "ModelConfig", load: "LoadConfig") -> str:
    """What tells a model's weights from others that were in the same place: codes in Redis outlive the engine.

    The files' names, sizes and SAMPLES pieces of each, the first of which names the tensors and their shapes. For
    weights that do not lie in files, what made them, or else their name and revision.
    """
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
