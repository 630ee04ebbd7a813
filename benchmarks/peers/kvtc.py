"""KVTC (K. Staniszewski and A. Lancucki, "KV Cache Transform Coding for Compact Storage in LLM Inference", 2025, arXiv
2511.01815): a calibrated transform, bits where they count, and DEFLATE.

Calibration takes rows of numbers, a token's keys before RoPE or its values, of all heads and as many layers as are
coded together. Their mean and principal directions are kept. Bits are dealt out over groups of neighbouring components
by dynamic programming, so that the squared error of the calibration rows is least within a budget; a group may have
none. Each group of each token then has a start and a step in fp16. The whole numbers are deflated.
"""

import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from manthan.benchmarks.peers import Floats, halves, pack, unpack
from manthan.codec.base import Codes

GROUP = 16
"""Components that share a start, a step and a number of bits."""
CHOICES = (0, 2, 4, 8)
FRONT = 32
"""Bits of a start and a step."""


@dataclass(frozen=True)
class Kvtc:
    """Args:
    mean: [C].
    directions: [C, C], columns are principal directions, largest first.
    bits: of a number, for each group.
    """

    mean: Floats
    directions: Floats
    bits: tuple[int, ...]

    @classmethod
    def calibrated(cls, rows: Floats, bits: float) -> "Kvtc":
        """rows: [n, C], C a multiple of GROUP. bits: a number may take on average before it is deflated."""
        mean = rows.mean(0)
        _, vectors = np.linalg.eigh(np.cov((rows - mean).astype(np.float64).T))
        directions = vectors[:, ::-1].astype(np.float32)
        return cls(mean, directions, _dealt((rows - mean) @ directions, int(bits * rows.shape[1])))

    def encode(self, rows: Floats) -> bytes:
        """Return the bytes of rows [n, C]."""
        parts: list[Codes] = []
        for y, bits in zip(_groups((rows - self.mean) @ self.directions), self.bits, strict=True):
            if bits:
                start, step, q = _quantized(y, bits)
                parts += [halves(start), halves(step), pack(q, bits)]
        return zlib.compress(np.concatenate(parts).tobytes() if parts else b"", 9)

    def decode(self, codes: bytes, n: int) -> Floats:
        """Undo `encode` of n rows."""
        data, at, made = np.frombuffer(zlib.decompress(codes), np.uint8), 0, []
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
    """Start and step of each row, and its whole numbers."""
    start = np.float16(y.min(1)).astype(np.float32)
    step = np.float16((y.max(1) - start) / (2**bits - 1)).astype(np.float32)
    q = np.rint((y - start[:, None]) / np.where(step == 0, 1, step)[:, None])
    return start, step, np.clip(q, 0, 2**bits - 1).astype(np.int64)


def _dealt(y: Floats, budget: int) -> tuple[int, ...]:
    """Bits of each group with the least squared error within so many bits of a row, by dynamic programming."""
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
