"""Choice of a model's codec and profile by the configuration, and paths of profiles.

A profile is a file with a model's transforms and tables, which calibrated codecs such as `klt-8x` need. The path of a
profile depends on the model's weights.
"""

import hashlib
import json
import logging
import os
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import xxhash

from manthan.codec.errors import ProfileError
from manthan.codec.profile import LEVELS, Profile
from manthan.codec.registry import needs_profile
from manthan.manager.config.model import CodecConfig, ConfigError

logger = logging.getLogger("vllm.manthan")

AUTO = "auto"  # value of codec.name that stands for CALIBRATED if the model has a profile, and else for PLAIN
CALIBRATED, PLAIN = "klt-8x", "wht-5x"
TRAFFIC = "attention"  # metric of profiles that servers make of traffic, and keep once a guard has chosen CALIBRATED
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


@dataclass(frozen=True)
class ChosenCodec:
    """Name of a codec, and the profile with its path if the codec needs one.

    is_approved: true if a server has made the profile from its traffic, and its guard has chosen the codec.
    """

    name: str
    path: Path | None = None
    profile: Profile | None = None
    is_approved: bool = False


def choose_codec(
    config: CodecConfig, model: str, ranks: int = 1, has_latents: bool = False, revision: str | None = None
) -> ChosenCodec:
    """Return the codec of a model. If no profile is configured, search the folder of `manthan calibrate` for one.

    Args:
        model, revision: Folder of the model, or its name and revision on the Hugging Face hub.
        ranks: Number of tensor-parallel ranks.
        has_latents: True if the model caches latents (MLA), which are the same on all ranks. AUTO is then PLAIN unless
            a profile is configured, because no calibrated codec was tried on a trained model with latents.

    Raises: ConfigError if a needed profile is missing, cannot be read, or is for another number of ranks; or if a
        profile is configured, and the codec needs none.
    """
    is_auto = config.name == AUTO
    name = CALIBRATED if is_auto else config.name
    if has_latents:
        ranks = 1
        if is_auto and not config.profile:
            return ChosenCodec(PLAIN)
    if not needs_profile(name):
        if config.profile:
            takes = ", ".join((AUTO, *LEVELS))
            raise ConfigError(f"codec.profile is {config.profile}, but codec {name} takes none: use {takes}")
        return ChosenCodec(name)
    named = Path(config.profile).expanduser().absolute() if config.profile else None
    path = named or profile_path(model, ranks, revision)
    try:
        if named or (path.exists() and has_weights(model, revision)):
            profile = Profile.load(path)
            profile.for_rank(0, ranks)
            is_approved = profile.info.metric == TRAFFIC and name == CALIBRATED and not named
            return ChosenCodec(name, path, profile, is_approved)
    except ProfileError as error:
        why = str(error).rstrip(".")
        if not is_auto or named:
            raise ConfigError(why) from None
        logger.warning("Manthan: codec %s is used, for %s", PLAIN, why)
    if is_auto:
        return ChosenCodec(PLAIN)
    raise ConfigError(
        f"codec {name} needs a profile of {model}, and there is none at {path}: run `{_command(model, ranks)}`, or "
        "name one that you have with codec.profile"
    )


def check_profile(chosen: ChosenCodec, model: str, layers: int, heads: int, head_dim: int, latent: int = 0) -> None:
    """Raise ConfigError if the profile was made for another shape of KV.

    Args:
        heads: Number of KV heads on all ranks together; of a latent, the number of pieces that codecs cut it into.
        head_dim: Count of numbers in a head, or in a piece of a latent.
        latent: Count of numbers in a token's latent (MLA); 0 for a model that caches keys and values.
    """
    if chosen.profile is None:
        return
    info = chosen.profile.info
    if info.latent != latent:
        whose, what = (f"latents of {each} numbers" if each else "keys and values" for each in (info.latent, latent))
        raise ConfigError(
            f"the profile {chosen.path} is of {whose}, but {model} caches {what}: run `{_command(model, 1)}`"
        )
    if (info.layers, info.heads, info.head_dim) != (layers, heads, head_dim):
        raise ConfigError(
            f"the profile {chosen.path} is of {info.layers} layers with {info.heads} KV heads of {info.head_dim} "
            f"numbers, but {model} has {layers} with {heads} of {head_dim}: run "
            f"`{_command(model, len(chosen.profile.ranks))}`"
        )


def _command(model: str, ranks: int) -> str:
    return f"manthan calibrate {model}" + (f" --tensor-parallel-size {ranks}" if ranks > 1 else "")


def profile_path(model: str, ranks: int = 1, revision: str | None = None) -> Path:
    """Return the path of a model's profile for `ranks` tensor-parallel ranks. Arguments: see `choose_codec`.

    The folder is $XDG_CACHE_HOME/manthan/profiles, or ~/.cache/manthan/profiles.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "manthan" / "profiles"
    slug = re.sub(r"[^A-Za-z0-9]+", "-", Path(model).name if Path(model).exists() else model).strip("-").lower()
    split = f"-tp{ranks}" if ranks > 1 else ""
    return folder / f"{slug}-{_identity(model, revision)[:16]}{split}.safetensors"


def has_weights(model: str, revision: str | None = None) -> bool:
    """True if the model's weights are on this machine, so that the path of its profile depends on them."""
    return bool((folder := model_folder(model, revision)) and _weights(folder))


def _identity(model: str, revision: str | None) -> str:
    """Digest of the model's config.json and all weights' bytes; of its name and revision if no folder has the model."""
    folder = model_folder(model, revision)
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
    """Digest of a file. changed: time of the file's last change, in ns, so that no outdated digest is returned."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def model_folder(model: str, revision: str | None) -> Path | None:
    """Return the folder of a model's files: `model`, or a folder in the hub's cache; None without either."""
    if Path(model).is_dir():
        return Path(model)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except Exception:  # not in the cache, or not from the hub
        return None
