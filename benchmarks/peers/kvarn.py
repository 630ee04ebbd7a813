"""KVarN: variance-normalized tiles, 4 bits for keys and 2 for values (L. Muller et al., "KVarN: variance-normalized
KV-cache quantization", 2026, arXiv 2606.03458).

A tile has one head's keys or values of a block, [tokens, head_dim], 128 tokens in the paper. A Hadamard transform
rotates each token's vector. Scales of channels and of tokens are found alternately, so that the tile divided by both
has about the same root mean square in each channel and each token. A line is a channel of keys or a token of values; a
column is a token of keys or a channel of values. Columns are divided by the scales. Each line is then quantized to
whole numbers of 4 bits (keys) or 2 bits (values), by a start and a step. Start and step make a line's scale needless.

    | scales of the columns, fp16 | starts of the lines, fp16 | steps of the lines, fp16 | whole numbers |
"""

import numpy as np
import numpy.typing as npt

from manthan.benchmarks.peers import Floats, Peer, halves, pack, unpack
from manthan.codec.base import ByteArray, Kind
from manthan.codec.tables.rotation import rotation

BITS = {"key": 4, "value": 2}
ROUNDS = 4
COVERED = {4: 15 / 16, 2: 21 / 32}
"""Share of a line's range, by bits, that whole numbers may cover instead of all, if the squared error is less."""
TINY = 1e-6


def rotated(x: Floats, back: bool = False) -> Floats:
    """Return x [tokens, head_dim] with each token's vector rotated. back: True to undo the rotation."""
    constants = rotation(x.shape[1])
    y = np.ascontiguousarray(x.T) * (1 if back else constants.weights[:, None])
    y = np.ascontiguousarray(y, np.float32)
    hadamard_(y, np.empty_like(y), constants.blocks)
    return np.ascontiguousarray((y * constants.weights[:, None] if back else y).T)


def normalized(y: Floats) -> tuple[Floats, Floats]:
    """Return scales of tokens [tokens, 1] and of channels [1, head_dim].

    The tile divided by both has a root mean square of about 1 in each token and in each channel.
    """
    tokens, channels = np.ones((len(y), 1), np.float32), np.ones((1, y.shape[1]), np.float32)
    for _ in range(ROUNDS):
        channels *= _rms(y / tokens / channels, 0)
        tokens *= _rms(y / tokens / channels, 1)
    return tokens, channels


def _rms(z: Floats, axis: int) -> Floats:
    found = np.sqrt(np.square(z).mean(axis, keepdims=True))
    return np.where(found < TINY, 1, found).astype(np.float32)


def encode(x: Floats, kind: Kind) -> ByteArray:
    """Return the bytes of a tile [tokens, head_dim]."""
    bits, y = BITS[kind], rotated(x)
    tokens, channels = normalized(y)
    scale = np.float16(tokens if kind == "key" else channels).astype(np.float32)
    scale = np.where(scale == 0, 1, scale)
    z = y / scale
    z = z if kind == "value" else z.T  # [lines, columns]
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


def decode(encoded: ByteArray, kind: Kind, shape: tuple[int, int]) -> Floats:
    """Undo `encode` of a tile with shape `shape`."""
    lines, columns = shape if kind == "value" else shape[::-1]
    ends = np.cumsum([2 * columns, 2 * lines, 2 * lines])
    scale, start, step = (
        part.copy().view("<f2").astype(np.float32) for part in np.split(encoded[: ends[-1]], ends[:-1])
    )
    q = unpack(encoded[ends[-1] :], BITS[kind], lines * columns).reshape(lines, columns)
    z = (q * step[:, None] + start[:, None]) * scale
    return rotated((z if kind == "value" else z.T).astype(np.float32), back=True)


KVARN = Peer("kvarn", encode, decode)


def hadamard_(x: npt.NDArray[np.float32], scratch: npt.NDArray[np.float32], blocks: npt.NDArray[np.int64]) -> None:
    """Apply Hadamard transforms without normalization, in place, to float32 x [head_dim, n].

    blocks: for each transform, the number of its rows, a power of 2. scratch: memory of x's shape.
    The order of the additions is part of the format: strides 1, 2, 4, ... up to half the rows.
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
        if size.bit_length() % 2 == 0:  # the result of an odd number of stages is in scratch
            dst[:] = src
        start += size
