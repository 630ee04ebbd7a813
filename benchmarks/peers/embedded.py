"""Embedded coding of a block: a base and refinements, the last for exactness. A block is cut from the end.

A group is several layers coded together: keys before RoPE, values and all heads in a row, a vector of C numbers for
each token. A profile has each group's mean, a Karhunen-Loeve transform in the errors' metric, and a regression from a
vector to the attention of later queries. A token with much attention has finer steps (the encoder writes j, and the
steps are 2**(j / 3), in 256ths).

    finest whole numbers   q3 = rint(y / (step * 2**(j / 3))) coarser ones           |q2| = (|q3| + 1) // 3;  |q1| =
    |q2| // 2;  |q0| = |q1| // 2;  signs stay

Intervals nest (Equitz and Cover, "Successive refinement of information", 1991), and dead zones grow where numbers are
few. The base encodes q0. Each refinement encodes the part of a number's interval, with a static table for the
component's deviation and the magnitude so far. Numbers decode to their interval's mean.

The last refinement encodes the bf16 numbers. The decoded numbers of all earlier parts are computed in whole numbers,
equal on every machine. Each number lies in a cell of about half the error's deviation, coded as the distance from the
expected cell, and raw bits inside the cell.

A part, little-endian: | number u8 | 3 zero bytes | bytes of the body u32 | xxh3_64 of key, number and body u64 | body |
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from manthan.benchmarks.peers import Floats, pack, unpack
from manthan.codec.cpu.rans import Coded, Coder, Rows
from manthan.codec.errors import DamagedError, NonFiniteError
from manthan.codec.rope import Rope
from manthan.codec.tables.frequencies import LARGEST, SCALE, SHAPES, as_frequencies

Whole = npt.NDArray[np.int64]
Doubles = npt.NDArray[np.float64]

SPLITS = 2, 2, 3
"""Parts of an interval that each refinement tells apart."""
STEPS = 12, 6, 3, 1
"""Step of each level, in finest ones."""
LOSSLESS = len(STEPS)
"""Number of the part that makes a block exact."""
WIDTHS = 2.0 ** (np.arange(-24, 24) / 3)
"""Deviations of tables, in steps of the base."""
LEAST_J, END_J = -8, 8
MAGNITUDES = 4
"""Magnitudes so far that have tables of their own: 0, 1, 2, and more."""
STREAM_NUMBERS = 2048
FRONT = struct.Struct("<B3xIQ")
POINT, TURN = 20, 14
"""Binary digits of decoded numbers, and of cosines."""
FINE = 16
"""Parts of a finest step, the unit of positions inside an interval."""
SCALES = np.rint(2.0 ** (np.arange(LEAST_J, END_J) / 3) * 256).astype(np.int64)
"""Steps by j, in parts of 1 / 256."""
ROOM = 32767


@dataclass(frozen=True, eq=False)
class Group:
    """Layers coded together. C: numbers of a token, [layers, keys and values, heads, head_dim].

    Args:
        layers: number of layers.
        mean: [C].
        forward, inverse: [C, C], rows x to components (x - mean) @ forward in finest steps, and back.
        tables: uint8 [C], table of each component for j = 0.
        weigher: [C + C / 64 + 1], a token's j by the normalized numbers, the log energies of 64 at a time, and 1.
        deviations: [C], of numbers in the cache.
        errors: int [C], loss with all but the last refinement, thirds of octaves of 2**-POINT, for j = 0.
    """

    layers: int
    mean: Floats
    forward: Floats
    inverse: Floats
    tables: npt.NDArray[np.uint8]
    weigher: Floats
    deviations: Floats
    errors: Whole

    def shifts(self, x: Floats) -> Whole:
        """Return j of each token, [tokens]."""
        told = features(x - self.mean, self.deviations) @ self.weigher
        return np.clip(np.rint(told), LEAST_J, END_J - 1).astype(np.int64)

    def finest(self, x: Floats, j: Whole) -> Whole:
        """Whole numbers [C, tokens] of rows [tokens, C]."""
        return np.rint((x - self.mean) @ self.forward * 256 / SCALES[j - LEAST_J][:, None]).T.astype(np.int64)

    def back(self, q: Whole, level: int, j: Whole) -> Whole:
        """Rows [tokens, C] in parts of 2**-POINT. Sums are whole numbers below 2**53: the order does not matter."""
        magnitude, tables = np.abs(q), shifted(self.tables, j)
        inside = centres()[level, tables, np.minimum(magnitude, MAGNITUDES - 1)]
        places = np.sign(q) * (magnitude * (STEPS[level] * FINE) + inside) * SCALES[j - LEAST_J]
        matrix = np.rint(self.inverse.astype(np.float64) * (2.0 ** (POINT + 12) / (FINE * 256)))
        mean = np.rint(self.mean.astype(np.float64) * 2.0 ** (POINT + 12))
        return (places.T.astype(np.float64) @ matrix + mean).astype(np.int64) >> 12


def features(x: Floats, deviations: Floats) -> Floats:
    """Return the features of a token's weight, [tokens, C + C / 64 + 1]."""
    z = x / deviations
    energies = np.square(z.reshape(len(z), -1, 64)).mean(2)
    return np.concatenate([z, np.log(energies + 1e-3), np.ones((len(z), 1))], 1).astype(np.float32)


def shifted(tables: npt.NDArray[np.uint8], j: Whole) -> Whole:
    """Table of each number [C, tokens]: steps wider by j thirds of an octave make numbers narrower."""
    shape, width = np.divmod(tables.astype(np.int64)[:, None], len(WIDTHS))
    return shape * len(WIDTHS) + np.clip(width - j, 0, len(WIDTHS) - 1)


def coarser(q: Whole) -> list[Whole]:
    """All levels' numbers, the base's first."""
    magnitudes = [np.abs(q)]
    for split in reversed(SPLITS):
        magnitudes.insert(0, (magnitudes[0] + split // 3) // split)
    return [np.sign(q) * m for m in magnitudes]


@cache
def masses() -> tuple[Doubles, Doubles]:
    """Mass and mean of every finest interval, [tables, magnitudes]; the middle for a mass below 1e-12."""
    most = (LARGEST + 1) * STEPS[0]
    edges = np.maximum(np.arange(most + 1) - 0.5, 0)
    all_masses, all_means = [], []
    for shape in SHAPES:
        x = np.concatenate([np.linspace(0, 8, 80_001), np.linspace(8, 120, 20_001)[1:]])
        points = (x[1:] + x[:-1]) / 2
        density = np.exp(-(points**shape)) * np.diff(x)
        root = np.sqrt((density * points**2).sum() / density.sum())
        mass, moment = (np.append(0, np.cumsum(d)) / density.sum() for d in (density, density * points / root))
        for width in WIDTHS * STEPS[0]:
            m, first = (np.diff(np.interp(edges / width, x / root, c)) for c in (mass, moment))
            middle = np.maximum(np.arange(most), 0)
            all_masses.append(m)
            all_means.append(np.where(m > 1e-12, first * width / np.maximum(m, 1e-12), middle))
    return np.array(all_masses), np.array(all_means)


def _summed(x: Doubles, parents: Whole, size: int) -> Doubles:
    made = np.zeros((len(x), size))
    np.add.at(made.T, np.minimum(parents, size - 1), x.T)
    return made


@cache
def centres() -> Whole:
    """Decoded position in an interval, [levels, tables, magnitudes], in parts 1 / FINE of a finest step."""
    mass, mean = masses()
    made = np.zeros((len(STEPS), len(mass), MAGNITUDES), np.int64)
    for level, parents in enumerate(coarser(np.arange(mass.shape[1]))):
        total = _summed(mass, parents, MAGNITUDES)
        inside = _summed(mass * (mean - parents * STEPS[level]), parents, MAGNITUDES)
        made[level] = np.rint(np.where(total > 1e-12, inside / np.maximum(total, 1e-12), 0) * FINE)
    made[:, :, 0] = 0
    return made


class ManyTables(Coder):
    """Coder with any number of tables."""

    def _kernels(self) -> Any:
        return _kernels()


@cache
def _kernels() -> SimpleNamespace:
    import numba

    from manthan.codec.cpu import numba_kernels

    encode, decode = (numba.njit(kernel.py_func) for kernel in (numba_kernels.encode, numba_kernels.decode))
    return SimpleNamespace(encode=encode, decode=decode)


@cache
def coder(part: int) -> Coder:
    """Coder of a part: of tables of components, times magnitudes so far; of the last part, of cells and raw bits."""
    mass = masses()[0]
    levels = coarser(np.arange(mass.shape[1]))
    if part == 0:
        return ManyTables(
            np.array([as_frequencies(_both(m)) for m in _summed(mass, levels[0], LARGEST + 1)], np.uint16)
        )
    if part == LOSSLESS:
        steps = np.array([_summed(m[None], (np.arange(len(m)) + 6) // 12, LARGEST + 1)[0] for m in mass])
        falling = np.zeros(2 * LARGEST + 1)
        falling[LARGEST:] = 2.0 ** -np.arange(1, LARGEST + 2)
        even = [np.where(np.arange(-LARGEST, LARGEST + 1) // 2**bits == 0, 2.0**-bits, 0) for bits in range(1, 8)]
        raw = [np.append(np.rint(m * SCALE), 0) for m in even]
        return ManyTables(
            np.array([*(as_frequencies(_both(m)) for m in steps), as_frequencies(falling), *raw], np.uint16)
        )
    made, split = [], SPLITS[part - 1]
    for m in mass:
        for magnitude in range(MAGNITUDES):
            of = np.minimum(levels[part - 1], MAGNITUDES - 1) == magnitude
            child = levels[part] - split * levels[part - 1]
            likely = np.array([m[of & (child == c)].sum() for c in (-1, 0, 1)])
            least = (child[of][:, None] == (-1, 0, 1)).any(0) * 1e-9
            if magnitude == 0:
                likely, least = np.array([likely[2] / 2, likely[1], likely[2] / 2]), np.full(3, 1e-9)
            likely = (likely + least) / (likely + least).sum()
            row = np.zeros(256)
            row[LARGEST - 1 : LARGEST + 2] = np.where(least > 0, np.maximum(1, np.rint(likely * SCALE)), 0)
            row[LARGEST - 1 + int(likely.argmax())] += SCALE - row.sum()
            made.append(row)
    return ManyTables(np.array(made, np.uint16))


def _both(magnitudes: Doubles) -> Doubles:
    return np.concatenate([magnitudes[:0:-1] / 2, magnitudes[:1], magnitudes[1:] / 2])


# -- a block --------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Embedded:
    """Code of a model's blocks, bf16 as bits, [layers, 2, heads, tokens, head_dim]."""

    groups: Sequence[Group]
    heads: int
    head_dim: int
    rope: Rope

    def encode(self, kv: npt.NDArray[np.uint16], positions: Whole, key: bytes) -> list[bytes]:
        """Return the parts, each sealed. Raises NonFiniteError."""
        if ((kv & 0x7F80) == 0x7F80).any():
            raise NonFiniteError("a number is not finite, and cannot be encoded.", 0)
        x = self.rows(kv, positions)
        j = [g.shifts(of) for g, of in zip(self.groups, x, strict=True)]
        levels = [coarser(g.finest(of, by)) for g, of, by in zip(self.groups, x, j, strict=True)]
        bodies = [pack(np.concatenate(j) - LEAST_J, 4).tobytes()]
        bodies[0] += self._written(0, [level[0] for level in levels], [_tables(g, by) for g, by in self._with(j)])
        for part in range(1, LOSSLESS):
            told = [_told(level[part], level[part - 1], SPLITS[part - 1]) for level in levels]
            tables = [_tables(g, by, level[part - 1]) for (g, by), level in zip(self._with(j), levels, strict=True)]
            bodies.append(self._written(part, told, tables))
        bodies.append(self._exact(kv, self._near([level[-1] for level in levels], LOSSLESS - 1, j, positions), j))
        return [_sealed(number, body, key) for number, body in enumerate(bodies)]

    def decode(self, parts: Sequence[bytes], positions: Whole, key: bytes) -> npt.NDArray[np.uint16]:
        """Decode the base and any following refinements. Raises DamagedError."""
        bodies = [_opened(number, part, key) for number, part in enumerate(parts)]
        tokens = len(positions)
        size = (len(self.groups) * tokens + 1) // 2
        every = unpack(np.frombuffer(bodies[0][:size], np.uint8), 4, len(self.groups) * tokens) + LEAST_J
        j = np.split(every, len(self.groups))
        q = self._read(0, bodies[0][size:], [_tables(g, by) for g, by in self._with(j)])
        for part in range(1, min(len(bodies), LOSSLESS)):
            tables = [_tables(g, by, of) for (g, by), of in zip(self._with(j), q, strict=True)]
            told = self._read(part, bodies[part], tables)
            q = [SPLITS[part - 1] * of + np.where(of < 0, -by, by) for of, by in zip(q, told, strict=True)]
        near = self._near(q, min(len(bodies), LOSSLESS) - 1, j, positions)
        return self._exactly(bodies[LOSSLESS], near, j) if len(bodies) > LOSSLESS else _bits(near)

    def rows(self, kv: npt.NDArray[np.uint16], positions: Whole) -> list[Floats]:
        """Rows [tokens, C] of each group, keys turned back."""
        x = (kv.astype(np.uint32) << 16).view(np.float32)
        x = np.stack([self.rope.turn_back(x[:, 0], positions), x[:, 1]], 1).transpose(3, 0, 1, 2, 4)
        return [of.reshape(len(positions), -1) for of in np.split(x, self._ends, axis=1)]

    @property
    def _ends(self) -> list[int]:
        return np.cumsum([g.layers for g in self.groups])[:-1].tolist()

    def _with(self, j: Sequence[Whole]) -> list[tuple[Group, Whole]]:
        return list(zip(self.groups, j, strict=True))

    def _near(self, q: Sequence[Whole], level: int, j: Sequence[Whole], positions: Whole) -> Whole:
        """Return the decoded numbers, in parts of 2**-POINT, [layers, 2, heads, tokens, head_dim]."""
        rows = [g.back(of, level, by) for (g, by), of in zip(self._with(j), q, strict=True)]
        shape = len(positions), -1, 2, self.heads, self.head_dim
        x = np.concatenate([of.reshape(shape) for of in rows], 1).transpose(1, 2, 3, 0, 4)
        made, (first, second) = x.copy(), self.rope.pairs
        angles = positions[:, None] * np.array(self.rope.frequencies)
        cos, sin = (np.rint(f(angles) * 2**TURN).astype(np.int64) for f in (np.cos, np.sin))
        keys, turned = x[:, 0], made[:, 0]
        turned[first] = (keys[first] * cos - keys[second] * sin) >> TURN
        turned[second] = (keys[second] * cos + keys[first] * sin) >> TURN
        return made

    # -- the last part: cells, positions in the cell at zero, and raw bits --------------------------------

    def _cells(self, near: Whole, j: Sequence[Whole]) -> tuple[Whole, Whole, Whole]:
        """Binary logarithm of each number's cell in 2**-POINT, the expected cell, and the cell's table."""
        shape = -1, 2, self.heads, 1, self.head_dim
        errors = [g.errors.reshape(shape) + by[:, None] for g, by in self._with(j)]
        wide = np.concatenate(errors)
        far = np.abs(near)
        top = np.frexp(far.astype(np.float64))[1].astype(np.int64) - 1
        size = np.maximum(np.maximum(wide // 3 - 1, top - 7), 0)
        lattice = top - 7 >= size
        cell = np.where(lattice, far + (1 << size >> 1), far) >> size
        table = np.clip(wide - 3 * size + 24, 0, len(WIDTHS) - 1)
        return size, np.where(near < 0, -1 - cell, cell), table

    def _exact(self, kv: npt.NDArray[np.uint16], near: Whole, j: Sequence[Whole]) -> bytes:
        size, expected, table = self._cells(near, j)
        bits = (kv & 0x7FFF).astype(np.int64)
        values = (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        cell = np.floor(np.ldexp(values, POINT - size)).astype(np.int64)
        told = np.where(kv >> 15, -1 - cell, cell) - expected
        if np.abs(told).max() > ROOM:
            return b"\0" + kv.astype("<u2").tobytes()
        raw, at_zero = _raw(cell), cell == 0
        falls = (size - POINT + 126 - (bits >> 7))[at_zero]
        places = (bits & (1 << raw) - 1)[raw > 0]
        tables = np.concatenate([np.full(len(falls), _FALLING), _FALLING + raw[raw > 0]])
        first = self._written(LOSSLESS, np.split(told, self._ends), np.split(table, self._ends))
        second = self._written(LOSSLESS, [np.concatenate([falls, places])], [tables])
        return b"\1" + struct.pack("<I", len(first)) + first + second

    def _exactly(self, body: bytes, near: Whole, j: Sequence[Whole]) -> npt.NDArray[np.uint16]:
        if body[0] == 0:
            return np.frombuffer(body[1:], "<u2").reshape(near.shape).astype(np.uint16)
        end = 5 + struct.unpack("<I", body[1:5])[0]
        size, expected, table = self._cells(near, j)
        told = self._read(LOSSLESS, body[5:end], np.split(table, self._ends))
        signed = expected + np.concatenate(told)
        cell = np.where(signed < 0, -1 - signed, signed)
        raw, at_zero = _raw(cell), cell == 0
        tables = np.concatenate([np.full(int(at_zero.sum()), _FALLING), _FALLING + raw[raw > 0]])
        (rest,) = self._read(LOSSLESS, body[end:], [tables])
        falls, places = np.zeros_like(cell), np.zeros_like(cell)
        falls[at_zero], places[raw > 0] = np.split(rest, [int(at_zero.sum())])
        length = np.frexp(np.maximum(cell, 1).astype(np.float64))[1].astype(np.int64)
        mantissa = np.where(length >= 8, cell >> np.maximum(length - 8, 0), cell << np.maximum(8 - length, 0)) & 127
        exponent = np.where(at_zero, size - POINT + 126 - falls, length - 1 + size - POINT + 127)
        return ((exponent << 7) + np.where(at_zero, 0, mantissa) + places + (signed < 0) * 0x8000).astype(np.uint16)

    # -- rANS -------------------------------------------------------------------------------------------

    def _written(self, part: int, numbers: Sequence[Whole], tables: Sequence[Whole]) -> bytes:
        rows, flat = _layout(tables), np.concatenate([of.ravel() for of in numbers])
        if np.abs(flat).max(initial=0) > ROOM:
            raise NonFiniteError("a number is too far from the profile to be encoded.", 0)
        coded = coder(part).encode(flat.astype(np.int16), rows, 2 * flat.size)
        assert coded is not None
        return b"".join([coded.sizes.astype("<u4").tobytes(), coded.states.tobytes(), coded.words.tobytes()])

    def _read(self, part: int, body: bytes, tables: Sequence[Whole]) -> list[Whole]:
        rows, count = _layout(tables), len(tables)
        at = 4 * count
        end = at + 4 * count * rows.streams
        states = np.frombuffer(body[at:end], "<u4").reshape(count, rows.streams)
        sizes = np.frombuffer(body[:at], "<u4").astype(np.int64)
        numbers = coder(part).decode(Coded(states, sizes, np.frombuffer(body[end:], "<u2")), rows).astype(np.int64)
        ends = np.cumsum([of.size for of in tables])[:-1]
        return [n.reshape(of.shape) for n, of in zip(np.split(numbers, ends), tables, strict=True)]


_FALLING = len(SHAPES) * len(WIDTHS)
"""Table of positions in the cell at zero; tables of 1 to 7 raw bits follow."""


def _layout(tables: Sequence[Whole]) -> Rows:
    sizes = np.array([of.size for of in tables], np.int64)
    streams = 1 << max(0, int(sizes.max()) // STREAM_NUMBERS - 1).bit_length()
    return Rows(sizes, np.concatenate([of.ravel() for of in tables]).astype(np.uint16), 1, streams)


def _tables(group: Group, j: Whole, so_far: Whole | None = None) -> Whole:
    """Table of each number; so_far: numbers of the earlier level, of a refinement."""
    tables = shifted(group.tables, j)
    return tables if so_far is None else MAGNITUDES * tables + np.minimum(np.abs(so_far), MAGNITUDES - 1)


def _told(q: Whole, so_far: Whole, split: int) -> Whole:
    """Return a refinement's numbers, in the direction of the number's sign."""
    return np.where(so_far < 0, split * so_far - q, q - split * so_far)


def _raw(cell: Whole) -> Whole:
    """Raw bits of a number in `cell`."""
    length = np.frexp(np.maximum(cell, 1).astype(np.float64))[1].astype(np.int64)
    return np.where(cell == 0, 7, np.maximum(8 - length, 0))


def _bits(near: Whole) -> npt.NDArray[np.uint16]:
    """bf16 bits of numbers in parts of 2**-POINT, ties to even."""
    words = np.ldexp(near.astype(np.float64), -POINT).astype(np.float32).view(np.uint32)
    return ((words + 0x7FFF + (words >> 16 & 1)) >> 16).astype(np.uint16)


def _sealed(number: int, body: bytes, key: bytes) -> bytes:
    return FRONT.pack(number, len(body), xxhash.xxh3_64_intdigest(key + bytes([number]) + body)) + body


def _opened(number: int, part: bytes, key: bytes) -> bytes:
    if len(part) < FRONT.size:
        raise DamagedError(f"refinement {number} has {len(part)} bytes: its front has {FRONT.size}.")
    found, size, checksum = FRONT.unpack_from(part)
    body = part[FRONT.size :]
    if part[1:4] != b"\0\0\0" or (found, size) != (number, len(body)):
        raise DamagedError(f"refinement {number} has a front that no encoder writes.")
    if checksum != xxhash.xxh3_64_intdigest(key + bytes([number]) + body):
        raise DamagedError(f"refinement {number} is not as it was sealed.")
    return body
