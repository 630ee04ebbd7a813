"""The codec that a configuration means for a model, and the profile that it takes."""

import logging
from dataclasses import dataclass
from pathlib import Path

from manthan.codec.errors import ProfileError
from manthan.codec.profile import PRESETS, Profile
from manthan.codec.registry import needs_profile
from manthan.manager.calibration.places import has_weights, profile_path
from manthan.manager.config.model import CodecConfig, ConfigError

logger = logging.getLogger("vllm.manthan")

AUTO = "auto"
"""The name that stands for CALIBRATED where the model has a profile, and for PLAIN where it has none."""
CALIBRATED, PLAIN = "klt-8x", "wht-5x"


@dataclass(frozen=True)
class ChosenCodec:
    """name: of a codec. profile: the model's, if the codec takes one, and path where it lies."""

    name: str
    path: Path | None = None
    profile: Profile | None = None


def choose_codec(
    config: CodecConfig, model: str, ranks: int = 1, has_latents: bool = False, revision: str | None = None
) -> ChosenCodec:
    """For so many tensor-parallel ranks. A profile that is not named is looked for where `manthan calibrate` puts it,
    by the model's weights.

    has_latents: whether the model caches latents (MLA), which take no profile. Raises ConfigError for a profile that is
    missing, cannot be read, is for another number of ranks, or has not the codec's preset.
    """
    if has_latents and (needs_profile(config.name) or config.profile):
        what = f"codec.profile is {config.profile}" if config.profile else f"codec.name is {config.name}"
        raise ConfigError(
            f"{what}, but {model} uses multi-head latent attention (MLA), and its latents take no profile: use auto, "
            f"{PLAIN} or wht-4x"
        )
    if has_latents and config.name == AUTO:
        return ChosenCodec(PLAIN)
    if config.name != AUTO and not needs_profile(config.name):
        if config.profile:
            takes = ", ".join((AUTO, *PRESETS))
            raise ConfigError(f"codec.profile is {config.profile}, but codec {config.name} takes none: use {takes}")
        return ChosenCodec(config.name)
    named = Path(config.profile).expanduser().absolute() if config.profile else None
    path = named or profile_path(model, ranks, revision)
    name = CALIBRATED if config.name == AUTO else config.name
    try:
        if named or (path.exists() and has_weights(model, revision)):
            return ChosenCodec(name, path, load_profile(path, name, model, ranks))
    except ConfigError as error:
        if config.name != AUTO or named:
            raise
        logger.warning("Manthan: codec %s is used, for %s", PLAIN, error)
        return ChosenCodec(PLAIN)
    if config.name == AUTO:
        return ChosenCodec(PLAIN)
    raise ConfigError(
        f"codec {name} needs a profile of {model}, and there is none at {path}: run `{_command(model, ranks)}`, or "
        "name one that you have with codec.profile"
    )


def load_profile(path: Path, codec: str, model: str, ranks: int) -> Profile:
    """Raises ConfigError for what codec, model and ranks cannot use."""
    try:
        profile = Profile.load(path)
        profile.for_rank(0, ranks)
    except ProfileError as error:
        raise ConfigError(str(error).rstrip(".")) from None
    if codec not in profile.info.ratios:
        has = ", ".join(profile.info.ratios) or "none"
        raise ConfigError(f"the profile {path} has no {codec}: it has {has}; run `{_command(model, ranks)}`")
    return profile


def check_profile(chosen: ChosenCodec, model: str, layers: int, heads: int, head_dim: int) -> None:
    """heads: of all ranks. Raises ConfigError for a profile of another shape."""
    if chosen.profile is None:
        return
    info = chosen.profile.info
    if (info.layers, info.heads, info.head_dim) != (layers, heads, head_dim):
        raise ConfigError(
            f"the profile {chosen.path} is of {info.layers} layers with {info.heads} KV heads of {info.head_dim} "
            f"numbers, but {model} has {layers} with {heads} of {head_dim}: run "
            f"`{_command(model, len(chosen.profile.ranks))}`"
        )


def _command(model: str, ranks: int) -> str:
    return f"manthan calibrate {model}" + (f" --tensor-parallel-size {ranks}" if ranks > 1 else "")
