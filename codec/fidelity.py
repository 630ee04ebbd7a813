"""How faithful a codec is to the KV of the model that is being served, measured without its queries.

Attention asks for the logits q k / sqrt(D) of a query q with each key k. A codec that gives back k + e adds q e, and
what matters is how large that is beside what tells keys apart. Queries are not in the cache, but they look for what
keys differ in: the keys of a head less their mean stand for them. So for each layer

    noise of the logits = var_j(q_i e_j) / var_j(q_i c_j), of all heads, with q_i = c_i for even i, and odd j
    c = the keys less their mean, taken before RoPE where that is known: all tokens have it, whatever they are

and likewise for values, of which attention takes averages,

    noise of the values = |v^ - v|**2 / |v - their mean|**2

On SmolLM2-135M, with biased keys and without, the attention of its own queries diverges by three to nine times the
noise of the logits, in nats, over three decades (docs/codec.md). Cosines say nothing of it: they hardly change when a
bias in the keys drowns what tells them apart.

With multi-head latent attention (MLA) a key is the latent and RoPE's part, one head for all, once the projections of
the heads are in the query; values are made of the latent alone. They are measured so, and c is taken behind RoPE.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from manthan.codec.base import Numbers, Positions
from manthan.codec.block import BlockFormat
from manthan.codec.cpu.numbers import Floats, as_floats
from manthan.codec.rope import Rope

LOGIT_NOISE, WORST_LOGIT_NOISE, VALUE_NOISE = 0.065, 0.2, 0.5
"""What is allowed: of logits on the average of all layers, and in the worst one; of values in the worst one."""
QUERIES = 64
"""Of a head, at most."""
TINY = 1e-30


@dataclass(frozen=True)
class Fidelity:
    """What a codec does to keys and values. By layer, [layers]: noise as above, cosines of what comes back with what
    was, and what share of the keys' energy their mean has.

    tokens: so many were measured. outlier: the largest number of all keys over their root mean square.
    """

    codec: str
    tokens: int
    logit_noise: Floats
    value_noise: Floats
    key_cosine: Floats
    value_cosine: Floats
    mean_share: Floats
    outlier: float

    @property
    def is_faithful(self) -> bool:
        """Whether no noise is more than what is allowed."""
        worst, value = float(self.logit_noise.max()), float(self.value_noise.max())
        return float(self.logit_noise.mean()) <= LOGIT_NOISE and worst <= WORST_LOGIT_NOISE and value <= VALUE_NOISE

    @property
    def worst_layer(self) -> int:
        """The one whose logits have the most noise, counted from 0."""
        return int(self.logit_noise.argmax())

    @classmethod
    def of(
        cls,
        codec: str,
        keys: Floats,
        values: Floats,
        kept: tuple[Floats, Floats],
        positions: Positions,
        rope: Rope | None,
    ) -> Self:
        """Of keys and values [layers, heads, tokens, head_dim], and what a codec gives back of them.

        positions: [tokens], their places in the chain. rope: how the model turns keys, if that is known.
        """
        layers = [
            _of_layer(layer_keys, back_keys, positions, rope)
            for layer_keys, back_keys in zip(keys, kept[0], strict=True)
        ]
        logits, shares = np.array(layers, np.float32).T
        centred = values - values.mean(axis=2, keepdims=True)
        value_noise = _energy(kept[1] - values) / (_energy(centred) + TINY)
        largest = float(np.abs(keys).max(initial=0))
        return cls(
            codec,
            keys.shape[2],
            logits,
            value_noise,
            _cosine(keys, kept[0]),
            _cosine(values, kept[1]),
            shares,
            largest / float(np.sqrt(np.square(keys, dtype=np.float64).mean()) + TINY),
        )


@dataclass(frozen=True)
class Sample:
    """A block's keys and values [layers, heads, tokens, head_dim] in the cache's numbers, the place of its first token
    in the chain, and how many of its first tokens are kept exact."""

    keys: Numbers
    values: Numbers
    first_token: int
    exact: int = 0


def measure(format: BlockFormat, samples: Sequence[Sample], rope: Rope | None) -> Fidelity:
    """What a format does to some blocks; tokens that are kept exact are not looked at, but where there are no others.

    Raises CodecError for KV that cannot be encoded.
    """
    whole = all(sample.exact >= format.shape.tokens for sample in samples)
    pieces: list[tuple[Floats, ...]] = []
    places = []
    for sample in samples:
        skipped = 0 if whole else sample.exact
        codes = format.encode(sample.keys, sample.values, key=b"", first_token=sample.first_token, exact=sample.exact)
        back = format.decode(codes, key=b"")
        numbers = (sample.keys, sample.values, *back)
        pieces.append(tuple(as_floats(x[:, :, skipped:], format.shape.dtype) for x in numbers))
        places.append(np.arange(sample.first_token + skipped, sample.first_token + format.shape.tokens, dtype=np.int64))
    keys, values, back_keys, back_values = (np.concatenate(parts, axis=2) for parts in zip(*pieces, strict=True))
    if format.shape.latent:
        rope = None
        (keys, values), (back_keys, back_values) = _attended(keys, values), _attended(back_keys, back_values)
    return Fidelity.of(format.codec, keys, values, (back_keys, back_values), np.concatenate(places), rope)


def _attended(turned: Floats, latents: Floats) -> tuple[Floats, Floats]:
    """Keys and values [layers, 1, tokens, numbers] as attention has them.

    turned: RoPE's part. latents: [layers, pieces, tokens, numbers].
    """
    layers, _, tokens, _ = latents.shape
    values = latents.swapaxes(1, 2).reshape(layers, 1, tokens, -1)
    return np.concatenate([values, turned], axis=3), values


def _of_layer(keys: Floats, back: Floats, positions: Positions, rope: Rope | None) -> tuple[float, float]:
    """The noise of a layer's logits, and what share of its keys' energy their mean has. keys: [heads, tokens, D]."""
    turned = keys if rope is None else rope.turn_back(keys, positions)
    mean = turned.mean(axis=1, keepdims=True)
    centred = turned - mean
    share = float(np.square(mean).sum() * keys.shape[1] / (np.square(turned).sum() + TINY))
    if rope is not None:
        centred = rope.turn(centred, positions)
    queries = centred[:, :: 2 * -(-keys.shape[1] // (2 * QUERIES))]
    wanted, wrong = (queries @ np.swapaxes(x[:, 1::2], 1, 2) for x in (centred, back - keys))
    noise = wrong.var(axis=2).mean() / (wanted.var(axis=2).mean() + TINY) if keys.shape[1] > 1 else 0.0
    return float(noise), min(share, 1.0)


def _energy(x: Floats) -> Floats:
    found: Floats = np.square(x, dtype=np.float64).sum(axis=(1, 2, 3)).astype(np.float32)
    return found


def _cosine(x: Floats, y: Floats) -> Floats:
    """Mean over all vectors, by layer."""
    lengths = np.sqrt(np.square(x).sum(axis=3) * np.square(y).sum(axis=3))
    found: Floats = ((x * y).sum(axis=3) / (lengths + TINY)).mean(axis=(1, 2))
    return found
