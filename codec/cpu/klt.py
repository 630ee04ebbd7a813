"""Sections in a calibrated codec: keys before RoPE and values, to the components of their model's profile, rounded to
steps, entropy-coded.

Transform coding of the KV cache (Karhunen and Loeve's transform with a calibrated mean: Staniszewski and Lancucki,
"KV Cache Transform Coding", 2025). The numbers of a token, all heads of a layer side by side, are a vector x:

    keys: x is turned back to place 0; values: x is as it is
    q = rint((x - mean) @ (forward / step));   x^ = q @ (step * inverse) + mean

in float32. Products of matrices round as the machine's BLAS does: where it differs, an encoder may round another way to
q what lies half-way between two steps, and a decoder's numbers differ by 2**-20 or so of their size, before they are
rounded to bf16. The integers are the same everywhere.

Codes, little-endian. A row is a layer's keys or values, [C, tokens]; of keys and values together, keys come first:

    | version u8, 1 | form u8 | 2 zero bytes | words of each row | states of each row's streams, u32 | words, u16 |

Words of a row are u16, or u32 where a section is so large that they might not fit. Form 0 is this; form 1, for numbers
so far from the profile's that this would be longer, is the section's numbers as they are behind the first 4 bytes: the
most that a section takes is known.
"""

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from manthan.codec.base import Codes, Numbers, Positions, Section, SectionCodec, SectionKind, check_head_dim
from manthan.codec.cpu.numbers import as_floats, as_numbers
from manthan.codec.cpu.rans import Coded, Coder, Rows, streams_of
from manthan.codec.errors import DamagedError, NonFiniteError, ProfileError, SizeError
from manthan.codec.profile import Basis, Profile
from manthan.codec.rope import Rope

VERSION, CODED, RAW = 1, 0, 1
START = 4
FURTHEST = 32767
WORDS_A_NUMBER = 28 / 16
"""At most: 12 bits for the escape, and 16 behind it."""

Floats = npt.NDArray[np.float32]


class _Step:
    """One basis at one preset. forward, inverse: [C, C], with the step in them."""

    def __init__(self, basis: Basis, preset: str) -> None:
        step, self.tables = np.float32(basis.steps[preset]), basis.tables[preset]
        self.mean = basis.mean
        self.forward = basis.forward / step
        self.inverse = basis.inverse * step

    def rounded(self, x: Floats) -> Floats:
        """[tokens, C] to [C, tokens]."""
        with np.errstate(over="ignore", invalid="ignore"):
            made: Floats = np.rint(((x - self.mean) @ self.forward).T)
        return made

    def back(self, q: npt.NDArray[np.int16]) -> Floats:
        """[C, tokens] to [tokens, C]."""
        made: Floats = q.T.astype(np.float32) @ self.inverse + self.mean
        return made


class KltSections(SectionCodec):
    """profile: of the section's layers and the rank's heads. rope: the model's; it must be the profile's.

    Raises ProfileError for a profile that does not fit. fused: see `Coder`.
    """

    def __init__(
        self, name: str, head_dim: int, profile: Profile, rope: Rope | None, *, fused: bool | None = None
    ) -> None:
        check_head_dim(head_dim)
        self.name = name
        self._profile, self._rope, self._head_dim = profile, profile.info.rope, head_dim
        _check(name, head_dim, profile, rope)
        self._coder = Coder(profile.frequencies, fused=fused)

    def warm_up(self) -> None:
        self._coder.warm_up()
        _ = self._steps

    @cached_property
    def _steps(self) -> dict[SectionKind, tuple[_Step, ...]]:
        layers = self._profile.layers
        keys = tuple(_Step(layer.keys, self.name) for layer in layers)
        values = tuple(_Step(layer.values, self.name) for layer in layers)
        return {SectionKind.KEYS: keys, SectionKind.VALUES: values, SectionKind.BOTH: keys + values}

    def max_nbytes(self, section: Section) -> int:
        return START + math.prod(section.shape) * section.dtype.numpy.itemsize

    def encode(self, x: Numbers, section: Section, positions: Positions, out: Codes) -> int:
        steps = self._of(section)
        vectors = as_floats(x)
        if not np.isfinite(vectors).all():
            bad = int(np.argmin(np.isfinite(vectors).reshape(-1, section.head_dim).all(1)))
            raise NonFiniteError(f"vector {bad} holds a NaN or an infinity and cannot be encoded.", bad)
        numbers = self._numbers(vectors, section, positions, steps)
        rows = _rows(section, steps)
        most = (self.max_nbytes(section) - _front(section, rows)) // 2
        coded = self._coder.encode(numbers, rows, most) if numbers is not None and most > 0 else None
        out[:START] = (VERSION, CODED if coded else RAW, 0, 0)
        if coded is None:
            return _write(out, x)
        sizes = coded.sizes.astype(_size_dtype(section))
        return _write(out, sizes, coded.states.astype("<u4"), coded.words.astype("<u2", copy=False))

    def decode(self, codes: Codes, section: Section, positions: Positions) -> Numbers:
        """Raises SizeError, DamagedError."""
        if not START <= codes.size <= self.max_nbytes(section):
            raise SizeError(
                f"{codes.size} bytes are not the codes of {section}: {START} to {self.max_nbytes(section)} are."
            )
        form = codes[1]
        if tuple(codes[:START]) not in ((VERSION, CODED, 0, 0), (VERSION, RAW, 0, 0)):
            raise DamagedError(
                f"codes of {section.codec} begin with {codes[:START].tobytes().hex()}: 01000000 or 01010000 do."
            )
        steps = self._of(section)
        if form == RAW:
            return self._raw(codes, section)
        rows = _rows(section, steps)
        numbers = self._coder.decode(_parse(codes, section, rows), rows)
        return as_numbers(self._vectors(numbers, section, positions, steps), section.dtype)

    def _of(self, section: Section) -> Sequence[_Step]:
        """A step for each row of the section. Raises SizeError for one that the profile is not of."""
        found, layers = self._steps.get(section.kind, ()), len(self._profile.layers)
        size = section.heads * section.head_dim
        last = section.first_layer + section.layers
        if not found or last > layers or found[0].mean.size != size or section.head_dim != self._head_dim:
            raise SizeError(f"{section} is not of the profile of {self._profile.info.model}, {layers} layers.")
        starts = range(0, len(found), layers)
        return [step for start in starts for step in found[start + section.first_layer : start + last]]

    def _numbers(
        self, x: Floats, section: Section, positions: Positions, steps: Sequence[_Step]
    ) -> npt.NDArray[np.int16] | None:
        """Row by row [C, tokens]; None where one cannot be written as an int16."""
        parts = x.reshape(-1, section.layers, *x.shape[-3:])
        if section.kind is not SectionKind.VALUES and self._rope is not None:
            with np.errstate(over="ignore", invalid="ignore"):
                turned = self._rope.turn_back(parts[0], positions)
            parts = np.concatenate([turned[None], parts[1:]])
        vectors = parts.transpose(0, 1, 3, 2, 4).reshape(len(steps), section.tokens, -1)
        rounded = [step.rounded(row).ravel() for step, row in zip(steps, vectors, strict=True)]
        flat = np.concatenate(rounded)
        return flat.astype(np.int16) if np.abs(flat).max(initial=0) <= FURTHEST else None

    def _vectors(
        self, numbers: npt.NDArray[np.int16], section: Section, positions: Positions, steps: Sequence[_Step]
    ) -> Floats:
        shape = (len(steps), section.tokens, section.heads * section.head_dim)
        rows = np.empty(shape, np.float32)
        at = 0
        for row, step in zip(rows, steps, strict=True):
            end = at + len(step.tables) * section.tokens
            row[...] = step.back(numbers[at:end].reshape(-1, section.tokens))
            at = end
        heads = rows.reshape(-1, section.layers, section.tokens, section.heads, section.head_dim)
        x = np.ascontiguousarray(heads.transpose(0, 1, 3, 2, 4))
        if section.kind is not SectionKind.VALUES and self._rope is not None:
            x[0] = self._rope.turn(x[0], positions)
        return x.reshape(section.shape)

    def _raw(self, codes: Codes, section: Section) -> Numbers:
        if codes.size != self.max_nbytes(section):
            raise SizeError(f"{codes.size} bytes are not {section.shape} in {section.dtype.name} behind {START} bytes.")
        return codes[START:].copy().view(section.dtype.numpy).reshape(section.shape)


def _check(name: str, head_dim: int, profile: Profile, rope: Rope | None) -> None:
    info = profile.info
    if name not in info.ratios:
        raise ProfileError(f"the profile of {info.model} has no {name}: it has {', '.join(info.ratios) or 'none'}.")
    if head_dim != info.head_dim:
        raise ProfileError(f"the profile of {info.model} is for heads of {info.head_dim} numbers, not {head_dim}.")
    if not _same(info.rope, rope):
        raise ProfileError(
            f"the profile of {info.model} was made for another RoPE than the model has: calibrate it again."
        )
    _ = profile.layers


def _same(one: Rope | None, other: Rope | None) -> bool:
    """But for how frequencies were rounded."""
    if one is None or other is None:
        return one is other
    alike = (one.interleaved, len(one.frequencies)) == (other.interleaved, len(other.frequencies))
    return alike and bool(
        np.allclose((*one.frequencies, one.scale), (*other.frequencies, other.scale), rtol=1e-5, atol=0)
    )


def _rows(section: Section, steps: Sequence[_Step]) -> Rows:
    components = np.array([len(step.tables) for step in steps], np.int64)
    streams = streams_of(section.tokens * section.heads * section.head_dim)
    return Rows(components, np.concatenate([step.tables for step in steps]), section.tokens, streams)


def _size_dtype(section: Section) -> np.dtype[np.unsignedinteger]:
    most = section.tokens * section.heads * section.head_dim * WORDS_A_NUMBER
    return np.dtype("<u2" if most < 1 << 16 else "<u4")


def _front(section: Section, rows: Rows) -> int:
    """Bytes ahead of the words."""
    return START + len(rows.components) * (_size_dtype(section).itemsize + 4 * rows.streams)


def _write(out: Codes, *parts: npt.NDArray[np.generic]) -> int:
    at = START
    for part in parts:
        end = at + part.nbytes
        out[at:end] = np.ascontiguousarray(part).view(np.uint8).ravel()
        at = end
    return at


def _parse(codes: Codes, section: Section, rows: Rows) -> Coded:
    count, dtype, front = len(rows.components), _size_dtype(section), _front(section, rows)
    if codes.size < front or (codes.size - front) % 2:
        raise SizeError(f"{codes.size} bytes are not the codes of {section}: {front} and words of 2 bytes are.")
    at = START + count * dtype.itemsize
    sizes = codes[START:at].copy().view(dtype).astype(np.int64)
    states = codes[at:front].copy().view("<u4").reshape(count, rows.streams).astype(np.uint32)
    return Coded(states, sizes, codes[front:].copy().view("<u2").astype(np.uint16, copy=False))
