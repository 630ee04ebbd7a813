"""Keys and values in tiles whose variances are made even first, the whole block seen at once: the layout of such codes,
and their arithmetic, in plain numpy.

L. Muller et al., "KVarN: variance-normalized KV-cache quantization", 2026 (arXiv 2606.03458), does this for the live
cache in tiles of 128 tokens. What is taken from there: the rotation, magnitudes of channels and tokens evened out in
turns (as Sinkhorn does sums), 4 bits for keys with a range for each channel, 2 bits for values with one for each token.

A tile is what one head of one layer has in a section: T vectors of D numbers. Its lines are its D channels for keys, of
T numbers each, and its T tokens for values, of D numbers each; whatever is not a line is a column: M of them. Codes of
keys, or of values, in n tiles of L lines, at b bits, little-endian:

    | n exponents, a byte each | pad to 16 | tile 0: L starts, L steps, M scales, bf16 | tile 1: ... | pad to 16
    | vector 0: b bit planes | vector 1: ... | pad to 16 |

Planes are those of `manthan.codec.base`, but of plain numbers from 0 to 2**b - 1, highest bit first; padding is zero.
Encoding a tile, all in float32, no step fused with another:

    p  = the exponent e - 127 with e = 254 - (the largest exponent field in the tile), within 8 .. 254
    y  = hadamard(x * 2**p * w)        w: rotation.weights
    u, v = 1 for each token and each channel; then ROUNDS times, with z = y / u / v each time:
        v = v * rms(z of the channel); u = u * rms(z of the token)
    c  = u for keys, v for values, within 2**-30 .. 2**30, rounded to bf16, ties to even
    z  = y / c
    m, h = (greatest + least) * 0.5, (greatest - least) * (S / 2)        of the line's z
    b  = m - h, rounded down to bf16
    a  = (m + h - b) / (2**bits - 1), rounded up to bf16
    q  = (z - b) / a rounded to a whole number, ties to even, within 0 .. 2**bits - 1; 0 where a is 0
    with S = COVERED[bits], or 1 where fold(d * d) is less with it, d = z - (q * a + b)

and decoding it:

    x^ = hadamard((q * a + b) * c) * w * 2**-p, within ±the dtype's largest, rounded, ties to even

rms(z) = sqrt(fold(z * z) * (1 / n)), or 1 where that is less than 2**-24; fold is `centring`'s, over tokens or
channels. It is taken about zero: a few tokens may agree on a channel by chance, and what they differ by is no measure
of it then.
"""

from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from manthan.codec.base import (
    CodecSpec,
    Codes,
    Kind,
    Numbers,
    Positions,
    Section,
    SectionCodec,
    align16,
    check_head_dim,
)
from manthan.codec.cpu.numbers import Floats, as_floats, as_numbers
from manthan.codec.errors import NonFiniteError, SizeError
from manthan.codec.tables.constants import tables
from manthan.codec.tables.rotation import hadamard_

ROUNDS = 4
COVERED = {2: np.float32(21 / 32), 3: np.float32(27 / 32), 4: np.float32(15 / 16)}
"""How much of a line's range codes cover, by their bits."""
CHUNK = 8
"""Tiles at a time: the temporaries stay in the second-level cache."""
LEAST = np.float32(2.0**-24)
FURTHEST = np.float32(2.0**30)
BOUND = (127 + 40) << 7
"""bf16 bits, without the sign, that no start, step or scale reaches."""

Shorts = npt.NDArray[np.uint16]

MAGNITUDE, EXPONENT = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)


class Places(NamedTuple):
    """Where the parts of the codes of keys, or of values, are. lines, columns: of a tile. bits: of a number."""

    exponents: slice
    scales: slice
    planes: slice
    nbytes: int
    lines: int
    columns: int
    bits: int

    @classmethod
    def of(cls, spec: CodecSpec, kind: Kind, tiles: int, tokens: int, head_dim: int) -> Self:
        """tiles: layers times heads."""
        bits = spec.bits(kind)
        lines, columns = (head_dim, tokens) if kind == "key" else (tokens, head_dim)
        parts, at = [], 0
        for size in (tiles, 2 * tiles * (2 * lines + columns), tiles * tokens * bits * head_dim // 8):
            parts.append(slice(at, at + size))
            at += align16(size)
        exponents, scales, planes = parts
        return cls(exponents, scales, planes, at, lines, columns, bits)


class TileSections(SectionCodec):
    """Raises HeadDimError."""

    def __init__(self, spec: CodecSpec, head_dim: int) -> None:
        check_head_dim(head_dim)
        self.name, self.spec = spec.name, spec
        self._tables = tables(head_dim, spec.key_bits, rotated=True)

    def max_nbytes(self, section: Section) -> int:
        return sum(self._places(section, kind).nbytes for kind in section.vector_kinds)

    def encode(self, x: Numbers, section: Section, positions: Positions, out: Codes) -> int:
        at = 0
        parts = x.reshape(len(section.vector_kinds), -1, section.tokens, section.head_dim)
        for numbers, kind in zip(parts, section.vector_kinds, strict=True):
            places = self._places(section, kind)
            codes = out[at : at + places.nbytes]
            codes[:] = 0
            for first in range(0, len(numbers), CHUNK):
                self._encode(as_floats(numbers[first : first + CHUNK]), first, kind, places, codes)
            at += places.nbytes
        return at

    def decode(self, codes: Codes, section: Section, positions: Positions) -> Numbers:
        """Raises SizeError; NonFiniteError for an exponent or a scale that no encoder writes."""
        if codes.size != self.max_nbytes(section):
            raise SizeError(f"{codes.size} bytes are not the codes of {section}: {self.max_nbytes(section)} are.")
        shape = (len(section.vector_kinds), section.layers * section.heads, section.tokens, section.head_dim)
        numbers: Numbers = np.empty(shape, section.dtype.numpy)
        at = 0
        for tiles, kind in zip(numbers, section.vector_kinds, strict=True):
            places = self._places(section, kind)
            part = codes[at : at + places.nbytes]
            _check(part, len(tiles), places)
            for first in range(0, len(tiles), CHUNK):
                some = slice(first, first + CHUNK)
                tiles[some] = as_numbers(self._decode(part, len(tiles), some, kind, places), section.dtype)
            at += places.nbytes
        return numbers.reshape(section.shape)

    def _places(self, section: Section, kind: Kind) -> Places:
        return Places.of(self.spec, kind, section.layers * section.heads, section.tokens, section.head_dim)

    def _encode(self, x: Floats, first: int, kind: Kind, places: Places, codes: Codes) -> None:
        """Tiles [n, tokens, head_dim] into the codes of all, of which they are those from `first` on."""
        n, tokens, dim = x.shape
        top = (np.ascontiguousarray(x).view(np.uint32) & MAGNITUDE).max(axis=2)
        if (bad := (top >= EXPONENT).ravel()).any():
            index = first * tokens + int(bad.argmax())
            raise NonFiniteError(f"vector {index} holds a NaN or an infinity and cannot be encoded.", index)
        exponents = np.clip(254 - (top.max(axis=1) >> np.uint32(23)).astype(np.int32), 8, 254)
        y = self._rotated(x * np.ldexp(np.float32(1), exponents - 127)[:, None, None] * self._tables.weights)
        scales = _evened(y, kind)
        z = y / _wide(scales)[:, :, None] if kind == "key" else y / _wide(scales)[:, None, :]
        starts, steps, q, _ = _ranged(z, 1 if kind == "key" else 2, places.bits)
        codes[places.exponents][first : first + n] = exponents
        kept = codes[places.scales].view("<u2").reshape(-1, 2 * places.lines + places.columns)
        kept[first : first + n] = np.concatenate([starts, steps, scales], axis=1)
        planes = [q & np.uint8(1 << (places.bits - 1 - p)) for p in range(places.bits)]
        packed = np.packbits(np.stack(planes, axis=2), axis=3, bitorder="little")
        codes[places.planes].reshape(-1, tokens, places.bits, dim // 8)[first : first + n] = packed

    def _decode(self, codes: Codes, tiles: int, some: slice, kind: Kind, places: Places) -> Floats:
        """Some of so many tiles, [n, tokens, head_dim]."""
        dim = len(self._tables.weights)
        digits = np.unpackbits(
            codes[places.planes].reshape(tiles, -1, places.bits, dim // 8)[some], axis=3, bitorder="little"
        )
        q = np.zeros(digits[:, :, 0].shape, np.float32)
        for p in range(places.bits):
            q = q * np.float32(2) + digits[:, :, p]
        kept = _wide(codes[places.scales].view("<u2").reshape(tiles, -1)[some])
        starts, steps, scales = np.split(kept, [places.lines, 2 * places.lines], axis=1)
        if kind == "key":
            y = (q * steps[:, None, :] + starts[:, None, :]) * scales[:, :, None]
        else:
            y = (q * steps[:, :, None] + starts[:, :, None]) * scales[:, None, :]
        power = np.ldexp(np.float32(1), 127 - codes[places.exponents][some].astype(np.int32))
        x: Floats = self._rotated(y) * self._tables.weights
        with np.errstate(over="ignore"):
            x *= power[:, None, None]
        x += np.float32(0)  # no negative zeros
        return x

    def _rotated(self, x: Floats) -> Floats:
        """hadamard of each vector of [n, tokens, head_dim], a new array."""
        columns = np.ascontiguousarray(x.reshape(-1, x.shape[2]).T)
        hadamard_(columns, np.empty_like(columns), self._tables.blocks)
        return np.ascontiguousarray(columns.T).reshape(x.shape)


def _evened(y: Floats, kind: Kind) -> Shorts:
    """bf16 scales of the columns, [n, columns]: of tokens for keys, of channels for values."""
    tokens, channels = np.ones(y.shape[:2], np.float32), np.ones(y.shape[::2], np.float32)
    for _ in range(ROUNDS):
        channels *= _rms(y / tokens[:, :, None] / channels[:, None, :], 1)
        tokens *= _rms(y / tokens[:, :, None] / channels[:, None, :], 2)
    found = np.clip(tokens if kind == "key" else channels, 1 / FURTHEST, FURTHEST)
    return _shorten(found, np.uint32(0x7FFF) + (found.view(np.uint32) >> np.uint32(16) & np.uint32(1)))


def _rms(z: Floats, axis: int) -> Floats:
    found = np.sqrt(_fold(z * z, axis) * np.float32(1 / z.shape[axis]))
    made: Floats = np.where(found < LEAST, np.float32(1), found)
    return made


def _fold(x: Floats, axis: int) -> Floats:
    """The sum over an axis: its upper half is added onto its lower half until one is left."""
    x = np.moveaxis(x, axis, 0)
    while len(x) > 1:
        half = (len(x) + 1) // 2
        x = np.concatenate([x[: len(x) - half] + x[half:], x[len(x) - half : half]])
    total: Floats = x[0]
    return total


class Ranged(NamedTuple):
    """starts, steps: bf16 bits, of the lines. q: codes, of the numbers' shape. error: of the lines, squared."""

    starts: Shorts
    steps: Shorts
    q: npt.NDArray[np.uint8]
    error: Floats


def _ranged(z: Floats, axis: int, bits: int) -> Ranged:
    """Numbers as codes; lines go along an axis. With few levels most lines gain by a narrower range, some lose."""
    narrow, whole = (_within(z, axis, bits, share) for share in (COVERED[bits], np.float32(1)))
    better = whole.error < narrow.error
    for kept, other in ((narrow.starts, whole.starts), (narrow.steps, whole.steps), (narrow.error, whole.error)):
        np.copyto(kept, other, where=better)
    np.copyto(narrow.q, whole.q, where=np.expand_dims(better, axis))
    return narrow


def _within(z: Floats, axis: int, bits: int, share: np.float32) -> Ranged:
    """Codes that cover this share of each line's range, in its middle."""
    top = np.float32(2**bits - 1)
    least, greatest = z.min(axis=axis), z.max(axis=axis)
    middle, half = (greatest + least) * np.float32(0.5), (greatest - least) * (share / np.float32(2))
    starts = _shorten(
        middle - half, np.where(middle < half, np.uint32(0xFFFF), np.uint32(0))
    )  # down: away from 0 below
    steps = _shorten((middle + half - _wide(starts)) / top, np.uint32(0xFFFF))
    a, b = np.expand_dims(_wide(steps), axis), np.expand_dims(_wide(starts), axis)
    q = np.where(a > 0, np.clip(np.rint((z - b) / np.where(a > 0, a, np.float32(1))), 0, top), np.float32(0))
    d = z - (q * a + b)
    return Ranged(starts, steps, q.astype(np.uint8), _fold(d * d, axis))


def _shorten(x: Floats, add: npt.NDArray[np.uint32] | np.uint32) -> Shorts:
    """bf16 bits of float32, cut off after `add` was added to their bits."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    return ((bits + add) >> np.uint32(16)).astype(np.uint16)


def _wide(bf16: Shorts) -> Floats:
    return (bf16.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _check(codes: Codes, tiles: int, places: Places) -> None:
    exponents = codes[places.exponents]
    scales = codes[places.scales].view("<u2").reshape(tiles, -1)
    bad = (exponents < 8) | (exponents > 254) | ((scales & 0x7FFF) >= BOUND).any(axis=1)
    if bad.any():
        tile = int(bad.argmax())
        raise NonFiniteError(f"a scale of tile {tile} is not finite, or too large: the codes are damaged.", tile)
