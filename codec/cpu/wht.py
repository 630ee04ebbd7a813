"""Sections rotated, rounded to steps and entropy-coded; see `manthan.codec.wht`."""

from functools import cached_property, lru_cache
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from manthan.codec.base import Codes, Numbers, Positions, Section, SectionCodec, SectionKind, check_head_dim
from manthan.codec.centred import STEP_END, Mean, from_bytes, halves, to_bytes
from manthan.codec.cpu import plain_wht
from manthan.codec.cpu.centred import CentredSections
from manthan.codec.cpu.centring import _codes, _pack, _unpack
from manthan.codec.cpu.numbers import as_floats, as_numbers
from manthan.codec.cpu.rans import Coder, Rows, streams_of
from manthan.codec.cpu.rows import front, parse, row_front, write
from manthan.codec.errors import DamagedError, NonFiniteError, SizeError
from manthan.codec.rope import Floats, Rope
from manthan.codec.tables.constants import LARGEST_BF16
from manthan.codec.tables.constants import tables as constants
from manthan.codec.tables.frequencies import UNIT, expected, family
from manthan.codec.wht import (
    CENTRED,
    CODED,
    FALLBACK,
    FINEST,
    LIMIT,
    LIMIT_BITS,
    MEAN_BITS,
    MOST_STEPS,
    NAME,
    PRESETS,
    ROW_STEP_END,
    SLACK,
    START,
    TABLES,
    VERSION,
    Parts,
    Preset,
    table_numbers,
)

FIRST_NORMAL = np.float32(2.0**-126)
FINITE_STEPS = 0x7F80
"""bf16 bits of infinity: a step is below it."""
MEAN = Mean.of(MEAN_BITS)
NO_ROPE = Rope(())
Integers = npt.NDArray[np.int16]


class WhtSections(SectionCodec):
    """rope: how the model turns its keys; with None, they are coded as they are.

    fused: True for the numba kernels, False for plain numpy, None for whichever is there. Raises HeadDimError.
    """

    varies = True

    def __init__(
        self, head_dim: int, rope: Rope | None = None, preset: Preset = PRESETS[NAME], *, fused: bool | None = None
    ) -> None:
        check_head_dim(head_dim)
        self.name, self._preset = preset.name, preset
        self._rope, self._order = rope or NO_ROPE, halves(rope, head_dim)
        self.head_dim = head_dim
        self._constants = constants(head_dim, FALLBACK.key_bits, True)
        self._fallback = CentredSections(FALLBACK, head_dim, rope, fused=fused)
        self._fused = fused

    def warm_up(self) -> None:
        self._fallback.warm_up()
        self._coder.warm_up()
        self._kernels()

    def max_nbytes(self, section: Section) -> int:
        times, of = SLACK
        likely = -(-self.expected_nbytes(section) * times // of)
        return max(likely, START + self._fallback.max_nbytes(section))

    def expected_nbytes(self, section: Section) -> int:
        parts, numbers = Parts.of(section), section.tokens * section.heads * section.head_dim
        steps = {SectionKind.KEYS: self._preset.key_step, SectionKind.VALUES: self._preset.value_step}
        bits = sum(_expected(float(steps[kind])) for kind in parts.kinds)
        rows = parts.rows * len(parts.kinds)
        return parts.end + rows * row_front(numbers) + -(-parts.rows * numbers * bits // (8 * UNIT))

    def encode(self, x: Numbers, section: Section, positions: Positions, out: Codes) -> int:
        """Raises NonFiniteError, for numbers of 2**LIMIT and more too."""
        self._check(x, section)
        parts = Parts.of(section)
        runs = x.reshape(len(parts.kinds), parts.runs, section.tokens, section.head_dim)
        wide = runs.astype(np.float32) if runs.dtype == np.float16 else runs
        limit = self.max_nbytes(section)
        out[:START] = (VERSION, CODED, 0, 0)
        numbers = [
            self._keys(each, section, positions, parts, out)
            if kind is SectionKind.KEYS
            else self._values(each, parts, out)
            for kind, each in zip(parts.kinds, wide, strict=True)
        ]
        whole = np.concatenate(numbers)
        out[parts.tables] = table_numbers(_squares(whole), section.tokens * section.head_dim)
        out[parts.tables.stop : parts.end] = 0
        rows = _rows(out[parts.tables], section)
        coded = self._coder.encode(whole.ravel(), rows, max(0, limit - parts.end - front(rows)) // 2)
        if coded is not None:
            return parts.end + write(coded, rows, out[parts.end : limit])
        out[1] = CENTRED
        end = START + self._fallback.max_nbytes(section)
        return START + self._fallback.encode(x, section, positions, out[START:end])

    def decode(self, codes: Codes, section: Section, positions: Positions) -> Numbers:
        """Raises SizeError, DamagedError; NonFiniteError for a scale or a step that no encoder writes."""
        limit, parts = self.max_nbytes(section), Parts.of(section)
        if not START <= codes.size <= limit:
            raise SizeError(f"{codes.size} bytes are not the codes of {section}: {START} to {limit} are.")
        form = tuple(codes[:START])
        if form == (VERSION, CENTRED, 0, 0):
            return self._fallback.decode(codes[START:].copy(), section, positions)
        if form != (VERSION, CODED, 0, 0):
            raise DamagedError(
                f"codes of {section.codec} begin with {codes[:START].tobytes().hex()}: 02000000 or 02010000 do."
            )
        if codes.size < parts.end:
            raise SizeError(f"{codes.size} bytes are not the codes of {section}: {parts.end} are ahead of its numbers.")
        if not np.isin(codes[parts.tables], TABLES).all():
            raise DamagedError("a table of frequencies has a number that no encoder writes: the codes are damaged.")
        rows = _rows(codes[parts.tables], section)
        whole = self._coder.decode(parse(codes[parts.end :], rows), rows)
        shape = (len(parts.kinds), parts.runs, section.head_dim, section.tokens)
        made = [
            self._keys_back(q, section, positions, parts, codes)
            if kind is SectionKind.KEYS
            else self._values_back(q, section, parts, codes)
            for kind, q in zip(parts.kinds, whole.reshape(shape), strict=True)
        ]
        return np.stack(made).reshape(section.shape)

    def _keys(self, x: Numbers, section: Section, positions: Positions, parts: Parts, out: Codes) -> Integers:
        """Of all runs, [runs, head_dim, tokens]; steps and means are written."""
        kernels, bf16 = self._kernels(), x.dtype == np.uint16
        ordered = np.require(x if self._order is None else x[:, :, self._order], requirements=["C", "A"])
        words = ordered if bf16 else ordered.view(np.uint32)
        y, _ = self._rotated(kernels.turned_back(words, bf16, *self._rope.tables(positions)))
        average = _over_tokens(y) * np.float32(1 / section.tokens)
        rounded = _bf16(np.abs(average).max(axis=1) * MEAN.inverse)
        mean_steps = np.where(rounded < 1 << 7, 0, rounded).astype(np.uint16)
        code = _codes(average, mean_steps, MEAN)
        out[parts.steps], out[parts.means] = mean_steps.astype("<u2").view(np.uint8), _pack(code, MEAN_BITS).ravel()
        means = code * _wide(mean_steps)[:, None]
        total = _fold(kernels.energies(y, means).reshape(section.layers, -1))
        numbers = section.heads * section.tokens * section.head_dim
        least = _wide(mean_steps.reshape(section.layers, -1).max(axis=1)) * FINEST
        row_steps = _coarse(np.maximum(np.sqrt(total * np.float32(1 / numbers)) * self._preset.key_step, least))
        out[parts.row_steps] = row_steps.astype("<u2").view(np.uint8)
        steps = np.repeat(_wide(row_steps), section.heads)
        return _divided(y, steps[:, None, None], _whole_means(means, steps) * steps[:, None])

    def _values(self, x: Numbers, parts: Parts, out: Codes) -> Integers:
        y, energies = self._rotated(as_floats(x))
        q = _divided(y.copy(), (np.sqrt(energies) * self._constants.root * self._preset.value_step)[:, None, :])
        steps = energies / np.maximum(self._kernels().products(y, q), FIRST_NORMAL)
        out[parts.scales] = to_bytes(_bf16(steps).astype(np.uint16)).ravel()
        return q

    def _keys_back(self, q: Integers, section: Section, positions: Positions, parts: Parts, codes: Codes) -> Numbers:
        kernels, mean_steps, rounded = (
            self._kernels(),
            codes[parts.steps].view("<u2"),
            codes[parts.row_steps].view("<u2"),
        )
        bad = mean_steps >= STEP_END
        if bad.any():
            run = int(bad.argmax())
            raise NonFiniteError(f"the mean of run {run} is not finite, or too large: the codes are damaged.", run)
        _check_steps(rounded, ROW_STEP_END)
        steps = np.repeat(_wide(rounded), section.heads)
        code = _unpack(codes[parts.means].reshape(parts.runs, MEAN_BITS, -1), MEAN_BITS)
        whole = _whole_means(code * _wide(mean_steps)[:, None], steps).astype(np.int16)
        q = q + whole[:, :, None]
        of_tokens = np.ascontiguousarray(np.broadcast_to(steps[:, None], (parts.runs, section.tokens)))
        x = kernels.unrotated(q, of_tokens, self._constants.weights, self._constants.blocks)
        dtype = np.uint16 if section.dtype.numpy == np.uint16 else np.float32
        made: Numbers = np.empty(x.shape, dtype)
        words = made if dtype is np.uint16 else made.view(np.uint32)
        kernels.turned(x, *self._rope.tables(positions), dtype is np.uint16, LARGEST_BF16, words)
        if self._order is not None:
            ordered, made = made, np.empty_like(made)
            made[:, :, self._order] = ordered
        return made if dtype == section.dtype.numpy else as_numbers(made, section.dtype)

    def _values_back(self, q: Integers, section: Section, parts: Parts, codes: Codes) -> Numbers:
        scales = from_bytes(codes[parts.scales].reshape(parts.runs, 1 + section.tokens))
        _check_steps(scales)
        x = self._kernels().unrotated(q, _wide(scales), self._constants.weights, self._constants.blocks)
        x += np.float32(0)  # no negative zeros
        return as_numbers(x, section.dtype)

    def _rotated(self, x: Floats) -> tuple[Floats, Floats]:
        """[runs, tokens, head_dim] to [runs, head_dim, tokens], and the energy of each vector, [runs, tokens]."""
        return self._kernels().rotated(x, self._constants.weights, self._constants.blocks)  # type: ignore[no-any-return]

    def _check(self, x: Numbers, section: Section) -> None:
        bits: Any = x.view(np.uint16 if x.dtype.itemsize == 2 else np.uint32)
        sign = np.iinfo(bits.dtype).max >> 1
        limit = {np.uint16: LIMIT_BITS >> 16, np.float32: LIMIT_BITS, np.float16: 0x7C00}[x.dtype.type]
        large = (bits & bits.dtype.type(sign)) >= limit
        if large.any():
            bad = int(large.reshape(-1, section.head_dim).any(1).argmax())
            raise NonFiniteError(
                f"vector {bad} holds a NaN, an infinity or a number of 2**{LIMIT} and more, and cannot be encoded.", bad
            )

    @cached_property
    def _coder(self) -> Coder:
        return Coder(family(), fused=self._fused)

    def _kernels(self) -> ModuleType:
        return plain_wht if self._fused is False else _numba_wht() or plain_wht


@lru_cache
def _numba_wht() -> ModuleType | None:
    try:
        from manthan.codec.cpu import numba_wht
    except ImportError:
        return None
    return numba_wht


@lru_cache
def _expected(step: float) -> int:
    """UNITs of a bit that a number takes on average."""
    table = table_numbers(np.array([round(1e6 / step**2)]), 10**6)
    return int(expected(family())[table[0]])


def _rows(tables: Codes, section: Section) -> Rows:
    """tables: of each run."""
    size = section.heads * section.head_dim
    count = len(tables) // section.heads
    streams = streams_of(section.tokens * size)
    return Rows(np.full(count, size, np.int64), np.repeat(tables, section.head_dim), section.tokens, streams)


def _squares(numbers: Integers) -> npt.NDArray[np.int64]:
    """Of each run."""
    rows = numbers.reshape(len(numbers), -1).astype(np.float64)
    made: npt.NDArray[np.int64] = np.einsum("rn,rn->r", rows, rows).astype(np.int64)  # exact: below 2**53
    return made


def _divided(y: Floats, steps: Floats, less: Floats | None = None) -> Integers:
    """Whole steps of what is left of [runs, head_dim, tokens] without `less`, [runs, head_dim]; 0 where the step is
    none. Overwrites y."""
    if less is not None:
        y -= less[:, :, None]
    normal = steps >= FIRST_NORMAL
    y /= np.where(normal, steps, np.float32(1))
    np.rint(y, out=y)
    y *= normal
    return y.astype(np.int16)


def _whole_means(means: Floats, steps: Floats) -> Floats:
    """Means [runs, head_dim] in whole steps of their run."""
    normal = (steps >= FIRST_NORMAL)[:, None]
    with np.errstate(over="ignore"):
        whole: Floats = np.rint(means / np.where(normal, steps[:, None], np.float32(1)))
    np.clip(whole, -MOST_STEPS, MOST_STEPS, out=whole)
    whole *= normal
    return whole


def _over_tokens(y: Floats) -> Floats:
    """Sums of [runs, head_dim, tokens] in the order that the format prescribes."""
    sums = np.zeros((*y.shape[:2], 8), np.float32)
    for first in range(0, y.shape[2], 8):
        eight = y[:, :, first : first + 8]
        sums[:, :, : eight.shape[2]] += eight
    for half in (4, 2, 1):
        sums[:, :, :half] += sums[:, :, half : 2 * half]
    return sums[:, :, 0]


def _coarse(x: Floats) -> npt.NDArray[np.uint32]:
    """The nearest bf16 bits with two bits of mantissa, ties to even."""
    words = np.ascontiguousarray(x).view(np.uint32)
    return (words + np.uint32(0xFFFFF) + ((words >> np.uint32(21)) & np.uint32(1))) >> np.uint32(21) << np.uint32(5)


def _fold(rows: Floats) -> Floats:
    """The sum of each row's numbers: the upper half onto the lower, until one is left. Overwrites rows."""
    n = rows.shape[1]
    while n > 1:
        half = (n + 1) // 2
        rows[:, : n - half] += rows[:, half:n]
        n = half
    total: Floats = rows[:, 0]
    return total


def _bf16(x: Floats) -> npt.NDArray[np.uint32]:
    """The nearest bits, ties to even."""
    words = np.ascontiguousarray(x).view(np.uint32)
    return (words + np.uint32(0x7FFF) + ((words >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)


def _wide(bf16: npt.NDArray[np.unsignedinteger]) -> Floats:
    made: Floats = (bf16.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return made


def _check_steps(bf16: npt.NDArray[np.unsignedinteger], end: int = FINITE_STEPS) -> None:
    """Raise NonFiniteError for one that is not finite, or negative. end: bits that are too large."""
    bad = bf16 >= end
    if bad.any():
        at = int(bad.argmax())
        raise NonFiniteError(f"step {at} is not finite, or too large: the codes are damaged.", at)
