"""Settings of quality.py: a model's shape, a codec with a number of exact tokens, and the size of stored prefixes.

A prefix's first tokens may be exact: their KV is stored without loss.
"""

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
"""Arm that computes prefix and continuation together, without reused KV: the effect of rounding alone."""
LAST_BIT = "last bit"
"""Arm with the last bit flipped in a random half of the KV's bf16 numbers: the least change. Only with Transformers."""
ALL = "all"
"""Word for all codecs that can encode the model, or for all tasks, instead of names."""
FULL_ATTENTION = "full_attention"
LONG = 8192
"""Tokens of a session whose bytes are extrapolated from a prefix, so that exact tokens are as rare as in practice."""


class QualityError(ValueError):
    """Reason why a measurement is impossible, as a sentence for the user."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, from its config.json. heads: number of KV heads. vocabulary: number of token ids.

    positions: longest context in tokens; 0 if unknown. rope: RoPE of the keys, None if unknown.
    """

    layers: int
    heads: int
    head_dim: int
    vocabulary: int
    positions: int
    rope: Rope | None = None

    @property
    def token_numbers(self) -> int:
        """Count of numbers in a token's KV, all layers."""
        return 2 * self.layers * self.heads * self.head_dim

    @classmethod
    def of(cls, model: str) -> Self:
        """Return the shape of a model. Raises QualityError for an unreadable or unsupported model."""
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
            raise QualityError(f"{model} cannot be measured, because this benchmark takes full attention only: {why}.")


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]


@dataclass(frozen=True)
class Setting:
    """Codec, and the number `sink` of exact tokens at the start of a prefix.

    profile: path of a calibrated codec's profile.
    """

    codec: str
    sink: int = 0
    profile: str = ""

    @property
    def name(self) -> str:
        codec = "exact, encoded" if self.codec == EXACT else self.codec  # "exact" is the arm without a codec
        return f"{codec} {self.sink}" if self.sink else codec

    @property
    def config(self) -> dict[str, Any]:
        """Value of `codec` in Manthan's configuration, with the guard off, which would replace an unfaithful codec."""
        profile = {"profile": self.profile} if self.profile else {}
        return {"name": self.codec, "guard": False, "sink_tokens": self.sink, **profile}

    def exact_tokens(self, blocks: int, block_size: int) -> NDArray[np.int64]:
        """Return the number of exact tokens in each full block of a prefix, [blocks]."""
        return np.clip(self.sink - block_size * np.arange(blocks), 0, block_size)


def load_facts(model: str, shape: Shape, codecs: str, profile: Path | None) -> tuple[ModelFacts, str]:
    """Return the model's facts that codecs need, and the path of the profile among them; "" without a profile.

    If `profile` is None and a codec of `codecs` may be calibrated, take the profile that `manthan calibrate` has saved.
    Raises QualityError for an unreadable profile, or a profile of a different model.
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
    """Return a setting for each codec in `codecs` with each number of exact tokens in `exact`, both split at commas.

    Codec AUTO is CALIBRATED if the facts have a profile, and else PLAIN. ALL stands for all registered codecs that can
    encode vectors of `head_dim` numbers with these facts. profile: path of the facts' profile. Raises QualityError.
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
    """Register PEERS, references of published codecs, in this process. Raises CodecError without their modules."""
    try:
        from manthan.benchmarks.peers.formats import FP8, NVFP4
        from manthan.benchmarks.peers.kvarn import KVARN
        from manthan.benchmarks.peers.kvtc import KVTC
        from manthan.benchmarks.peers.turboquant import TURBOQUANT
    except ImportError:
        raise CodecError(f"{', '.join(PEERS)} need a clone of Manthan: they are not in the wheel.") from None
    registry.PRESETS |= {peer.name: peer for peer in (KVARN, *TURBOQUANT.values(), *KVTC.values(), FP8, NVFP4)}


def _named(codecs: str, head_dim: int, facts: ModelFacts) -> list[str]:
    """Return the names in `codecs`, AUTO resolved. Raises CodecError for a codec that cannot encode the vectors."""
    auto = CALIBRATED if facts.profile else PLAIN
    names = [auto if name.strip() == AUTO else name.strip() for name in codecs.split(",")]
    if not set(PEERS).isdisjoint(names):
        _register_peers()
    for name in names:
        get_codec(name, head_dim, facts)
    return names


def _able(head_dim: int, facts: ModelFacts) -> list[str]:
    """Return the names of registered codecs that can encode the vectors. Raises CodecError if there is none."""
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
    """Size of a prefix in the cold store, headers and exact tokens included.

    bits: stored bits per number of the KV. ratio: bf16 bytes over stored bytes. ratio_long: ratio of a session of LONG
    tokens; None if unknown.
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
        """Return the size of `tokens` tokens in `nbytes` bytes. long_nbytes: bytes of LONG tokens; None if unknown."""
        raw = 2 * shape.token_numbers
        per_token = nbytes / tokens
        return cls(per_token, 16 * per_token / raw, raw / per_token, long_nbytes and raw * LONG / long_nbytes)


def long_nbytes(setting: Setting, nbytes: float, tokens: int, block_size: int, shape: Shape) -> float | None:
    """Return the estimated bytes of a session of LONG tokens, from the `nbytes` bytes of a prefix of `tokens` tokens.

    Exact tokens count as bf16, and lossy tokens as the mean lossy token of the prefix. Return None if it has none.
    """
    raw = 2 * shape.token_numbers
    exact, long_exact = (int(setting.exact_tokens(n // block_size, block_size).sum()) for n in (tokens, LONG))
    if exact == tokens:
        return None
    return raw * long_exact + (nbytes - raw * exact) / (tokens - exact) * (LONG - long_exact)
