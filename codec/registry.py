"""Presets of codecs by name. Other packages add presets as entry points of the group `manthan.codecs`.

The entry point has the preset's name, and loads a `Preset`. A codec encodes sections, parts of a KV block.
"""

import difflib
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Protocol

from manthan.codec.base import Codec
from manthan.codec.cpu.exact import EXACT, ExactCodec
from manthan.codec.cpu.klt import PRESETS as KLTS
from manthan.codec.cpu.klt import KltPreset
from manthan.codec.cpu.state import STATE_CODECS, StateCodec
from manthan.codec.errors import UnknownCodecError
from manthan.codec.k3v3 import K3V3
from manthan.codec.model import NO_FACTS, ModelFacts
from manthan.codec.wht import FINER, WhtPreset
from manthan.codec.wht import NAME as WHT
from manthan.codec.wht import PRESETS as WHTS

GROUP = "manthan.codecs"
DEFAULT = WHT  # codec for a model without a profile (tables and transforms made from the model's own KV)
FALLBACK = FINER  # last lossy codec that the guard tries, before blocks are kept exact; see manthan.manager.guard


class Preset(Protocol):
    """Named choice of a codec and its options."""

    @property
    def name(self) -> str:
        """Name in the configuration, in block headers and of the entry point: at most 24 ASCII characters."""

    def codec(self, head_dim: int, facts: ModelFacts = NO_FACTS) -> Codec:
        """Return the codec that works on the CPU.

        Args:
            head_dim: count of numbers in a vector, a multiple of 8 from 32 to 512.
            facts: facts of the model. A server passes NO_FACTS unless `takes_facts`.

        Raises: CodecError if the codec cannot encode such vectors.
        """


PRESETS: dict[str, Preset] = {**WHTS, **KLTS, K3V3.name: K3V3}


def finer_codecs(name: str) -> list[str]:
    """Return the codecs to try, coarsest first, if codec `name` turns out to lose too much on the model served."""
    without_profile = [WHT] if needs_profile(name) else []  # its profile may not fit the served prompts
    return [] if name in (FALLBACK, EXACT) else [*without_profile, FALLBACK]


def codec_names() -> list[str]:
    """Return the names of all presets, Manthan's own first. "exact" is no preset, but `get_codec` takes it."""
    return [*PRESETS, *sorted(_others().keys() - set(PRESETS))]


def takes_facts(name: str) -> bool:
    """True for Manthan's codecs that use a RoPE or profile. Only engines with the same facts can read the blocks."""
    return isinstance(PRESETS.get(name), WhtPreset | KltPreset)


def needs_profile(name: str) -> bool:
    """True if the codec is made from a profile of the model, and encodes into blocks that can be cut."""
    return isinstance(PRESETS.get(name), KltPreset)


def get_codec(name: str, head_dim: int, facts: ModelFacts = NO_FACTS) -> Codec:
    """Return a codec that works on the CPU.

    Args:
        name: name of a preset, or "exact", or of a codec of recurrent states if `facts` has the states' layout.
        head_dim, facts: see `Preset.codec`.

    Raises: UnknownCodecError, HeadDimError; ProfileError for a missing or unsuitable profile.
    """
    if name == EXACT:
        return ExactCodec()
    if name in STATE_CODECS.values() and facts.state is not None:
        return StateCodec(name, facts.state)
    preset = PRESETS.get(name)
    if preset is None and name in _others():
        preset = _others()[name].load()
    if preset is not None:
        return preset.codec(head_dim, facts)
    near = difflib.get_close_matches(str(name), codec_names(), 1, 0.0)[0]
    raise UnknownCodecError(f"codec {name!r} is unknown: did you mean {near!r}? There are {', '.join(codec_names())}.")


@lru_cache
def _others() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}
