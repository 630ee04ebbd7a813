"""What is measured for quality.py: the model's shape, codecs with what they keep exact, and the bytes that takes."""

import math
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from manthan.codec import BlockFormat, BlockShape, CodecError, codec_names, get_codec, wire

EXACT = "exact"
RECOMPUTED = "recomputed"
"""Exact KV too, of prefix and continuation computed in one go: what rounding alone does to the figures."""
FULL_ATTENTION = "full_attention"


class QualityError(ValueError):
    """What cannot be measured, in one sentence."""


@dataclass(frozen=True)
class Shape:
    """What the sizes follow from. heads: KV heads. positions: the longest context, 0 where the model does not say."""

    layers: int
    heads: int
    head_dim: int
    vocabulary: int
    positions: int

    @property
    def token_numbers(self) -> int:
        """Numbers that the KV of one token is made of."""
        return 2 * self.layers * self.heads * self.head_dim

    @classmethod
    def of(cls, model: str) -> Self:
        """Raises QualityError for a model that cannot be read, or that Manthan does not serve."""
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
        return cls(text.num_hidden_layers, kv_heads, head_dim, text.vocab_size, positions)


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
    """A codec, and how many tokens at the beginning (sink) and at the end (window) of a prefix stay exact.

    As in the cold store: of the last tokens, whole blocks do.
    """

    codec: str
    sink: int = 0
    window: int = 0

    @property
    def name(self) -> str:
        return f"{self.codec} {self.sink}+{self.window}" if self.sink or self.window else self.codec

    @property
    def config(self) -> str | dict[str, Any]:
        """The value of `codec` in Manthan's configuration."""
        if not self.sink and not self.window:
            return self.codec
        return {"name": self.codec, "sink_tokens": self.sink, "window_tokens": self.window}

    def exact_tokens(self, blocks: int, block_size: int) -> NDArray[np.int64]:
        """[blocks]: how many of the first tokens of each of a prefix's full blocks stay exact."""
        exact = np.clip(self.sink - block_size * np.arange(blocks), 0, block_size)
        exact[max(0, blocks - math.ceil(self.window / block_size)) :] = block_size
        return exact


def parse_settings(codecs: str, exact: str, head_dim: int) -> list[Setting]:
    """Each codec with each `SINK+WINDOW`, both lists by comma; all registered codecs for an empty list."""
    names = [name.strip() for name in codecs.split(",")] if codecs else codec_names()
    try:
        for name in names:
            get_codec(name, head_dim)
    except CodecError as error:
        raise QualityError(f"--codec {codecs}: {error}" if codecs else str(error)) from None
    return [Setting(name, *_tokens(part, exact)) for name in dict.fromkeys(names) for part in exact.split(",")]


def _tokens(part: str, exact: str) -> tuple[int, int]:
    sink, plus, window = part.strip().partition("+")
    if not (plus and sink.isdecimal() and window.isdecimal()):
        raise QualityError(f"--exact {exact}: {part!r} is not SINK+WINDOW in tokens, such as 4+128 (0+0 for none).")
    return int(sink), int(window)


@dataclass(frozen=True)
class Storage:
    """What a prefix takes in the cold store. bits: per number of the KV. ratio: bf16 bytes over it."""

    bytes_per_token: float
    bits: float
    ratio: float

    @classmethod
    def of_prefix(cls, setting: Setting | None, shape: Shape, tokens: int, block_size: int) -> Self:
        """Encoded blocks with their headers, exact tokens in them; None for bf16 blocks."""
        raw = 2 * shape.token_numbers * tokens
        nbytes = raw if setting is None else stored_nbytes(setting, shape, tokens // block_size, block_size)
        return cls(nbytes / tokens, 8 * nbytes / (shape.token_numbers * tokens), raw / nbytes)


def stored_nbytes(setting: Setting, shape: Shape, blocks: int, block_size: int) -> int:
    """Bytes of a prefix's encoded blocks, headers included."""
    block = BlockShape(shape.layers, shape.heads, block_size, shape.head_dim)
    form = BlockFormat(setting.codec, block, bytes(wire.FINGERPRINT_LEN))
    return sum(form.max_nbytes(exact) for exact in setting.exact_tokens(blocks, block_size).tolist())
