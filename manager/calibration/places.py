"""Where profiles are kept, and by which name they are found again."""

import hashlib
import json
import os
import re
from functools import lru_cache
from pathlib import Path

import xxhash

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


def profiles_folder() -> Path:
    """$XDG_CACHE_HOME/manthan/profiles, or that in ~/.cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "manthan" / "profiles"


def profile_path(model: str, ranks: int = 1, revision: str | None = None) -> Path:
    """Of a model, a folder or a name on the Hugging Face Hub, for so many tensor-parallel ranks."""
    slug = re.sub(r"[^A-Za-z0-9]+", "-", Path(model).name if Path(model).exists() else model).strip("-").lower()
    split = f"-tp{ranks}" if ranks > 1 else ""
    return profiles_folder() / f"{slug}-{_identity(model, revision)[:16]}{split}.safetensors"


def has_weights(model: str, revision: str | None = None) -> bool:
    """True if the model's weights are on this machine, so that a profile can be told to be theirs."""
    folder = _folder(model, revision)
    return folder is not None and bool(_weights(folder))


def _identity(model: str, revision: str | None) -> str:
    """Of its configuration and its weights, all their bytes; of its name where there is no folder."""
    folder = _folder(model, revision)
    if folder is None:
        return hashlib.sha256(f"{model} {revision}".encode()).hexdigest()
    weights = [(path.name, _content(path, path.stat().st_mtime_ns)) for path in _weights(folder)]
    config = folder / "config.json"
    known = [config.read_text(errors="replace") if config.exists() else "", weights]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()


def _weights(folder: Path) -> list[Path]:
    return sorted(path for kind in WEIGHTS for path in folder.glob(kind))


@lru_cache
def _content(path: Path, changed: int) -> str:
    """Digest of a file as it was when it was changed last."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while part := file.read(2**24):
            digest.update(part)
    return digest.hexdigest()


def _folder(model: str, revision: str | None) -> Path | None:
    if Path(model).is_dir():
        return Path(model)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except Exception:  # not there, or another source: the name must do
        return None
