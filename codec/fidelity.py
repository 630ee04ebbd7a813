"""Measure the noise of a codec on KV of the served model, without queries. docs/codec.md says why. For each layer:

    noise of the logits = mean of var_j(q_i e_j) / mean of var_j(q_i c_j), means over heads and i
    noise of the values = sum of |v^ - v|**2 / sum of |v - m|**2, sums over heads and tokens

i: tokens of even index, at most 64; j: tokens of odd index. e is the error of a decoded key. c is a key less the head's
mean key; if RoPE is known, the mean is taken before RoPE, and c is turned by RoPE. The vector q_i = c_i stands for a
query. v^ is a decoded value, v the value before encoding, m the head's mean value. On SmolLM2-135M the divergence of
real queries' attention, in nats, is 3 to 9 times the noise of the logits.

Multi-head latent attention (MLA) is measured as a single head, because the heads' projections can be applied to the
query. The head's key is the latent and RoPE's part, and its value is the latent. The mean key is taken after RoPE.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from manthan.codec.base import Numbers, Positions
from manthan.codec.block import BlockFormat
from manthan.codec.cpu.numbers import Floats
from manthan.codec.errors import CodecError
from manthan.codec.rope import Rope

LOGIT_NOISE, WORST_LOGIT_NOISE, VALUE_NOISE = 0.065, 0.2, 0.5
"""Upper limits: mean logit noise of all layers, logit noise of the worst layer, and value noise of the worst layer."""
QUERIES = 64  # most tokens of a head that stand for queries
TINY = 1e-30
LEAST_SHARE = 2e-5
"""A head's tokens differ if their energy (sum of squares) about their mean is above this share of their energy.

Two tokens differ from twice this share on. Less may be bf16's rounding. fp8 is compared as rounded already."""
LEAST_TOKENS = 32  # least number of different tokens for a measurement; all tokens if the samples have fewer


class NothingToMeasureError(CodecError):
    """Too few tokens differ from each other for a measurement."""


@dataclass(frozen=True)
class Fidelity:
    """Noise of a codec by layer, [layers], measured on the keys and values of `tokens` tokens."""

    codec: str
    tokens: int
    logit_noise: Floats
    value_noise: Floats
    decode_s: float = 0.0
    """Seconds to decode one token; 0 if unknown."""

    @property
    def excess(self) -> float:
        """Largest ratio of a noise to its limit."""
        worst, value = float(self.logit_noise.max()), float(self.value_noise.max())
        if np.isnan(worst + value):  # of KV with NaNs, which fp8 can have
            return np.inf
        return max(float(self.logit_noise.mean()) / LOGIT_NOISE, worst / WORST_LOGIT_NOISE, value / VALUE_NOISE)

    @property
    def is_faithful(self) -> bool:
        """True if every noise is within the limit."""
        return self.excess <= 1

    @classmethod
    def median(cls, found: "Sequence[Fidelity]") -> "Fidelity":
        """Return each layer's median noise of several measurements, so that no single unusual session decides.

        NaNs are ignored if other measurements have none.
        """
        names = ("logit_noise", "value_noise")
        middle = {name: np.nanmedian([getattr(one, name) for one in found], axis=0) for name in names}
        return replace(
            found[0], **middle, tokens=sum(one.tokens for one in found), decode_s=min(one.decode_s for one in found)
        )

    @property
    def worst_layer(self) -> int:
        """Layer with the noisiest logits, counted from 0."""
        return int(self.logit_noise.argmax())

    @classmethod
    def of(
        cls, codec: str, keys: Floats, values: Floats, kept: Sequence[Floats], positions: Positions, rope: Rope | None
    ) -> Self:
        """Measure `kept`, which are `keys` and `values` encoded and decoded.

        keys, values: [layers, heads, tokens, head_dim] as in the cache, keys after RoPE. positions: [tokens].
        """
        pairs = zip(keys, kept[0], strict=True)
        logits = np.array([_of_layer(of_layer, back, positions, rope) for of_layer, back in pairs], np.float32)
        centred = values - values.mean(axis=2, keepdims=True)
        wrong, differs = kept[1] - values, _differ(centred, values)[..., None, None]
        over, under = (np.square(x * differs, dtype=np.float64).sum((1, 2, 3)) for x in (wrong, centred))
        value_noise = over.astype(np.float32) / (under.astype(np.float32) + TINY)
        return cls(codec, keys.shape[2], logits, value_noise)


@dataclass(frozen=True)
class Sample:
    """Block to measure."""

    arrays: tuple[Numbers, ...]  # as in `BlockShape.arrays`
    first_token: int  # position of the block's first token in the session
    exact: int = 0  # number of exact first tokens


def measure(format: BlockFormat, samples: Sequence[Sample], rope: Rope | None) -> Fidelity:
    """Return the noise of a format on sample blocks.

    Each sample's `exact` tokens are left out, unless all tokens are exact. Tokens whose values in the last layer repeat
    an earlier token's are left out. In each layer, heads whose tokens are all equal are left out.

    Raises: NothingToMeasureError if too few tokens are left, CodecError for unencodable KV.
    """
    whole = all(sample.exact >= format.shape.tokens for sample in samples)
    pieces: list[tuple[Floats, ...]] = []
    places, seconds = [], 0.0
    for sample in samples:
        skipped = 0 if whole else sample.exact
        encoded = format.encode(*sample.arrays, key=b"", first_token=sample.first_token, exact=sample.exact)
        began = time.perf_counter()
        back = format.decode(encoded, key=b"")
        seconds += time.perf_counter() - began
        numbers = *format.shape.floats(sample.arrays), *format.shape.floats(back)
        pieces.append(tuple(x[:, :, skipped:] for x in numbers))
        places.append(np.arange(sample.first_token + skipped, sample.first_token + format.shape.tokens, dtype=np.int64))
    keys, values, back_keys, back_values = (np.concatenate(parts, axis=2) for parts in zip(*pieces, strict=True))
    decode_s, at = seconds / (len(samples) * format.shape.tokens), np.concatenate(places)
    distinct = _distinct(values[-1])
    if distinct.sum() < min(LEAST_TOKENS, keys.shape[2]):
        raise NothingToMeasureError(f"of {keys.shape[2]} tokens only {distinct.sum()} differ from each other.")
    keys, values, back_keys, back_values = (x[:, :, distinct] for x in (keys, values, back_keys, back_values))
    if format.shape.latent:
        rope = None
        (keys, values), (back_keys, back_values) = _attended(keys, values), _attended(back_keys, back_values)
    found = Fidelity.of(format.codec, keys, values, (back_keys, back_values), at[distinct], rope)
    return replace(found, decode_s=decode_s)


def _distinct(values: Floats) -> NDArray[np.bool_]:
    """True for tokens that differ from all earlier tokens. values: of one layer, [heads, tokens, head_dim]."""
    rows = values.swapaxes(0, 1).reshape(values.shape[1], -1).astype(np.float64)
    lengths = np.square(rows).sum(axis=1)
    apart = lengths[:, None] + lengths - 2 * rows @ rows.T
    alike = apart <= 2 * LEAST_SHARE * np.maximum(lengths[:, None], lengths)
    return np.asarray(~np.tril(alike, -1).any(axis=1), np.bool_)


def _differ(centred: Floats, whole: Floats) -> NDArray[np.bool_]:
    """True for heads whose tokens differ. centred: numbers less their mean over tokens, [..., tokens, numbers]."""
    energy = np.square(whole, dtype=np.float64).sum(axis=(-1, -2))
    found: NDArray[np.bool_] = np.square(centred, dtype=np.float64).sum(axis=(-1, -2)) > LEAST_SHARE * energy
    return found


def _attended(turned: Floats, latents: Floats) -> tuple[Floats, Floats]:
    """Return the single head's keys and values [layers, 1, tokens, numbers], from RoPE's part and latents in pieces."""
    layers, _, tokens, _ = latents.shape
    values = latents.swapaxes(1, 2).reshape(layers, 1, tokens, -1)
    return np.concatenate([values, turned], axis=3), values


def _of_layer(keys: Floats, back: Floats, positions: Positions, rope: Rope | None) -> float:
    """Return the noise of a layer's logits. keys, back: keys and decoded keys, [heads, tokens, head_dim]."""
    turned = keys if rope is None else rope.turn_back(keys, positions)
    centred = turned - turned.mean(axis=1, keepdims=True)
    differs = _differ(centred, turned)
    if not differs.any():
        return 0.0
    if rope is not None:
        centred = rope.turn(centred, positions)
    centred, keys, back = centred[differs], keys[differs], back[differs]
    queries = centred[:, :: 2 * -(-keys.shape[1] // (2 * QUERIES))]
    wanted, wrong = (queries @ np.swapaxes(x[:, 1::2], 1, 2) for x in (centred, back - keys))
    noise = wrong.var(axis=2).mean() / (wanted.var(axis=2).mean() + TINY) if keys.shape[1] > 1 else 0.0
    return float(noise)
