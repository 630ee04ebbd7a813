"""Vectors to codes and back out of torch's own operations, on any device.

The formulas of `manthan.codec.base` in their order, one elementwise operation of torch for each, so that no step is
fused with another. Vectors lie transposed, [head_dim, n]: each step runs over contiguous memory. Nothing here makes the
host wait for the device.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from manthan.codec.tables.constants import Tables

EXPONENT, MAGNITUDE = 0x7F800000, 0x7FFFFFFF
LARGEST = {torch.float16: 65504.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def encode_vectors(x: Tensor, tables: Tables, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Encode float32 [n, head_dim]: scales uint8 [n, 2], bf16; planes uint8 [n, bits * head_dim / 8]; finite bool [n].

    A vector that is not finite gets scale and planes that mean nothing.
    """
    n = len(x)
    y = x.t().contiguous()
    top = (y.view(torch.int32) & MAGNITUDE).amax(0)
    field = (254 - (top >> 23)).clamp(min=8)
    inverse = torch.where(field < 254, (254 - field) << 23, 1 << 22)  # 2**-127 is denormal
    y = y * (field << 23).view(torch.float32)
    y = hadamard(y * _weights(tables, x.device), tables.blocks.tolist())
    square = fold(y * y)
    rms = square_root(square) * float(tables.root)
    code = (y < 0).to(torch.uint8) << (bits - 1)
    y = y.abs()
    q = torch.full_like(y, float(tables.levels[0]))
    for threshold, level in zip(tables.thresholds.tolist(), tables.levels[1:].tolist(), strict=True):
        above = y > rms * threshold
        code += above
        q.masked_fill_(above, level)
    dot = fold(y * q)
    ratio = square / dot.clamp(min=2.0**-126) if tables.unbiased else dot / fold(q * q)
    scale = ratio * inverse.view(torch.float32)
    scales = round_bf16(scale.view(torch.int32)).clamp(max=0x7F7F).to(torch.int16)
    return scales.view(torch.uint8).view(n, 2), pack(code, bits), top < EXPONENT


def decode_vectors(scales: Tensor, planes: Tensor, tables: Tables, bits: int) -> tuple[Tensor, Tensor]:
    """Decode uint8 scales [n, 2] and planes [n, bits * head_dim / 8]: float32 [n, head_dim]; finite bool [n].

    A vector whose scale is not finite gets numbers that mean nothing.
    """
    dim, n = len(tables.weights), len(scales)
    words = scale_words(scales)
    code = unpack(planes, dim, bits)
    x = _signed_levels(tables, scales.device).index_select(0, code.view(-1).to(torch.int32)).view(dim, n)
    x = hadamard(x, tables.blocks.tolist()) * _weights(tables, scales.device) * words.view(torch.float32)
    largest = float(tables.largest)
    x = x.clamp(-largest, largest) + 0.0  # no negative zeros
    return x.t().contiguous(), is_finite(words)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Decoded float32 numbers in the cache's dtype: ties to even, within the range of those that have less."""
    if dtype == torch.bfloat16:  # by its bits, for the sake of denormal numbers: some devices' casts flush them
        return round_bf16(x.view(torch.int32)).to(torch.int16).view(torch.bfloat16)
    largest = LARGEST.get(dtype)
    return x.to(dtype) if largest is None else x.clamp(-largest, largest).to(dtype)


def hadamard(x: Tensor, blocks: Sequence[int]) -> Tensor:
    """Transform float32 [head_dim, n] as `rotation.hadamard_` does, block by block, not normalized."""
    n, start, done = x.shape[1], 0, []
    for size in blocks:
        part, start = x[start : start + size], start + size
        for stride in (1 << k for k in range(size.bit_length() - 1)):
            pairs = part.reshape(size // (2 * stride), 2, stride, n)
            part = torch.empty_like(pairs)
            torch.add(pairs[:, 0], pairs[:, 1], out=part[:, 0])
            torch.sub(pairs[:, 0], pairs[:, 1], out=part[:, 1])
        done.append(part.view(size, n))
    return torch.cat(done) if done else x


def square_root(x: Tensor) -> Tensor:
    """The nearest float32: by way of float64, because torch's own may be off in the last bit (MKL's on CPUs is)."""
    return torch.sqrt(x.to(torch.float64)).to(torch.float32)


def fold(rows: Tensor) -> Tensor:
    """Fold each run of 8 rows of float32 [rows, n], then the runs: [n]."""
    dim, n = rows.shape
    sums = rows.view(dim // 8, 8, n)
    for half in (4, 2, 1):
        sums = sums[:, :half] + sums[:, half : 2 * half]
    sums = sums[:, 0]
    while len(sums) > 1:
        half = (len(sums) + 1) // 2
        upper = sums[half:]
        sums = torch.cat((sums[: len(upper)] + upper, sums[len(upper) : half]))
    return sums[0]


def pack(code: Tensor, bits: int) -> Tensor:
    """Codes uint8 [head_dim, n], the sign highest, to planes uint8 [n, bits * head_dim / 8]."""
    dim, n = code.shape
    shifts = torch.arange(8, dtype=torch.uint8, device=code.device)[:, None]
    eights = code.view(dim // 8, 8, n)
    planes = [((eights >> (bits - 1 - p) & 1) << shifts).sum(1, dtype=torch.uint8) for p in range(bits)]
    return torch.cat(planes).t().contiguous()


def unpack(planes: Tensor, dim: int, bits: int) -> Tensor:
    """Planes uint8 [n, bits * dim / 8] to codes uint8 [dim, n]."""
    n = len(planes)
    shifts = torch.arange(8, dtype=torch.uint8, device=planes.device)[:, None]
    code = torch.zeros((dim // 8, 8, n), dtype=torch.uint8, device=planes.device)
    for plane in planes.t().contiguous().view(bits, dim // 8, 1, n):
        code = code + code + (plane >> shifts & 1)
    return code.view(dim, n)


def round_bf16(words: Tensor) -> Tensor:
    """The bf16 bits nearest to float32 bits, ties to even; int32 both."""
    return (words + 0x7FFF + (words >> 16 & 1)) >> 16


def scale_words(scales: Tensor) -> Tensor:
    """Scales uint8 [n, 2] as the bits of float32, int32 [n]."""
    low, high = scales.to(torch.int32).unbind(1)
    return low << 16 | high << 24


def is_finite(words: Tensor) -> Tensor:
    return (words & EXPONENT) != EXPONENT


# Constants are copied to a device once: such a copy makes the host wait.


@lru_cache(maxsize=64)
def float32(data: bytes, device: torch.device) -> Tensor:
    return torch.tensor(np.frombuffer(data, np.float32).tolist(), dtype=torch.float32, device=device)


def _weights(tables: Tables, device: torch.device) -> Tensor:
    """[head_dim, 1]"""
    return float32(tables.weights.tobytes(), device)[:, None]


def _signed_levels(tables: Tables, device: torch.device) -> Tensor:
    """By code: the sign is its highest bit."""
    return float32(np.concatenate([tables.levels, -tables.levels]).tobytes(), device)
