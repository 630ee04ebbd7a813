"""Choice of a model's codec and profile from its configuration."""

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
"""Name for CALIBRATED if the model has a profile, else for PLAIN."""
CALIBRATED, PLAIN = "klt-8x", "wht-5x"


@dataclass(frozen=True)
class ChosenCodec:
    """A codec's name, and the model's profile and its path if the codec takes one."""

    name: str
    path: Path | None = None
    profile: Profile | None = None


def choose_codec(
    config: CodecConfig, model: str, ranks: int = 1, has_latents: bool = False, revision: str | None = None
) -> ChosenCodec:
    """Return the codec of a model. A profile that is not named is looked for where `manthan calibrate` puts it.

    Args:
        ranks: Number of tensor-parallel ranks.
        has_latents: True if the model caches latents (MLA). All ranks have the same, and AUTO is PLAIN unless a profile
            is named, because no calibrated codec was tried on a trained model of this kind.

    Raises:
        ConfigError: The profile is missing, cannot be read, is for another number of ranks, or lacks the preset.
    """
    is_auto = config.name == AUTO
    name = CALIBRATED if is_auto else config.name
    if has_latents:
        ranks = 1
        if is_auto and not config.profile:
            return ChosenCodec(PLAIN)
    if not needs_profile(name):
        if config.profile:
            takes = ", ".join((AUTO, *PRESETS))
            raise ConfigError(f"codec.profile is {config.profile}, but codec {name} takes none: use {takes}")
        return ChosenCodec(name)
    named = Path(config.profile).expanduser().absolute() if config.profile else None
    path = named or profile_path(model, ranks, revision)
    try:
        if named or (path.exists() and has_weights(model, revision)):
            return ChosenCodec(name, path, load_profile(path, name, model, ranks))
    except ConfigError as error:
        if not is_auto or named:
            raise
        logger.warning("Manthan: codec %s is used, for %s", PLAIN, error)
    if is_auto:
        return ChosenCodec(PLAIN)
    raise ConfigError(
        f"codec {name} needs a profile of {model}, and there is none at {path}: run `{_command(model, ranks)}`, or "
        "name one that you have with codec.profile"
    )


def load_profile(path: Path, codec: str, model: str, ranks: int) -> Profile:
    """Return the profile of a file. Raises ConfigError if the codec or this number of ranks cannot use it."""
    try:
        profile = Profile.load(path)
        profile.for_rank(0, ranks)
    except ProfileError as error:
        raise ConfigError(str(error).rstrip(".")) from None
    if codec not in profile.info.ratios:
        has = ", ".join(profile.info.ratios) or "none"
        raise ConfigError(f"the profile {path} has no {codec}: it has {has}; run `{_command(model, ranks)}`")
    return profile


def check_profile(chosen: ChosenCodec, model: str, layers: int, heads: int, head_dim: int, latent: int = 0) -> None:
    """Raise ConfigError for a profile of another shape.

    Args:
        heads: KV heads of all ranks, or pieces of a latent.
        latent: numbers of a latent; 0 for keys and values.
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
