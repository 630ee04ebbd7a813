"""Places of profiles: their folder, and a name by the model's content."""

import hashlib
import json
import os
import re
from functools import lru_cache
from pathlib import Path

import xxhash

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


def profiles_folder() -> Path:
    """Return $XDG_CACHE_HOME/manthan/profiles, or the one in ~/.cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "manthan" / "profiles"


def profile_path(model: str, ranks: int = 1, revision: str | None = None) -> Path:
    """Path of the profile of a model, a folder or a name on the Hugging Face Hub, for its tensor-parallel ranks."""
    slug = re.sub(r"[^A-Za-z0-9]+", "-", Path(model).name if Path(model).exists() else model).strip("-").lower()
    split = f"-tp{ranks}" if ranks > 1 else ""
    return profiles_folder() / f"{slug}-{_identity(model, revision)[:16]}{split}.safetensors"


def has_weights(model: str, revision: str | None = None) -> bool:
    """True if the model's weights are on this machine, so that a profile can be told to be theirs."""
    folder = _folder(model, revision)
    return folder is not None and bool(_weights(folder))


def _identity(model: str, revision: str | None) -> str:
    """Digest of the configuration and of all bytes of the weights, or of the name where there is no folder."""
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
    """Digest of a file that was last changed at this time."""
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
    except Exception:  # not there, or another source: the name has to suffice
        return None
