"""Calibrated codec: components by the model's profile, of keys before RoPE and of values, rounded and entropy-coded.

Transform coding of the KV cache (Karhunen and Loeve's transform with a calibrated mean: Staniszewski and Lancucki,
"KV Cache Transform Coding", 2025). The numbers of a token, all heads of a layer side by side, are a vector x:

    keys: x is turned back to position 0; values and latents: x is unchanged q = rint((x - mean) @ (forward / step)); x^
    = q @ (step * inverse) + mean

in float32. Products of matrices round like the machine's BLAS. With different BLAS, an encoder may round q differently
half-way between two steps, and a decoder's numbers differ by 2**-20 or so of their size, before the rounding to bf16.
The integers are the same everywhere.

Encoded section, little-endian. A row is a layer's keys, values or latents, [C, tokens]:

    | version u8, 1 | d u8 | 2 zero bytes | rows of `manthan.codec.cpu.rans` |

A section takes at most 1.35 times the bytes expected by the tables. Numbers further from the profile's double the steps
until the section fits, d times: q / 2**d rounded to a whole number, ties to even, is coded with the same tables, and x^
= (2**d * q) @ (step * inverse) + mean. All finite numbers fit; products are float64 if q takes more than 16 bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from manthan.codec.base import Codec, Codes, Numbers, Positions, Section, SectionKind, check_head_dim
from manthan.codec.cpu.numbers import as_floats, as_numbers, check_finite
from manthan.codec.cpu.rans import (
    FURTHEST,
    START,
    VERSION,
    Coder,
    Integers,
    Rows,
    bound,
    check_front,
    row_front,
    streams_of,
)
from manthan.codec.errors import ProfileError, SizeError
from manthan.codec.model import NO_FACTS, ModelFacts
from manthan.codec.profile import PRESETS as RATIOS
from manthan.codec.profile import Basis, Profile
from manthan.codec.rope import Rope
from manthan.codec.tables.frequencies import UNIT, expected

MOST_DOUBLINGS = 254
"""More than the largest float32 needs, by 2**100."""
LARGEST = float(np.finfo(np.float32).max)

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True)
class KltPreset:
    """Calibrated transform to uncorrelated components, a step for all of a layer's, and an entropy coder."""

    name: str
    """In the configuration, in profiles and in encoded blocks."""

    def codec(self, head_dim: int, facts: ModelFacts = NO_FACTS) -> "KltCodec":
        """Return the codec on the CPU. Raises HeadDimError, ProfileError where a profile is missing or does not fit."""
        if facts.profile is None:
            raise ProfileError(f"codec {self.name} needs a profile of the model: run `manthan calibrate MODEL`.")
        return KltCodec(self.name, head_dim, facts.profile, facts.rope)


PRESETS = {name: KltPreset(name) for name in RATIOS}


class _Bases(NamedTuple):
    """Bases of a section's rows, in steps. mean: [rows, C]. forward, inverse: [rows, C, C]. tables: uint8 [rows, C]."""

    mean: Floats
    forward: Floats
    inverse: Floats
    tables: npt.NDArray[np.uint8]

    @classmethod
    def of(cls, bases: Sequence[Basis], preset: str) -> Self:
        steps = np.array([basis.steps[preset] for basis in bases], np.float32)[:, None, None]
        forward: Floats = np.stack([basis.forward for basis in bases]) / steps
        inverse: Floats = np.stack([basis.inverse for basis in bases]) * steps
        means, tables = [basis.mean for basis in bases], [basis.tables[preset] for basis in bases]
        return cls(np.stack(means), forward, inverse, np.stack(tables))

    def rows(self, tokens: int) -> Rows:
        """Return the layout of the rows for the entropy coder."""
        count, size = self.tables.shape
        return Rows(np.full(count, size, np.int64), self.tables.ravel(), tokens, streams_of(tokens * size))

    def rounded(self, x: Floats | Doubles) -> Any:
        """Round [rows, tokens, C] to whole steps [rows, C, tokens] of the same dtype."""
        with np.errstate(over="ignore", invalid="ignore"):
            return np.rint((x - self.mean[:, None]) @ self.forward.astype(x.dtype)).transpose(0, 2, 1)

    def back(self, q: Floats, doublings: int) -> Any:
        """Undo `rounded`. Returns float64 for doubled steps, to prevent overflow."""
        made: Any = q.transpose(0, 2, 1) @ self.inverse
        if doublings:
            made = np.ldexp(made.astype(np.float64), doublings)
        made += self.mean[:, None]
        return made


class KltCodec(Codec):
    """Codec on the CPU. Raises HeadDimError; ProfileError for an unsuitable profile.

    Args:
        name: of the preset.
        head_dim: numbers of a vector.
        profile: of the section's layers and the rank's heads.
        rope: RoPE of the model, equal to the profile's.
    """

    varies = True

    def __init__(self, name: str, head_dim: int, profile: Profile, rope: Rope | None) -> None:
        check_head_dim(head_dim)
        self.name = name
        self._profile, self._rope, self._head_dim = profile, profile.info.rope, head_dim
        profile.check(name, head_dim, rope)
        kinds = [SectionKind.LATENT] if profile.info.latent else [SectionKind.KEYS, SectionKind.VALUES]
        self._of_layers = {kind: [layer.bases[n] for layer in profile.layers] for n, kind in enumerate(kinds)}
        self._coder = Coder(profile.frequencies)

    @cached_property
    def _bases(self) -> dict[SectionKind, _Bases]:
        return {kind: _Bases.of(bases, self.name) for kind, bases in self._of_layers.items()}

    def max_nbytes(self, section: Section) -> int:
        return bound(self.expected_nbytes(section))

    def expected_nbytes(self, section: Section) -> int:
        profile, size = self._profile, section.heads * section.head_dim
        shape = section.first_layer, section.layers, section.head_dim, size
        fits = shape == (0, len(profile.layers), self._head_dim, profile.layers[0].keys.mean.size)
        if not fits or section.kind not in self._of_layers:
            raise SizeError(f"{section} is not of the profile of {profile.info.model}, {len(profile.layers)} layers.")
        bits = section.tokens * self._expected[section.kind]
        return START + section.layers * row_front(section.tokens * size) + -(-bits // (8 * UNIT))

    @cached_property
    def _expected(self) -> dict[SectionKind, int]:
        """Expected size of a token's keys, and of a token's values, in UNITs of a bit."""
        table = expected(self._profile.frequencies)
        return {
            kind: sum(int(table[basis.tables[self.name]].sum()) for basis in bases)
            for kind, bases in self._of_layers.items()
        }

    def encode(self, x: Numbers, section: Section, positions: Positions, out: Codes) -> int:
        """Raises NonFiniteError."""
        limit, bases = self.max_nbytes(section), self._bases[section.kind]
        numbers, rows = self._numbers(as_floats(x), section, positions, bases), bases.rows(section.tokens)
        doublings, nbytes = self._coder.write(numbers, lambda _: rows, out[START:limit])
        out[:START] = (VERSION, doublings, 0, 0)
        return START + nbytes

    def decode(self, codes: Codes, section: Section, positions: Positions) -> Numbers:
        """Raises SizeError, DamagedError."""
        limit = self.max_nbytes(section)
        if not START <= codes.size <= limit:
            raise SizeError(f"{codes.size} bytes do not encode {section}: {START} to {limit} do.")
        doublings = check_front(codes, section.codec, MOST_DOUBLINGS)
        bases = self._bases[section.kind]
        numbers = self._coder.read(codes[START:], bases.rows(section.tokens))
        return as_numbers(self._vectors(numbers, doublings, section, positions, bases), section.dtype)

    def _numbers(self, x: Floats, section: Section, positions: Positions, bases: _Bases) -> Integers | Doubles:
        """Return whole steps of all rows; float64 beyond 16 bits. Raises NonFiniteError."""
        check_finite(x)
        rounded = bases.rounded(self._turned_back(x, section, positions))
        if (np.abs(rounded) <= FURTHEST).all():  # a NaN is not
            near: Integers = rounded.astype(np.int16, order="C").ravel()
            return near
        far: Doubles = bases.rounded(self._turned_back(x.astype(np.float64), section, positions))
        return far.ravel()

    def _turned_back(self, x: Any, section: Section, positions: Positions) -> Any:
        """Return the section's rows, [rows, tokens, C], keys turned back to position 0."""
        if section.kind is SectionKind.KEYS and self._rope is not None:
            with np.errstate(over="ignore", invalid="ignore"):
                x = self._rope.turn_back(x, positions)
        return x.transpose(0, 2, 1, 3).reshape(section.layers, section.tokens, -1)

    def _vectors(
        self, numbers: Integers, doublings: int, section: Section, positions: Positions, bases: _Bases
    ) -> Floats:
        rows = bases.back(numbers.astype(np.float32).reshape(section.layers, -1, section.tokens), doublings)
        heads = rows.reshape(section.layers, section.tokens, section.heads, section.head_dim)
        x = np.ascontiguousarray(heads.transpose(0, 2, 1, 3))
        if section.kind is SectionKind.KEYS and self._rope is not None:
            x = self._rope.turn(x, positions)
        made: Floats = np.clip(x, -LARGEST, LARGEST).astype(np.float32) if doublings else x
        return made
