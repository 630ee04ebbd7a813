"""Calibrated codec: a block is a base and up to four refinements. The last, the fourth, makes the block exact.

A level is a precision. The base is the coarsest level, and each refinement adds a finer level. A block whose last
refinements are cut off is a coarser block.

A group (of the profile, not of KV caches) is some layers, or some heads of a layer, encoded together. A token's keys
before RoPE and values, or latents, are a vector x of C numbers in a group. The profile, calibrated on the model's KV,
has for each group a mean, a Karhunen-Loeve transform in a metric of errors, and a regression from x to j, -8 to 7. A
low j means that later queries attend much to the token, and makes its steps finer. If a block is too large, or a number
takes more than 16 bits, k coarsens all steps; j alone still chooses the frequency tables:

    q = rint((x - mean) @ forward / 2**((j + k) / 3)), numbers of the finest lossy level

Numbers of coarser levels follow from q, see `manthan.codec.tables.levels`. Number i of a group, [components, tokens],
goes to rANS stream i % streams (see `manthan.codec.cpu.rans`).

The last refinement encodes bf16 and fp8 numbers. The finest lossy level predicts them in whole-number arithmetic, which
gives equal results on every machine. Cells, about half the prediction error's standard deviation wide, divide bf16's
numbers. A number is encoded as its cell's distance from the predicted cell, bits inside the cell, and in cell 0 its
exponent. An fp8 number is encoded as its distance from the predicted one, in ranks: all fp8 numbers in order. Its table
follows from the expected error in fp8's steps at the predicted number. The layout is little-endian. Of two j in a
byte, the first has the low bits; zeros follow the last j up to an even count of bytes:

    base:             | version u8, 1 | k u8 | 2 zero bytes | j + 8 of groups and tokens, 4 bits each | rows of groups |
    refinement:       | rows of groups |
    last refinement:  | 1, 3 zero bytes | xxh3-64 of the numbers u64 | rows of layers |
                      or, for fp8:  | 1, 3 zero bytes | xxh3-64 u64 | count of bytes u32 | rows as in `rans` |
                      or, for other dtypes, or if that fails or takes more bytes:  | 4 zero bytes | numbers |
    rows:             | count of each row's words, u32 | states of each row's streams, u32 | words of all rows, u16 |
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from manthan.codec.base import ByteArray, Codec, Dtype, Numbers, Positions, Section, SectionKind, check_head_dim
from manthan.codec.cpu.numbers import as_floats, as_numbers, check_finite, fp8_of_ranks, fp8_ranks, fp8_steps, kernels
from manthan.codec.cpu.rans import FURTHEST, LOWEST, START, STREAMS_MAX, VERSION, Coder, Rows, check_front
from manthan.codec.errors import DamagedError, NonFiniteError, ProfileError, SizeError
from manthan.codec.model import NO_FACTS, ModelFacts
from manthan.codec.profile import LEVELS, Group, Profile
from manthan.codec.rope import Floats, Rope
from manthan.codec.tables import levels
from manthan.codec.tables.frequencies import DEVIATIONS, OCTAVE, SHAPES, family
from manthan.codec.wire import LEAST_BODY, body_nbytes, checksum

EXACT = len(levels.STEPS)
"""Level of an exact block."""
STREAM_NUMBERS = 2048
LEAST_J, END_J = -8, 8
MOST_K = 60
SCALES = np.rint(2.0 ** (np.arange(LEAST_J, END_J + MOST_K) / 3) * 256).astype(np.int64)
"""Factors of steps, 2**((j + k) / 3), in units of 1 / 256, by j + k from LEAST_J on."""
TURN = 14
"""Fraction bits of RoPE's cosines and sines as whole numbers."""
SLACK = 2
"""Bound of the lossy levels' bytes, as a multiple of the expected. Tokens with a low j need more than expected."""
REFINEMENT = 32
"""Most bytes of a refinement's front and padding."""
FP8_BITS = 2
"""Bits of an fp8 number that the last refinement is expected to take."""
FP8_SHAPE, FP8_WIDER, FP8_FIRST = SHAPES.index(1.4), 1, round(-OCTAVE * float(np.log2(DEVIATIONS[0])))
"""For distances of fp8 numbers: shape of the tables, third octaves by which fp8's rounding widens the expected errors,
and index of a shape's table whose deviation is one step."""

Whole = npt.NDArray[np.int64]


@dataclass(frozen=True)
class KltPreset:
    """Named choice of a calibrated codec. level: finest level of a newly encoded block."""

    name: str
    level: int

    def codec(self, head_dim: int, facts: ModelFacts = NO_FACTS) -> "KltCodec":
        """Return the codec on the CPU. Raises HeadDimError; ProfileError for a missing or unfit profile."""
        if facts.profile is None:
            raise ProfileError(f"codec {self.name} needs a profile of the model: run `manthan calibrate MODEL`.")
        return KltCodec(self.name, self.level, head_dim, facts.profile, facts.rope)


PRESETS = {name: KltPreset(name, level) for name, level in LEVELS.items()}


class KltCodec(Codec):
    """Codec of a preset, on the CPU. Raises HeadDimError; ProfileError for an unfit profile.

    head_dim: count of numbers in a head's keys or values, or in a piece of a latent. profile: profile of the section's
    layers and the rank's heads. rope: RoPE of the model; must equal the profile's RoPE.
    """

    varies = True
    takes_fp8 = True
    levels = EXACT + 1

    def __init__(self, name: str, level: int, head_dim: int, profile: Profile, rope: Rope | None) -> None:
        check_head_dim(head_dim)
        profile.check(head_dim, rope)
        self.name, self._level, self._profile, self._groups = name, level, profile, profile.groups
        info = profile.info
        self._rope, self._kind = info.rope, SectionKind.LATENT if info.latent else SectionKind.BOTH
        self._shape = info.layers, len(info.kinds), max(g.place[2] + g.place[3] for g in self._groups), head_dim

    def max_nbytes(self, section: Section) -> int:
        """Return the most bytes of a section and its refinements."""
        exact = body_nbytes(self._raw(section)) + REFINEMENT if self._level == EXACT else 0
        return self._most_lossy(section) + exact

    def expected_nbytes(self, section: Section) -> int:
        if self._level == EXACT and section.dtype is not Dtype.BFLOAT16:
            last = self._raw(section) * FP8_BITS // 8 if section.dtype.is_fp8 else self._raw(section)
            return self._expected(section, EXACT - 1) + last + REFINEMENT
        return self._expected(section, self._level)

    def _most_lossy(self, section: Section) -> int:
        level = min(self._level, EXACT - 1)
        return SLACK * self._expected(section, level) + (level + 1) * (REFINEMENT + LEAST_BODY)

    def _expected(self, section: Section, level: int) -> int:
        layers, kinds, heads, dim = self._shape
        shape = section.kind, section.first_layer, section.layers, section.heads, section.head_dim
        if shape != (self._kind, 0, layers, heads, dim):
            raise SizeError(f"{section} is not of the profile of {self._profile.info.model}, {layers} layers.")
        fronts = front(self._groups, section.tokens)
        bits = self._profile.info.bits[level] * section.tokens * layers * kinds * heads * dim
        return START + int(bits / 8) + (level + 1) * fronts

    def _raw(self, section: Section) -> int:
        """Return the bytes of a section's unencoded numbers, with the 4 bytes ahead of them in the last refinement."""
        return START + len(section.vector_kinds) * section.vectors * section.head_dim * section.dtype.numpy.itemsize

    def encode(self, x: Numbers, section: Section, positions: Positions, out: ByteArray) -> int:
        return self.encode_parts(x, section, positions, out)[0]

    def decode(self, encoded: ByteArray, section: Section, positions: Positions) -> Numbers:
        return self.decode_parts(encoded, (), section, positions)

    def encode_parts(
        self, x: Numbers, section: Section, positions: Positions, out: ByteArray
    ) -> tuple[int, list[ByteArray]]:
        """Raises NonFiniteError; SizeError for a section that is not of the profile."""
        most, numbers = self.max_nbytes(section), as_floats(x, section.dtype)
        check_finite(numbers)
        with np.errstate(over="ignore", invalid="ignore"):
            rows = self._rows(numbers, section, positions)
            j = [shifts_of(g, of) for g, of in zip(self._groups, rows, strict=True)]
            y = [(of - g.mean) @ g.forward for g, of in zip(self._groups, rows, strict=True)]
        told = np.concatenate(j) - LEAST_J
        packed = np.append(told, np.zeros(-told.size % 4, np.int64)).reshape(-1, 2) @ (1, 16)
        lossy = min(self._level, EXACT - 1)
        room = self._most_lossy(section)
        for k in range(0, MOST_K + 1, 3):
            found = [finest(of, by + k) for of, by in zip(y, j, strict=True)]
            q = [of for of in found if of is not None]
            if len(q) < len(found):
                continue
            bodies = [written(self._groups, q, j, level) for level in range(lossy + 1)]
            start = np.array([VERSION, k, 0, 0], np.uint8)
            bodies[0] = np.concatenate([start, packed.astype(np.uint8), bodies[0]])
            if sum(body_nbytes(body.size) + REFINEMENT for body in bodies) <= room:
                break
        else:
            raise NonFiniteError("a number is too far from the profile to be encoded.")
        if self._level == EXACT:
            bodies.append(self._exact(x, q, j, k, section, positions))
        assert sum(map(len, bodies)) <= most
        out[: bodies[0].size] = bodies[0]
        return bodies[0].size, bodies[1:]

    def decode_parts(
        self, encoded: ByteArray, refinements: Sequence[ByteArray], section: Section, positions: Positions
    ) -> Numbers:
        """Raises SizeError, DamagedError."""
        self._expected(section, 0)
        count, tokens = len(self._groups), section.tokens
        begin = START + -(-count * tokens // 4) * 2
        if encoded.size < begin or len(refinements) > EXACT:
            raise SizeError(f"{encoded.size} bytes do not encode {section}: at least {begin} do.")
        k = check_front(encoded, section.codec, MOST_K)
        nibbles = np.stack([encoded[START:begin] & 15, encoded[START:begin] >> 4], 1).ravel().astype(np.int64)
        j = list(nibbles[: count * tokens].reshape(count, tokens) + LEAST_J)
        bodies, exact = [encoded[begin:], *refinements[: EXACT - 1]], len(refinements) == EXACT
        told = self._read(bodies, j, k, np.float64 if exact else np.float32)
        if exact:
            return self._exactly(refinements[-1], told, j, k, section, positions)
        rows = [np.empty((tokens, g.mean.size), np.float32) for g in self._groups]
        for g, of, row in zip(self._groups, told, rows, strict=True):
            kernels().product(of, g.transform.view(np.uint16), g.scale / np.float32(levels.FINE * 256), g.mean, row)
        x = self.ungrouped(rows)
        if self._rope is not None:
            x[:, 0] = self._rope.turn(x[:, 0], positions)
        return as_numbers(_sections(x, section), section.dtype)

    # -- numbers and rows ---------------------------------------------------------------------------------

    def _rows(self, x: Floats, section: Section, positions: Positions) -> list[Floats]:
        """Return the vectors [tokens, C] of each group, keys turned back to position 0."""
        x = x.reshape(-1, *section.shape[-4:])
        if self._rope is not None:
            x = np.stack([self._rope.turn_back(x[0], positions), x[1]])
        made = []
        for first, layers, head, heads in (g.place for g in self._groups):
            part = x[:, first : first + layers, head : head + heads].transpose(3, 1, 0, 2, 4)
            made.append(np.ascontiguousarray(part).reshape(section.tokens, -1))
        return made

    def ungrouped(self, rows: Sequence[Any]) -> Any:
        """Undo `_rows`, but leave keys at position 0. Returns [layers, kinds, heads, tokens, head_dim]."""
        layers, kinds, heads, dim = self._shape
        made = np.empty((layers, kinds, heads, len(rows[0]), dim), rows[0].dtype)
        for g, of in zip(self._groups, rows, strict=True):
            first, count, head, some = g.place
            part = of.reshape(-1, count, kinds, some, dim).transpose(1, 2, 3, 0, 4)
            made[first : first + count, :, head : head + some] = part
        return made

    # -- levels -------------------------------------------------------------------------------------------

    def _read(self, bodies: Sequence[ByteArray], j: Sequence[Whole], k: int, dtype: Any) -> list[Any]:
        """Return the groups' decoded components, see `places`. bodies: rows of the base, then of each refinement.

        Raises SizeError, DamagedError.
        """
        tokens, streams = j[0].size, [streams_of(g.mean.size * j[0].size) for g in self._groups]
        parts = [_parted(body, streams) for body in bodies]
        words = np.concatenate([*(of for *_, of in parts), np.zeros(2 * tokens, np.uint16)])
        first = np.cumsum([0, *(of.size for *_, of in parts[:-1])])[:, None]
        ends = first + np.array([sizes for sizes, *_ in parts]).cumsum(1)
        begins = np.hstack([first, ends[:, :-1]])
        made = []
        for n, (g, by) in enumerate(zip(self._groups, j, strict=True)):
            out, states = np.empty((g.mean.size, tokens), dtype), np.stack([states[n] for _, states, _ in parts])
            of_words = begins[:, n].copy(), ends[:, n].copy(), words
            tables, numbers = (_coder(levels.base).decoding, levels.edges()), _numbers(len(bodies) - 1, by, k)
            _check_end(kernels().read_levels(g.tables, by, *tables, states, *of_words, *numbers, out))
            made.append(out)
        return made

    # -- the last refinement ------------------------------------------------------------------------------

    @cached_property
    def _errors(self) -> tuple[Whole, Whole]:
        """`Group.errors` as [layers, vectors, head_dim], and `Group.points` as [layers, vectors].

        A vector is a head's keys or values.
        """
        layers, *_, dim = self._shape
        errors = self.ungrouped([g.errors[None].astype(np.int64) for g in self._groups])
        points = self.ungrouped([g.points(self._shape[1])[None] for g in self._groups])
        return errors.reshape(layers, -1, dim), np.ascontiguousarray(points.reshape(layers, -1, dim)[..., 0])

    def _near(self, told: Sequence[Any], positions: Positions) -> Any:
        """Predict the exact numbers, in units of 2**-points, [layers, vectors, tokens, head_dim].

        Returns None if a sum may reach 2**53. Smaller sums of whole numbers are exact in float64, in any order. told:
        decoded components at the finest lossy level, see `places`.
        """
        rows = []
        for of, (matrix, mean, most) in zip(told, self._wholes, strict=True):
            if np.abs(of).max() * most + np.abs(mean).max() >= 2**53:
                return None
            rows.append((of.T @ matrix + mean).astype(np.int64) >> 12)
        x = self.ungrouped(rows)
        if self._rope is not None:
            first, second = self._rope.pairs
            angles = positions[:, None] * np.array(self._rope.frequencies)
            cos, sin = (np.rint(f(angles) * self._rope.scale * 2**TURN).astype(np.int64) for f in (np.cos, np.sin))
            keys, turned = x[:, 0].copy(), x[:, 0]
            turned[first] = (keys[first] * cos - keys[second] * sin) >> TURN
            turned[second] = (keys[second] * cos + keys[first] * sin) >> TURN
        return x.reshape(len(x), -1, *x.shape[-2:])

    @cached_property
    def _wholes(self) -> list[tuple[Any, Any, float]]:
        """Inverse and mean of each group as whole numbers, and the largest sum of magnitudes in an inverse's column."""
        made = []
        for g in self._groups:
            unit = np.ldexp(1.0, g.points(self._shape[1]) + 12)
            matrix = np.rint(g.transform.astype(np.float64) * (g.scale * unit / (levels.FINE * 256)))
            made.append((matrix, np.rint(g.mean * unit), float(np.abs(matrix).sum(0).max())))
        return made

    def _arguments(self, near: Any, j: Sequence[Whole], k: int) -> list[tuple[Any, ...]]:
        """Return each layer's arguments of `write_exact` and `read_exact`: predicted numbers, errors, j + k, points."""
        errors, points = self._errors
        rows = [np.repeat(by[:, None] + k, g.mean.size, 1) for g, by in zip(self._groups, j, strict=True)]
        by_vector = self.ungrouped(rows)[..., 0].reshape(len(near), -1, near.shape[2])
        return list(zip(near, errors, np.ascontiguousarray(by_vector), points, strict=True))

    def _exact(
        self, x: Numbers, q: Sequence[Any], j: Sequence[Whole], k: int, section: Section, positions: Positions
    ) -> ByteArray:
        told = [places(g, of, by, k, EXACT - 1) for g, of, by in zip(self._groups, q, j, strict=True)]
        near = self._near(told, positions) if _is_coded(section.dtype) else None
        raw: ByteArray = np.concatenate([np.zeros(START, np.uint8), np.ascontiguousarray(x).reshape(-1).view(np.uint8)])
        if near is None:
            return raw
        bits = np.ascontiguousarray(x.reshape(-1, *section.shape[-4:]).swapaxes(0, 1)).reshape(near.shape)
        arguments = self._arguments(near, j, k)
        rows = _fp8_rows(bits, arguments, section.dtype) if section.dtype.is_fp8 else _bf16_rows(bits, arguments)
        if rows is None:
            return raw
        coded: ByteArray = np.concatenate([np.frombuffer(b"\1\0\0\0" + checksum(bits), np.uint8), rows])
        return min(coded, raw, key=len)

    def _exactly(
        self, body: ByteArray, told: Sequence[Any], j: Sequence[Whole], k: int, section: Section, positions: Positions
    ) -> Numbers:
        if body[:START].tolist() == [0, 0, 0, 0] and body.size == body_nbytes(self._raw(section)):
            return body[START : self._raw(section)].copy().view(section.dtype.numpy).reshape(section.shape)
        near = self._near(told, positions)
        if body[:START].tolist() != [1, 0, 0, 0] or near is None or not _is_coded(section.dtype):
            raise DamagedError(f"the last refinement begins with {body[:START].tobytes().hex()}, which cannot be.")
        rows, arguments = body[START + 8 :], self._arguments(near, j, k)
        bits = _fp8_of(rows, arguments, section.dtype) if section.dtype.is_fp8 else _bf16_of(rows, arguments)
        if body[START : START + 8].tobytes() != checksum(bits):
            raise DamagedError("exact numbers are not those that were encoded.")
        return _sections(bits.reshape(self._shape[0], self._shape[1], -1, *bits.shape[-2:]), section)


def _is_coded(dtype: Dtype) -> bool:
    """True if the last refinement encodes numbers of this dtype. Others it holds as they are."""
    return dtype is Dtype.BFLOAT16 or dtype.is_fp8


def _bf16_rows(bits: Any, arguments: Sequence[tuple[Any, ...]]) -> ByteArray | None:
    """Return each layer's row of bf16 numbers; None if a number is too far from its prediction.

    bits: [layers, vectors, tokens, head_dim]. arguments: see `KltCodec._arguments`.
    """
    made = []
    for of, given in zip(bits, arguments, strict=True):
        states, words = np.empty(streams_of(of.size), np.uint32), np.empty(5 * of.size, np.uint16)
        at = kernels().write_exact(of, *given, _coder(levels.cells).encoding, states, words)
        if at < 0:
            return None
        made.append((states, words[at:]))
    return _joined(made)


def _bf16_of(rows: ByteArray, arguments: Sequence[tuple[Any, ...]]) -> Any:
    """Undo `_bf16_rows`. Raises SizeError, DamagedError."""
    bits = np.empty((len(arguments), *arguments[0][0].shape), np.uint16)
    sizes, states, words = _parted(rows, [streams_of(of.size) for of in bits])
    for of, given, *part in zip(bits, arguments, states, np.split(words, np.cumsum(sizes)[:-1]), strict=True):
        _check_end(kernels().read_exact(of, *given, _coder(levels.cells).decoding, *part))
    return bits


def _fp8_rows(bits: Any, arguments: Sequence[tuple[Any, ...]], dtype: Dtype) -> ByteArray:
    """Return the count of bytes that follow, u32, and rows of `Coder`. See `_bf16_rows`."""
    expected, rows = _expected_fp8(arguments, dtype)
    out = np.empty(4 + rows.front + 4 * bits.size, np.uint8)  # a number takes two words at most
    distances = (fp8_ranks(bits) - expected).astype(np.int16).ravel()
    _, nbytes = _coder(family).write(distances, lambda _: rows, out[4:])
    out[:4] = np.array([nbytes], "<u4").view(np.uint8)
    return out[: 4 + nbytes]


def _fp8_of(rows: ByteArray, arguments: Sequence[tuple[Any, ...]], dtype: Dtype) -> Any:
    """Undo `_fp8_rows`. Raises SizeError, DamagedError."""
    expected, layout = _expected_fp8(arguments, dtype)
    nbytes = int.from_bytes(rows[:4].tobytes(), "little")
    distances = _coder(family).read(rows[4 : 4 + nbytes], layout)
    return fp8_of_ranks(expected + distances.reshape(expected.shape))


def _expected_fp8(arguments: Sequence[tuple[Any, ...]], dtype: Dtype) -> tuple[Whole, Rows]:
    """Return the ranks of the predicted fp8 numbers, [layers, vectors, tokens, head_dim], and the layout of the rows.

    Each number is a component of its row, because each has its own table.
    """
    near, errors, shifts, points = (np.stack(of) for of in zip(*arguments, strict=True))
    points = points[:, :, None, None]
    expected = as_numbers(np.ldexp(near.astype(np.float64), -points).astype(np.float32), dtype)
    thirds = errors[:, :, None] + shifts[..., None] - OCTAVE * (fp8_steps(expected, dtype) + points)
    tables = np.clip(thirds + FP8_WIDER + FP8_FIRST, 0, len(DEVIATIONS) - 1) + FP8_SHAPE * len(DEVIATIONS)
    return fp8_ranks(expected), Rows(tables.astype(np.uint8).reshape(len(near), -1), 1, streams_of(near[0].size))


def features(x: Floats, group: Any, head_dim: int) -> Floats:
    """Return the features from which a regression gives j, [tokens, C + C / head_dim + 1].

    group: has `center` and `deviations`, as `Group` has.
    """
    z = (x - group.center) / group.deviations
    energies = np.square(z.reshape(len(z), -1, head_dim)).mean(2)
    made: Floats = np.concatenate([z, np.log(energies + 1e-3), np.ones((len(z), 1))], 1).astype(np.float32)
    return made


def shifts_of(group: Group, x: Floats) -> Whole:
    """Return j of each token, [tokens]."""
    told = features(x, group, group.head_dim) @ group.weigher
    made: Whole = np.nan_to_num(np.clip(np.rint(told), LEAST_J, END_J - 1)).astype(np.int64)
    return made


def finest(y: Any, shifts: Whole) -> Any:
    """Return the finest lossy level's numbers, int16 [C, tokens]; None if a number takes more than 16 bits.

    y: components [tokens, C]. shifts: j + k, [tokens].
    """
    q = np.rint(y * (256 / SCALES[shifts - LEAST_J]).astype(np.float32)[:, None])
    return np.ascontiguousarray(q.T.astype(np.int16)) if (np.abs(q) <= FURTHEST).all() else None


def places(group: Group, q: Any, j: Whole, k: int, level: int) -> Any:
    """Return components decoded from a level's q, float64 [C, tokens], in 1 / (256 * FINE) of the step at j + k = 0."""
    made = np.empty(q.shape)
    kernels().places(q, group.tables, j, *_numbers(level, j, k), made)
    return made


def _numbers(level: int, j: Whole, k: int) -> tuple[int, Any, Whole]:
    """Return the kernels' arguments at a level.

    They are the step and the decoded positions in intervals, both in units of 1 / FINE, and a factor for each token.
    """
    return levels.STEPS[level] * levels.FINE, levels.centres()[level], SCALES[j + k - LEAST_J]


def written(groups: Sequence[Group], q: Sequence[Any], j: Sequence[Whole], level: int) -> ByteArray:
    """Return the encoded rows of a level. q: the groups' numbers of the finest lossy level."""
    made = []
    for g, of, by in zip(groups, q, j, strict=True):
        states, words = np.empty(streams_of(of.size), np.uint32), np.empty(2 * of.size, np.uint16)
        tables = _coder(levels.base).encoding, levels.parts()[max(level - 1, 0)]
        made.append((states, words[kernels().write_level(of, g.tables, by, level, *tables, states, words) :]))
    return _joined(made)


def _sections(x: Any, section: Section) -> Numbers:
    """Return numbers [layers, kinds, heads, tokens, head_dim] in the section's order."""
    return np.ascontiguousarray(x.swapaxes(0, 1)).reshape(section.shape)


def front(groups: Sequence[Group], tokens: int) -> int:
    """Return the bytes of a base's or refinement's rows without words, plus REFINEMENT."""
    return sum(4 + 4 * streams_of(g.mean.size * tokens) for g in groups) + REFINEMENT


def streams_of(numbers: int) -> int:
    """Number of streams of a row of `numbers` numbers: a power of 2, at most STREAMS_MAX."""
    return min(STREAMS_MAX, 1 << (numbers // STREAM_NUMBERS).bit_length())


def _joined(made: Sequence[tuple[Any, Any]]) -> ByteArray:
    sizes = np.array([words.size for _, words in made], "<u4")
    parts = [sizes, *(states.astype("<u4") for states, _ in made), *(words.astype("<u2") for _, words in made)]
    return np.concatenate([part.view(np.uint8) for part in parts])


def _parted(body: ByteArray, streams: Sequence[int]) -> tuple[Any, list[Any], Any]:
    """Undo `_joined`. Returns each row's count of words, each row's states, and all words.

    Raises SizeError, DamagedError.
    """
    begin = 4 * (len(streams) + sum(streams))
    if body.size < begin or (body.size - begin) % 2:
        raise SizeError(f"{body.size} bytes are not {len(streams)} entropy-coded rows: {begin} and words are.")
    numbers, words = body[:begin].copy().view("<u4").astype(np.uint32), body[begin:].copy().view("<u2")
    sizes, states = numbers[: len(streams)].astype(np.int64), numbers[len(streams) :]
    end = int(sizes.sum())
    if end > words.size or words[end:].any() or (states < LOWEST).any():
        raise DamagedError("entropy-coded numbers have lengths or states that no encoder writes.")
    return sizes, np.split(states, np.cumsum(streams)[:-1]), words[:end].astype(np.uint16, copy=False)


def _check_end(good: bool) -> None:
    if not good:
        raise DamagedError("entropy-coded numbers do not end where they should: the block is damaged.")


@cache
def _coder(frequencies: Callable[[], npt.NDArray[np.uint16]]) -> Coder:
    return Coder(frequencies())
