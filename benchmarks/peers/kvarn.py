"""KVarN: variance-normalized tiles, 4 bits for keys and 2 for values (L. Muller et al., "KVarN: variance-normalized
KV-cache quantization", 2026, arXiv 2606.03458).

A tile is a head's block, [tokens, head_dim], 128 tokens in the paper, rotated by a Hadamard transform. Magnitudes of
channels and of tokens are evened out in turns, like sums by Sinkhorn. Keys have a range for each channel, values a
range for each token, divided evenly by whole numbers of 4 or 2 bits.

    | scales of the columns, fp16 | starts, fp16 | steps, fp16 | whole numbers |

A column is a token of keys or a channel of values, without a separate range.
"""

import numpy as np
import numpy.typing as npt

from manthan.benchmarks.peers import Floats, Peer, halves, pack, unpack
from manthan.codec.base import Codes, Kind
from manthan.codec.tables.rotation import rotation

BITS = {"key": 4, "value": 2}
ROUNDS = 4
COVERED = {4: 15 / 16, 2: 21 / 32}
"""Share of a range covered by whole numbers, for the least error."""
TINY = 1e-6


def rotated(x: Floats, back: bool = False) -> Floats:
    """[tokens, head_dim] by the transform, or back."""
    constants = rotation(x.shape[1])
    y = np.ascontiguousarray(x.T) * (1 if back else constants.weights[:, None])
    y = np.ascontiguousarray(y, np.float32)
    hadamard_(y, np.empty_like(y), constants.blocks)
    return np.ascontiguousarray((y * constants.weights[:, None] if back else y).T)


def normalized(y: Floats) -> tuple[Floats, Floats]:
    """Return magnitudes of tokens and of channels, [tokens, 1] and [1, head_dim]; dividing by both evens the
    tile out.
    """
    tokens, channels = np.ones((len(y), 1), np.float32), np.ones((1, y.shape[1]), np.float32)
    for _ in range(ROUNDS):
        channels *= _rms(y / tokens / channels, 0)
        tokens *= _rms(y / tokens / channels, 1)
    return tokens, channels


def _rms(z: Floats, axis: int) -> Floats:
    found = np.sqrt(np.square(z).mean(axis, keepdims=True))
    return np.where(found < TINY, 1, found).astype(np.float32)


def encode(x: Floats, kind: Kind) -> Codes:
    """Return the tile's bytes."""
    bits, y = BITS[kind], rotated(x)
    tokens, channels = normalized(y)
    scale = np.float16(tokens if kind == "key" else channels).astype(np.float32)
    scale = np.where(scale == 0, 1, scale)
    z = y / scale
    z = z if kind == "value" else z.T  # lines first
    least, most = z.min(1, keepdims=True), z.max(1, keepdims=True)
    best = None
    for share in (1.0, COVERED[bits]):
        half = (most - least) * share / 2
        start = np.float16((most + least) / 2 - half).astype(np.float32)
        step = np.float16(2 * half / (2**bits - 1)).astype(np.float32)
        q = np.clip(np.rint((z - start) / np.where(step == 0, 1, step)), 0, 2**bits - 1)
        error = np.square(q * step + start - z).sum(1, keepdims=True)
        if best is None:
            best = error, start, step, q
        else:
            better = error < best[0]
            best = tuple(np.where(better, new, old) for new, old in zip((error, start, step, q), best, strict=True))
    assert best is not None
    _, start, step, q = best
    return np.concatenate([halves(scale), halves(start), halves(step), pack(q.astype(np.int64), bits)])


def decode(codes: Codes, kind: Kind, shape: tuple[int, int]) -> Floats:
    """Undo `encode` of a tile with shape `shape`."""
    lines, columns = shape if kind == "value" else shape[::-1]
    ends = np.cumsum([2 * columns, 2 * lines, 2 * lines])
    scale, start, step = (part.copy().view("<f2").astype(np.float32) for part in np.split(codes[: ends[-1]], ends[:-1]))
    q = unpack(codes[ends[-1] :], BITS[kind], lines * columns).reshape(lines, columns)
    z = (q * step[:, None] + start[:, None]) * scale
    return rotated((z if kind == "value" else z.T).astype(np.float32), back=True)


KVARN = Peer("kvarn", encode, decode)


def hadamard_(x: npt.NDArray[np.float32], scratch: npt.NDArray[np.float32], blocks: npt.NDArray[np.int64]) -> None:
    """Transform [head_dim, n] float32 in-place, block by block, not normalized; scratch has the same shape.

    The order of the additions is part of the format: strides 1, 2, 4, ... up to half the block.
    """
    start = 0
    for size in blocks.tolist():
        src, dst = x[start : start + size], scratch[start : start + size]
        stride = 1
        while stride < size:
            pairs = src.reshape(size // (2 * stride), 2, stride, -1)
            out = dst.reshape(pairs.shape)
            np.add(pairs[:, 0], pairs[:, 1], out=out[:, 0])
            np.subtract(pairs[:, 0], pairs[:, 1], out=out[:, 1])
            src, dst = dst, src
            stride *= 2
        if size.bit_length() % 2 == 0:  # an odd number of stages ends in the scratch
            dst[:] = src
        start += size
