"""KVTC (K. Staniszewski and A. Lancucki, "KV Cache Transform Coding for Compact Storage in LLM Inference", 2025, arXiv
2511.01815): a calibrated transform, bits dealt out by error, and DEFLATE.

A row has one token's keys before RoPE, or values, of all heads and of the layers coded together. Calibration keeps the
mean and the principal directions of a text's rows. Neighbouring components along these directions form groups. Dynamic
programming deals out bits to groups, so that the squared error of the calibration rows is least within a budget. A
group may get no bits. Of each other group, a row has a start and a step in fp16, and a whole number for each component.
DEFLATE compresses all.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from manthan.benchmarks.peers import Floats, halves, pack, unpack
from manthan.codec.base import ByteArray, Codec, Kind, Numbers, Positions, Section
from manthan.codec.cpu.numbers import as_floats, as_numbers
from manthan.codec.errors import CodecError
from manthan.codec.model import NO_FACTS, ModelFacts
from manthan.codec.rope import Rope

GROUP = 16
"""Components with a common start, step and number of bits."""
CHOICES = (0, 2, 4, 8)
FRONT = 32
"""Bits of a start and a step together."""
LAYERS = 6
"""Most layers coded together."""
LENGTH = 4
"""Bytes of the length that precedes each part of a section, see `KvtcCodec`."""


@dataclass(frozen=True)
class Kvtc:
    """Calibrated coder of rows with C numbers.

    mean: [C], mean of the calibration rows. directions: [C, C], columns are principal directions, by falling variance.
    bits: for each group of components, bits of a number.
    """

    mean: Floats
    directions: Floats
    bits: tuple[int, ...]

    @classmethod
    def calibrated(cls, rows: Floats, bits: float) -> "Kvtc":
        """Return a coder calibrated on rows [n, C], C a multiple of GROUP. bits: most bits a number before DEFLATE."""
        mean = rows.mean(0)
        _, vectors = np.linalg.eigh(np.cov((rows - mean).astype(np.float64).T))
        directions = vectors[:, ::-1].astype(np.float32)
        return cls(mean, directions, _dealt((rows - mean) @ directions, int(bits * rows.shape[1])))

    def encode(self, rows: Floats) -> bytes:
        """Return the bytes of rows [n, C]."""
        parts: list[ByteArray] = []
        for y, bits in zip(_groups((rows - self.mean) @ self.directions), self.bits, strict=True):
            if bits:
                start, step, q = _quantized(y, bits)
                parts += [halves(start), halves(step), pack(q, bits)]
        return zlib.compress(np.concatenate(parts).tobytes() if parts else b"", 9)

    def decode(self, encoded: bytes, n: int) -> Floats:
        """Return the n rows that `encode` has encoded, [n, C]."""
        data, at, made = np.frombuffer(zlib.decompress(encoded), np.uint8), 0, []
        for bits in self.bits:
            if not bits:
                made.append(np.zeros((n, GROUP), np.float32))
                continue
            start, step = (data[at + 2 * n * i :][: 2 * n].copy().view("<f2").astype(np.float32) for i in (0, 1))
            at += 4 * n
            size = -(-n * GROUP * bits // 8)
            q = unpack(data[at : at + size], bits, n * GROUP).reshape(n, GROUP)
            at += size
            made.append((q * step[:, None] + start[:, None]).astype(np.float32))
        return (np.concatenate(made, 1) @ self.directions.T + self.mean).astype(np.float32)


def _groups(y: Floats) -> list[Floats]:
    return np.split(y, y.shape[1] // GROUP, axis=1)


def _quantized(y: Floats, bits: int) -> tuple[Floats, Floats, npt.NDArray[np.int64]]:
    """Return starts [n], steps [n] and whole numbers [n, GROUP] of a group's components y [n, GROUP]."""
    start = np.float16(y.min(1)).astype(np.float32)
    step = np.float16((y.max(1) - start) / (2**bits - 1)).astype(np.float32)
    q = np.rint((y - start[:, None]) / np.where(step == 0, 1, step)[:, None])
    return start, step, np.clip(q, 0, 2**bits - 1).astype(np.int64)


def _dealt(y: Floats, budget: int) -> tuple[int, ...]:
    """Return bits of a number for each group, with the least squared error of y [n, C] within `budget` bits a row."""
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for group in _groups(y):
        found: dict[int, tuple[float, tuple[int, ...]]] = {}
        for bits in CHOICES:
            if bits:
                start, step, q = _quantized(group, bits)
                error = float(np.square(q * step[:, None] + start[:, None] - group).sum())
            else:
                error = float(np.square(group).sum())
            cost = bits * GROUP + (FRONT if bits else 0)
            for used, (so_far, chosen) in best.items():
                total = used + cost
                if total <= budget and (total not in found or so_far + error < found[total][0]):
                    found[total] = so_far + error, (*chosen, bits)
        best = found
    return min(best.values())[1]


class KvtcPreset:
    """Preset for `manthan.codec.registry`. bits: most bits per number of a row, on average and before DEFLATE."""

    def __init__(self, bits: int) -> None:
        self.name, self._bits = f"kvtc-{bits}bit", bits
        self._coders: dict[Kind, list[Kvtc]] = {}

    def calibrate(self, keys: Numbers, values: Numbers, positions: Positions, rope: Rope | None) -> None:
        """Calibrate coders on a text's keys, which have RoPE, and values: each [layers, heads, tokens, head_dim]."""
        parts: list[tuple[Kind, Numbers]] = [("key", keys), ("value", values)]
        for kind, x in parts:
            turns = rope if kind == "key" else None
            self._coders[kind] = [Kvtc.calibrated(rows, self._bits) for rows in _rows(x, positions, turns)]

    def codec(self, head_dim: int, facts: ModelFacts = NO_FACTS) -> "KvtcCodec":
        return KvtcCodec(self.name, self._coders, facts.rope)


class KvtcCodec(Codec):
    """Codec of a section (KV of a block) in parts. A part is a length, then keys or values of up to LAYERS layers."""

    varies = True

    def __init__(self, name: str, coders: Mapping[Kind, Sequence[Kvtc]], rope: Rope | None) -> None:
        self.name, self._coders, self._rope = name, coders, rope

    def max_nbytes(self, section: Section) -> int:
        return 4 * len(section.vector_kinds) * section.vectors * section.head_dim

    def encode(self, x: Numbers, section: Section, positions: Positions, out: ByteArray) -> int:
        if not self._coders:
            raise CodecError(f"{self.name} is not calibrated.")
        at = 0
        for kind, of_kind in zip(section.vector_kinds, x.reshape(-1, *section.shape[-4:]), strict=True):
            for coder, rows in zip(self._coders[kind], _rows(of_kind, positions, self._turns(kind)), strict=True):
                part = coder.encode(rows)
                part = len(part).to_bytes(LENGTH, "little") + part
                out[at : at + len(part)] = np.frombuffer(part, np.uint8)
                at += len(part)
        return at

    def decode(self, encoded: ByteArray, section: Section, positions: Positions) -> Numbers:
        at, made = 0, []
        for kind in section.vector_kinds:
            for coder in self._coders[kind]:
                end = at + LENGTH + int.from_bytes(encoded[at : at + LENGTH].tobytes(), "little")
                rows = coder.decode(encoded[at + LENGTH : end].tobytes(), section.tokens)
                at, shape = end, (section.tokens, -1, section.heads, section.head_dim)
                x, turns = rows.reshape(shape).transpose(1, 2, 0, 3), self._turns(kind)
                made.append(turns.turn(x, positions) if turns else x)
        return as_numbers(np.concatenate(made).reshape(section.shape), section.dtype)

    def _turns(self, kind: Kind) -> Rope | None:
        return self._rope if kind == "key" else None


def _rows(x: Numbers, positions: Positions, rope: Rope | None) -> Iterator[Floats]:
    """Yield the rows [tokens, C] of each part of x [layers, heads, tokens, head_dim]. rope: RoPE to undo, or None."""
    for first in range(0, len(x), LAYERS):
        part = as_floats(x[first : first + LAYERS])
        part = rope.turn_back(part, positions) if rope else part
        yield np.ascontiguousarray(part.transpose(2, 0, 1, 3)).reshape(len(positions), -1)


KVTC = {bits: KvtcPreset(bits) for bits in (2, 4)}
