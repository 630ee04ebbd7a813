"""How TorchPagedCodec codes keys or values: single vectors, or runs less their means. Parts of codes are tensors uint8
[n blocks, runs * bytes of a run]; a run is what one head of one layer has.

The formulas of `manthan.codec.centred` in their order, one elementwise operation of torch for each.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from manthan.codec.base import CodecSpec, Kind, align16
from manthan.codec.centred import LIMIT_BITS, SCALE_END, SCALE_MAX, STEP_END, Mean, Places, halves
from manthan.codec.gpu.torch_vectors import (
    MAGNITUDE,
    decode_vectors,
    encode_vectors,
    is_finite,
    pack,
    round_bf16,
    scale_words,
    unpack,
)
from manthan.codec.rope import Rope
from manthan.codec.tables.constants import tables as tables_of


class PartAt(NamedTuple):
    """A part of the codes. start: from the codes' beginning. size: of a run. Both in bytes."""

    start: int
    size: int


class VectorCoder:
    """Each vector by itself, with a bf16 scale: scales, planes. runs: of a block."""

    def __init__(self, spec: CodecSpec, kind: Kind, runs: int, tokens: int, head_dim: int) -> None:
        self._bits, self._tokens, self._dim = spec.bits(kind), tokens, head_dim
        self._tables = tables_of(head_dim, self._bits, spec.rotated, spec.unbiased)
        planes = tokens * self._bits * head_dim // 8
        self.parts = [PartAt(0, 2 * tokens), PartAt(align16(2 * runs * tokens), planes)]

    def encode(self, x: Tensor, turns: Tensor) -> tuple[list[Tensor], Tensor]:
        """float32 [n, runs, tokens, head_dim] to its parts; and which vectors are finite, bool [n, vectors]."""
        scales, planes, finite = encode_vectors(x.view(-1, self._dim), self._tables, self._bits)
        n = len(x)
        return [scales.view(n, -1), planes.view(n, -1)], finite.view(n, -1)

    def decode(self, parts: Sequence[Tensor], turns: Tensor) -> Tensor:
        """The opposite; what has no finite scale gets numbers that mean nothing."""
        scales, planes = parts
        width = self._bits * self._dim // 8
        x, _ = decode_vectors(scales.reshape(-1, 2), planes.reshape(-1, width), self._tables, self._bits)
        return x.view(len(scales), -1, self._tokens, self._dim)

    def finite(self, parts: Sequence[Tensor]) -> Tensor:
        """Which vectors' codes are, bool [n, vectors]."""
        return is_finite(scale_words(parts[0].reshape(-1, 2))).view(len(parts[0]), -1)


class ByteScaleCoder:
    """Each vector by itself, with a scale of a byte: octaves and scales, planes."""

    def __init__(self, spec: CodecSpec, kind: Kind, runs: int, tokens: int, head_dim: int) -> None:
        self._bits, self._tokens, self._dim = spec.bits(kind), tokens, head_dim
        self._tables = tables_of(head_dim, self._bits, spec.rotated, spec.unbiased)
        places = Places.of(spec, kind, runs, tokens, head_dim)
        planes = tokens * self._bits * head_dim // 8
        self.parts = [PartAt(places.scales.start, 1 + tokens), PartAt(places.planes.start, planes)]

    def encode(self, x: Tensor, turns: Tensor) -> tuple[list[Tensor], Tensor]:
        """As VectorCoder's."""
        scales, planes, finite = encode_vectors(x.reshape(-1, self._dim), self._tables, self._bits)
        n = len(x)
        short = ((scale_words(scales) >> 16) + 4 >> 3).clamp(max=SCALE_MAX).view(n, -1, self._tokens)
        octaves = ((short.amax(2, keepdim=True) >> 4).clamp(min=15)) - 15
        made = torch.cat((octaves, (short - 16 * octaves).clamp(min=0)), 2).to(torch.uint8)
        return [made.view(n, -1), planes.view(n, -1)], finite.view(n, -1)

    def decode(self, parts: Sequence[Tensor], turns: Tensor) -> Tensor:
        """As VectorCoder's."""
        n, words = len(parts[0]), self._scales(parts[0]).view(-1, 1)
        scales = torch.cat((words & 255, words >> 8), 1).to(torch.uint8)
        planes = parts[1].reshape(-1, self._bits * self._dim // 8)
        x, _ = decode_vectors(scales, planes, self._tables, self._bits)
        return x.view(n, -1, self._tokens, self._dim)

    def finite(self, parts: Sequence[Tensor]) -> Tensor:
        """As VectorCoder's."""
        return (self._scales(parts[0]) < SCALE_END << 3).view(len(parts[0]), -1)

    def _scales(self, codes: Tensor) -> Tensor:
        """bf16 bits, int32 [n, runs, tokens]."""
        wide = codes.reshape(len(codes), -1, 1 + self._tokens).to(torch.int32)
        octaves, steps = wide[:, :, :1], wide[:, :, 1:]
        return torch.where(steps > 0, (16 * octaves + steps).clamp(max=SCALE_END) << 3, 0)


class CentredCoder:
    """Keys less their run's mean before RoPE: steps, means, octaves and scales, planes."""

    def __init__(self, spec: CodecSpec, runs: int, tokens: int, head_dim: int, rope: Rope | None) -> None:
        self._rest = ByteScaleCoder(spec, "key", runs, tokens, head_dim)
        self._tokens, self._dim, self._mean = tokens, head_dim, Mean.of(spec.mean_bits)
        order = halves(rope, head_dim)
        self._order = None if order is None else tuple(order.tolist())
        self._largest = float(tables_of(head_dim, spec.key_bits, True).largest)
        places = Places.of(spec, "key", runs, tokens, head_dim)
        width = spec.mean_bits * head_dim // 8
        self.parts = [PartAt(places.steps.start, 2), PartAt(places.means.start, width), *self._rest.parts]

    def encode(self, x: Tensor, turns: Tensor) -> tuple[list[Tensor], Tensor]:
        """As VectorCoder's. turns: cosines and sines, float32 [n, 2, tokens, pairs]."""
        n, each = len(x), float(torch.tensor(1 / self._tokens, dtype=torch.float32))
        if self._order is not None:
            x = x.index_select(3, _indices(self._order, x.device))
        fits = (x.view(torch.int32) & MAGNITUDE).amax(3) < LIMIT_BITS
        cos, sin = turns[:, None, 0], turns[:, None, 1]
        average = _fold_tokens(_turned(x, cos, -sin)) * each
        step = round_bf16((average.abs().amax(2) * float(self._mean.inverse)).view(torch.int32))
        step = torch.where(step < 1 << 7, 0, step)
        code = self._codes(average, step)
        parts, _ = self._rest.encode(x - _turned((code * _wide(step)).unsqueeze(2), cos, sin), turns)
        whole = code.abs().to(torch.uint8) | (code < 0).to(torch.uint8) << (self._mean.bits - 1)
        means = pack(whole.view(-1, self._dim).t().contiguous(), self._mean.bits)
        steps = step.to(torch.int16).view(n, -1).view(torch.uint8)
        return [steps, means.view(n, -1), *parts], fits.view(n, -1)

    def decode(self, parts: Sequence[Tensor], turns: Tensor) -> Tensor:
        """As VectorCoder's."""
        steps, means, *rest = parts
        whole = unpack(means.reshape(-1, self._mean.bits * self._dim // 8), self._dim, self._mean.bits).t()
        magnitude = (whole & self._mean.top).to(torch.float32)
        code = torch.where(whole > self._mean.top, -magnitude, magnitude).view(len(steps), -1, self._dim)
        kept = code * _wide(self._steps(steps))
        y = self._rest.decode(rest, turns) + _turned(kept.unsqueeze(2), turns[:, None, 0], turns[:, None, 1])
        y = y.clamp(-self._largest, self._largest) + 0.0  # no negative zeros
        if self._order is not None:
            back = sorted(range(self._dim), key=self._order.__getitem__)
            y = y.index_select(3, _indices(tuple(back), y.device))
        return y

    def finite(self, parts: Sequence[Tensor]) -> Tensor:
        """As VectorCoder's; no vector of a run is whose mean is not."""
        fits = (self._steps(parts[0]) < STEP_END).unsqueeze(2)
        scales = self._rest.finite(parts[2:])
        return (scales.view(*fits.shape[:2], -1) & fits).view(scales.shape)

    def _codes(self, average: Tensor, step: Tensor) -> Tensor:
        """Whole numbers, float32 [n, runs, head_dim]."""
        code = (average / _wide(step).clamp(min=2.0**-126)).round().clamp(-self._mean.top, self._mean.top)
        return torch.where(step.unsqueeze(2) > 0, code, 0.0) + 0.0  # no negative zeros

    def _steps(self, steps: Tensor) -> Tensor:
        """bf16 bits, int32 [n, runs]; of those that are negative, more than any."""
        return (scale_words(steps.reshape(-1, 2)) >> 16 & 0xFFFF).view(len(steps), -1)


Coder = VectorCoder | ByteScaleCoder | CentredCoder


def coder(spec: CodecSpec, kind: Kind, runs: int, tokens: int, head_dim: int, rope: Rope | None) -> Coder:
    """That of such a codec's keys or values."""
    if not spec.mean_bits:
        return VectorCoder(spec, kind, runs, tokens, head_dim)
    if kind == "value":
        return ByteScaleCoder(spec, kind, runs, tokens, head_dim)
    return CentredCoder(spec, runs, tokens, head_dim, rope)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[n, runs, tokens or 1, head_dim] turned by [n, 1, tokens, pairs]. With -sin, turned back."""
    pairs = cos.shape[3]
    first, second, others = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
    others = others.expand(*others.shape[:2], cos.shape[2], others.shape[3])
    return torch.cat((first * cos - second * sin, second * cos + first * sin, others), 3)


def _fold_tokens(rows: Tensor) -> Tensor:
    """The sum over tokens of [n, runs, tokens, head_dim]."""
    while rows.shape[2] > 1:
        n = rows.shape[2]
        half = (n + 1) // 2
        rows = torch.cat((rows[:, :, : n - half] + rows[:, :, half:], rows[:, :, n - half : half]), 2)
    return rows[:, :, 0]


def _wide(step: Tensor) -> Tensor:
    """bf16 bits, int32 [n, runs], as float32 [n, runs, 1]."""
    return (step << 16).view(torch.float32).unsqueeze(2)


@lru_cache(maxsize=64)
def _indices(order: tuple[int, ...], device: torch.device) -> Tensor:
    """Copied to a device once: such a copy makes the host wait."""
    return torch.tensor(order, device=device)
