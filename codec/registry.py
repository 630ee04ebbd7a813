"""Codecs by name. Others add theirs through entry points of the group `manthan.codecs`: the codec's name, and
a callable (head_dim, backend) -> Codec."""

import difflib
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points

from manthan.codec.base import Codec, CodecSpec, SectionCodec
from manthan.codec.centred import K4V2C, K4V4C
from manthan.codec.cpu.centred import CentredSections
from manthan.codec.cpu.exact import EXACT, ExactSections
from manthan.codec.cpu.klt import KltSections
from manthan.codec.cpu.numpy_codec import NumpyCodec
from manthan.codec.cpu.state import StateSections
from manthan.codec.cpu.tiles import TileSections
from manthan.codec.cpu.vectors import VectorSections
from manthan.codec.cpu.wht import WhtSections
from manthan.codec.errors import ProfileError, UnknownBackendError, UnknownCodecError
from manthan.codec.model import NO_FACTS, ModelFacts
from manthan.codec.profile import PRESETS, Profile
from manthan.codec.state import STATE_CODECS
from manthan.codec.wht import FINER
from manthan.codec.wht import NAME as WHT
from manthan.codec.wht import PRESETS as STEPPED

GROUP = "manthan.codecs"
DEFAULT = WHT
"""Where nothing is known of the model."""
SPECS = {
    spec.name: spec
    for spec in (
        CodecSpec("k3v3", 3, 3, unbiased=True),
        CodecSpec("k4v2", 4, 2, unbiased=True),
        CodecSpec("lloyd3", 3, 3),
        CodecSpec("k4v3", 4, 3),
        CodecSpec("lloyd4", 4, 4),
        CodecSpec("lloyd3-unrotated", 3, 3, rotated=False),
    )
}
"""Codecs of single vectors."""
CENTRED = {spec.name: spec for spec in (K4V2C, K4V4C)}
"""Codecs whose keys are coded less their block's mean before RoPE."""
TILED = {spec.name: spec for spec in (CodecSpec("k4v2-tiles", 4, 2),)}
"""Codecs that see all of a head's keys or values of a block at once."""

FALLBACK = FINER
"""What is used last where a codec turns out not to be faithful to a model, if that is any better."""


def finer_codecs(name: str) -> list[str]:
    """Codecs to use instead of one that is not faithful to a model, the coarsest first."""
    without_profile = [WHT] if needs_profile(name) else []  # the text may be of a kind that the profile does not fit
    return [] if name in (FALLBACK, EXACT) else [*without_profile, FALLBACK]


def codec_names() -> list[str]:
    """Every name that section_codec knows without a profile, ours first."""
    ours = [*SPECS, *CENTRED, *TILED, *STEPPED]
    return [*ours, *sorted(_others().keys() - set(ours))]


def takes_facts(name: str) -> bool:
    """Whether the codec of this name encodes by what is known of the model, so that codes of one do not fit another."""
    return name in CENTRED or name in STEPPED or needs_profile(name)


def section_codec_names() -> list[str]:
    """Every name that section_codec knows but "exact": those that take a profile as well."""
    return [*codec_names(), *PRESETS]


def needs_profile(name: str) -> bool:
    """Whether the codec of this name is made from a profile of the model."""
    return name in PRESETS


def get_codec(name: str, head_dim: int, backend: str = "auto") -> Codec:
    """The codec of this name for vectors of head_dim numbers, a multiple of 8 from 32 to 512, in the CPU's memory.

    backend: "numpy", or "auto", which is the same today. Raises UnknownCodecError, for codecs of whole sections too,
    UnknownBackendError, HeadDimError.
    """
    if backend not in ("auto", "numpy"):
        raise UnknownBackendError(f'backend {backend!r} is unknown: use "auto" or "numpy".')
    if name in SPECS:
        return NumpyCodec(SPECS[name], head_dim)
    if name in _others():
        codec: Codec = _others()[name].load()(head_dim, backend)
        return codec
    if takes_facts(name) or name in TILED:
        raise UnknownCodecError(f"codec {name!r} is not one of single vectors: section_codec makes it.")
    near = difflib.get_close_matches(str(name), codec_names(), 1, 0.0)[0]
    raise UnknownCodecError(f"codec {name!r} is unknown: did you mean {near!r}? There are {', '.join(codec_names())}.")


def section_codec(name: str, head_dim: int, facts: ModelFacts = NO_FACTS) -> SectionCodec:
    """The codec of this name, or "exact", for sections whose vectors have head_dim numbers, in the CPU's memory.

    facts: of the model; codecs of states are made where it has their layout. Raises UnknownCodecError, HeadDimError,
    and ProfileError where a profile is missing or does not fit.
    """
    if name == EXACT:
        return ExactSections()
    if name in STATE_CODECS.values() and facts.state is not None:
        return StateSections(name, facts.state)
    if name in CENTRED:
        return CentredSections(CENTRED[name], head_dim, facts.rope)
    if name in STEPPED:
        return WhtSections(head_dim, facts.rope, STEPPED[name])
    if name in TILED:
        return TileSections(TILED[name], head_dim)
    if not needs_profile(name):
        return VectorSections(get_codec(name, head_dim))
    if not isinstance(facts.profile, Profile):
        raise ProfileError(f"codec {name} needs a profile of the model: run `manthan calibrate MODEL`.")
    return KltSections(name, head_dim, facts.profile, facts.rope)


@lru_cache
def _others() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}
