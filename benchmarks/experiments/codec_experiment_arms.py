"""What `codec_experiment` compares: the codecs, and coders around other quantizers, scales and structures.

A coder takes bf16 vectors as float32 [layers, heads, tokens, head_dim] and gives back what would be decoded, in
bf16. Here it does both in plain torch, for quality alone: nothing is packed. Where a side stream would be stored, it
counts towards `Arm.nbytes`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from codec_experiment_quantizers import (
    Quantizer,
    Scale,
    dithered,
    entropy_coded,
    halves,
    least_squares,
    lloyd,
    same_norm,
    times,
    trellis,
    unbiased,
    vectors_of,
)
from torch import Tensor

from manthan.codec import CodecSpec, Kind, get_codec
from manthan.codec.registry import SPECS
from manthan.codec.tables.rotation import block_sizes, weights

Coder = Callable[[Tensor], Tensor]
HEAD_DIM, BLOCK = 128, 32


@dataclass(frozen=True)
class Arm:
    """One row. nbytes: of a key and a value together; 0 where that is not the point. keys, values: None for exact."""

    name: str
    group: str
    nbytes: float
    keys: Coder | None
    values: Coder | None


def arms() -> list[Arm]:
    """All of them, group by group."""
    return [*_codecs(), *_where(), *_scales(), *_bits(), *_quantizers(), *_structures()]


# -- coders ---------------------------------------------------------------------------------------------


def coder(quantize: Quantizer, scale: Scale = unbiased) -> Coder:
    """Rotated, quantized, scaled by a bf16 number, rotated back."""

    def code(x: Tensor) -> Tensor:
        rotation = _rotation(x.shape[-1])
        y = x @ rotation.T
        q = quantize(y / y.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-30))
        return bf16((q * bf16(scale(y, q).nan_to_num(0))) @ rotation)

    return code


def registered(name: str, kind: Kind) -> Coder:
    """A codec of the registry, byte for byte."""

    def code(x: Tensor) -> Tensor:
        vectors = x.reshape(-1, x.shape[-1]).numpy()
        codec = get_codec(name, x.shape[-1])
        return bf16(torch.from_numpy(codec.decode(codec.encode(vectors, kind), len(vectors), kind)).view(x.shape))

    return code


def only(code: Coder, layer: int, head: int) -> Coder:
    """On one head alone."""

    def inner(x: Tensor) -> Tensor:
        y = x.clone()
        y[layer, head] = code(x[layer : layer + 1, head : head + 1])[0, 0]
        return y

    return inner


def exact_at(code: Coder, tokens: slice) -> Coder:
    """Except for these tokens."""

    def inner(x: Tensor) -> Tensor:
        y = code(x).clone()
        y[:, :, tokens] = x[:, :, tokens]
        return y

    return inner


def by_layer(codes: Iterable[Coder]) -> Coder:
    """Each layer with a coder of its own."""
    found = list(codes)
    return lambda x: torch.cat([code(x[i : i + 1]) for i, code in enumerate(found)])


def head_mean_apart(code: Coder) -> Coder:
    """Each head's mean over the whole prefix kept exactly, as if it were stored once for a session."""

    def inner(x: Tensor) -> Tensor:
        mean = x.mean(2, keepdim=True)
        return bf16(code(x - mean) + mean)

    return inner


def block_mean_apart(code: Coder) -> Coder:
    """Each head's mean over a block, 8 bits a number: 130 bytes for 32 vectors."""

    def inner(x: Tensor) -> Tensor:
        mean = x.mean(2, keepdim=True)
        step = bf16(mean.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-30)
        mean = (mean / step).round() * step
        return bf16(code(x - mean) + mean)

    return _by_block(inner)


def half_whitened(code: Coder) -> Coder:
    """Channels divided by the fourth root of their mean square in the block: the least error after multiplying back.

    In 4 bits a channel and block: 66 bytes for 32 vectors.
    """

    def inner(x: Tensor) -> Tensor:
        root = x.square().mean(2, keepdim=True).clamp(min=1e-12) ** 0.25
        root = 2 ** ((root.log2() * 4).round() / 4)
        return bf16(code(x / root) * root)

    return _by_block(inner)


def strong_channels(strong: Coder, weak: Coder) -> Coder:
    """The half of a block's channels that has more energy by one coder, the other half by another.

    A mask of 16 bytes for 32 vectors, and a second scale for each vector.
    """

    def inner(x: Tensor) -> Tensor:
        order = x.square().sum(2, keepdim=True).argsort(-1, descending=True).expand_as(x)
        parts = x.gather(-1, order).split(HEAD_DIM // 2, -1)
        coded = torch.cat([strong(parts[0]), weak(parts[1])], -1)
        return torch.empty_like(x).scatter_(-1, order, coded)

    return _by_block(inner)


def _by_block(code: Coder) -> Coder:
    return lambda x: torch.cat([code(part) for part in x.split(BLOCK, 2)], 2)


def bf16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).float()


@lru_cache
def _rotation(head_dim: int) -> Tensor:
    """[head_dim, head_dim], the codecs' own."""
    rows, start = np.zeros((head_dim, head_dim)), 0
    for size in block_sizes(head_dim):
        index = np.arange(size)
        parity = np.array([[(int(i) & int(j)).bit_count() for j in index] for i in index])
        rows[start : start + size, start : start + size] = 1 - 2 * (parity % 2)
        start += size
    return torch.from_numpy((rows * weights(head_dim)).astype(np.float32))


# -- the arms -------------------------------------------------------------------------------------------


def _nbytes(*bits: float) -> float:
    """Of vectors with so many bits a number, scales included."""
    return sum(2 + HEAD_DIM * each / 8 for each in bits)


def _codecs() -> Iterable[Arm]:
    for name in SPECS:
        spec: CodecSpec = get_codec(name, HEAD_DIM).spec
        size = _nbytes(spec.key_bits, spec.value_bits)
        yield Arm(name, "codecs", size, registered(name, "key"), registered(name, "value"))


def _where() -> Iterable[Arm]:
    keys, values = registered("lloyd3", "key"), registered("lloyd3", "value")
    yield Arm("lloyd3, keys alone", "where", 0, keys, None)
    yield Arm("lloyd3, values alone", "where", 0, None, values)
    for layer in range(4):
        for head in range(2):
            where = f"layer {layer} head {head}"
            yield Arm(f"lloyd3, {where}", "where", 0, only(keys, layer, head), only(values, layer, head))
    for name, tokens in (
        ("first 4 tokens", slice(4)),
        ("first block", slice(BLOCK)),
        ("last 128 tokens", slice(-128, None)),
    ):
        yield Arm(f"lloyd3, {name} exact", "where", 0, exact_at(keys, tokens), exact_at(values, tokens))


def _scales() -> Iterable[Arm]:
    three, size = lloyd(3), _nbytes(3, 3)
    for name, rule in (("least squares", least_squares), ("unbiased", unbiased)):  # lloyd3 and k3v3: to check `coder`
        yield Arm(f"3/3, {name}", "scale", 0, coder(three, rule), coder(three, rule))
    yield Arm("3/3, same norm", "scale", size, coder(three, same_norm), coder(three, same_norm))
    yield Arm("3/3, keys unbiased", "scale", size, coder(three), coder(three, least_squares))
    yield Arm("3/3, values unbiased", "scale", size, coder(three, least_squares), coder(three))
    yield Arm("3/3, least squares x 1.05", "scale", size, coder(three, times(1.05)), coder(three, times(1.05)))
    for factor in (1 - 0.03455, 1 / (1 - 0.03455)):
        scaled: Coder = lambda x, factor=factor: bf16(x * factor)  # noqa: E731
        yield Arm(f"exact keys x {factor:.3f}", "scale", 0, scaled, None)
        yield Arm(f"exact values x {factor:.3f}", "scale", 0, None, scaled)


def _bits() -> Iterable[Arm]:
    for keys, values in ((4, 4), (4, 3), (3, 2), (2, 2), (5, 1)):
        yield Arm(f"{keys}/{values}, unbiased", "bits", _nbytes(keys, values), coder(lloyd(keys)), coder(lloyd(values)))
    mixed = coder(halves(4, 3)), coder(halves(3, 2))
    yield Arm("3.5/2.5, unbiased", "bits", _nbytes(3.5, 2.5), *mixed)
    four_two = coder(lloyd(4), least_squares), coder(lloyd(2), least_squares)
    yield Arm("4/2, least squares", "bits", _nbytes(4, 2), *four_two)
    keys_by_layer = by_layer(coder(lloyd(bits)) for bits in (2, 2, 3, 5))
    yield Arm("2,2,3,5/3 by layer, unbiased", "bits", _nbytes(3, 3), keys_by_layer, coder(lloyd(3)))


def _quantizers() -> Iterable[Arm]:
    for what, quantize, scale in (
        ("trellis, least squares", trellis(3), least_squares),
        ("trellis, unbiased", trellis(3), unbiased),
        ("pairs, unbiased", vectors_of(2, 3), unbiased),
        ("entropy-coded, unbiased", entropy_coded(3), unbiased),
        ("dithered, unbiased", dithered(3), unbiased),
    ):
        both = coder(quantize, scale)
        yield Arm(f"3/3 {what}", "quantizer", _nbytes(3, 3), both, both)
    fours = coder(lloyd(4)), coder(vectors_of(4, 2))
    yield Arm("4/2 values in fours, unbiased", "quantizer", _nbytes(4, 2), *fours)
    yield Arm("4/2 trellis, unbiased", "quantizer", _nbytes(4, 2), coder(trellis(4)), coder(trellis(2)))


def _structures() -> Iterable[Arm]:
    two, three, four = (coder(lloyd(bits)) for bits in (2, 3, 4))
    for what, keys, extra in (
        ("head mean apart", head_mean_apart(three), 0.0),
        ("block mean apart", block_mean_apart(three), 130 / BLOCK),
        ("half-whitened", half_whitened(three), 66 / BLOCK),
        ("4 and 2 by channel", strong_channels(four, two), 2 + 16 / BLOCK),
    ):
        yield Arm(f"3/3 keys {what}, unbiased", "structure", _nbytes(3, 3) + extra, keys, three)
    yield Arm("4/2 keys half-whitened, unbiased", "structure", _nbytes(4, 2) + 66 / BLOCK, half_whitened(four), two)
