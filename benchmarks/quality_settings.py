"""Settings of quality.py: the model's shape, codecs with their exact tokens, and bytes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from manthan.codec import CodecError, codec_names, get_codec, registry
from manthan.codec.model import NO_FACTS, ModelFacts
from manthan.codec.profile import Profile
from manthan.codec.registry import needs_profile
from manthan.codec.rope import Rope
from manthan.manager.config.model import ConfigError
from manthan.manager.config.profiles import AUTO, CALIBRATED, PLAIN, ChosenCodec, check_profile, profile_path

EXACT = "exact"
RECOMPUTED = "recomputed"
"""Exact KV of prefix and continuation computed together: the effect of rounding alone."""
LAST_BIT = "last bit"
"""KV with half of all last bits flipped: the least effect of a change, with Transformers."""
ALL = "all"
"""All measurable codecs, instead of names."""
FULL_ATTENTION = "full_attention"
LONG = 8192
"""Tokens of the session for extrapolated bytes, with exact tokens as rare as in use."""


class QualityError(ValueError):
    """Impossible measurement, in a sentence."""


@dataclass(frozen=True)
class Shape:
    """Facts behind the sizes. heads: KV heads. positions: the longest context, 0 if the model does not say.

    rope: RoPE of the keys, None if unknown.
    """

    layers: int
    heads: int
    head_dim: int
    vocabulary: int
    positions: int
    rope: Rope | None = None

    @property
    def token_numbers(self) -> int:
        """Numbers in the KV of a token."""
        return 2 * self.layers * self.heads * self.head_dim

    @classmethod
    def of(cls, model: str) -> Self:
        """Raises QualityError for an unreadable or unsupported model."""
        from transformers import AutoConfig

        try:
            config = AutoConfig.from_pretrained(model)
        except (OSError, ValueError) as error:
            raise QualityError(f"{model} is no model that can be read: {_first_line(error)}") from None
        text = config.get_text_config(decoder=True)
        _check_attention(model, config, text)
        heads = text.num_attention_heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        positions = getattr(text, "max_position_embeddings", None) or 0
        rope = Rope.of_config(text, head_dim)
        return cls(text.num_hidden_layers, kv_heads, head_dim, text.vocab_size, positions, rope)


def _check_attention(model: str, config: Any, text: Any) -> None:
    kinds = set(getattr(text, "layer_types", None) or ()) - {FULL_ATTENTION}
    sliding = getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None
    refusals = [
        (config.is_encoder_decoder, "it is an encoder-decoder model"),
        (getattr(text, "kv_lora_rank", None), "its multi-head latent attention (MLA) caches no keys and values"),
        (kinds, f"it has layers of {', '.join(sorted(kinds))}"),
        (not kinds and sliding, f"it uses sliding window attention (window {sliding})"),
        (not getattr(text, "num_attention_heads", 0), "it has no attention heads"),
    ]
    for refused, why in refusals:
        if refused:
            raise QualityError(f"{model} cannot be measured, for Manthan serves full attention only: {why}.")


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]


@dataclass(frozen=True)
class Setting:
    """Codec, and the number of exact tokens at the begin (sink) of a prefix.

    profile: path of a calibrated codec's profile.
    """

    codec: str
    sink: int = 0
    profile: str = ""

    @property
    def name(self) -> str:
        codec = "exact, encoded" if self.codec == EXACT else self.codec  # unlike the arm with the name
        return f"{codec} {self.sink}" if self.sink else codec

    @property
    def config(self) -> dict[str, Any]:
        """Value of `codec` in Manthan's configuration: this codec, even if the guard would choose differently."""
        profile = {"profile": self.profile} if self.profile else {}
        return {"name": self.codec, "guard": False, "sink_tokens": self.sink, **profile}

    def exact_tokens(self, blocks: int, block_size: int) -> NDArray[np.int64]:
        """[blocks]: how many of the first tokens of each of a prefix's full blocks stay exact."""
        return np.clip(self.sink - block_size * np.arange(blocks), 0, block_size)


def load_facts(model: str, shape: Shape, codecs: str, profile: Path | None) -> tuple[ModelFacts, str]:
    """Return facts for codecs, and the path of the facts' profile. Raises QualityError.

    An unnamed profile is looked up in the folder of `manthan calibrate`, if a codec is calibrated.
    """
    path = profile or profile_path(model)
    if profile is None and not (path.exists() and _may_take_profile(codecs)):
        return ModelFacts(shape.rope), ""
    try:
        loaded = Profile.load(path).for_rank(0, 1)
        check_profile(ChosenCodec("", path, loaded), model, shape.layers, shape.heads, shape.head_dim)
    except (CodecError, ConfigError) as error:
        raise QualityError(f"{f'--profile {profile}: ' if profile else ''}{str(error).rstrip('.')}.") from None
    return ModelFacts(shape.rope, loaded), str(path.absolute())


def _may_take_profile(codecs: str) -> bool:
    names = {name.strip() for name in codecs.split(",")}
    return not names.isdisjoint((AUTO, ALL)) or any(map(needs_profile, names))


def parse_settings(
    codecs: str, exact: str, head_dim: int, facts: ModelFacts = NO_FACTS, profile: str = ""
) -> list[Setting]:
    """Return each codec with each number of exact first tokens, both lists by comma.

    AUTO: Manthan's choice. ALL: all registered codecs that can encode with these facts, and vectors of this size.
    profile: path of the facts' profile.
    """
    try:
        names = _able(head_dim, facts) if codecs == ALL else _named(codecs, head_dim, facts)
    except CodecError as error:
        raise QualityError(f"--codec {codecs}: {error}") from None
    return [
        Setting(name, _tokens(part, exact), profile if needs_profile(name) else "")
        for name in dict.fromkeys(names)
        for part in exact.split(",")
    ]


PEERS = ("kvarn", "turboquant-3bit", "turboquant-4bit", "kvtc-2bit", "kvtc-4bit", "fp8", "nvfp4")


def _register_peers() -> None:
    """Register the peers' references as codecs of this process. Raises CodecError if the references are not
    installed.
    """
    try:
        from manthan.benchmarks.peers.formats import FP8, NVFP4
        from manthan.benchmarks.peers.kvarn import KVARN
        from manthan.benchmarks.peers.kvtc import KVTC
        from manthan.benchmarks.peers.turboquant import TURBOQUANT
    except ImportError:
        raise CodecError(f"{', '.join(PEERS)} need a clone of Manthan: they are not in the wheel.") from None
    registry.PRESETS |= {peer.name: peer for peer in (KVARN, *TURBOQUANT.values(), *KVTC.values(), FP8, NVFP4)}


def _named(codecs: str, head_dim: int, facts: ModelFacts) -> list[str]:
    """Raises CodecError."""
    auto = CALIBRATED if facts.profile else PLAIN
    names = [auto if name.strip() == AUTO else name.strip() for name in codecs.split(",")]
    if not set(PEERS).isdisjoint(names):
        _register_peers()
    for name in names:
        get_codec(name, head_dim, facts)
    return names


def _able(head_dim: int, facts: ModelFacts) -> list[str]:
    """Raises CodecError if there is none."""
    names, refusal = [], None
    for name in codec_names():
        try:
            names += _named(name, head_dim, facts)
        except CodecError as error:
            refusal = error
    if refusal and not names:
        raise refusal
    return names


def _tokens(part: str, exact: str) -> int:
    if not part.strip().isdecimal():
        raise QualityError(f"--exact {exact}: {part!r} is not a number of tokens, such as 4 (0 for none).")
    return int(part)


@dataclass(frozen=True)
class Storage:
    """Bytes of a prefix in the cold store, headers and exact tokens included. bits: per number of the KV. ratio: bf16
    bytes over stored bytes. ratio_long: the same of a session of LONG tokens; None if too little is known.
    """

    bytes_per_token: float
    bits: float
    ratio: float
    ratio_long: float | None

    @classmethod
    def of_bf16(cls, shape: Shape) -> Self:
        return cls(2 * shape.token_numbers, 16, 1, 1)

    @classmethod
    def of_bytes(cls, nbytes: float, tokens: int, long_nbytes: float | None, shape: Shape) -> Self:
        """nbytes: of these tokens. long_nbytes: of LONG tokens."""
        raw = 2 * shape.token_numbers
        per_token = nbytes / tokens
        return cls(per_token, 16 * per_token / raw, raw / per_token, long_nbytes and raw * LONG / long_nbytes)


def long_nbytes(setting: Setting, nbytes: float, tokens: int, block_size: int, shape: Shape) -> float | None:
    """Return bytes of LONG tokens, if `tokens` take nbytes and single blocks are unknown; None if all are exact."""
    raw = 2 * shape.token_numbers
    exact, long_exact = (int(setting.exact_tokens(n // block_size, block_size).sum()) for n in (tokens, LONG))
    if exact == tokens:
        return None
    return raw * long_exact + (nbytes - raw * exact) / (tokens - exact) * (LONG - long_exact)
