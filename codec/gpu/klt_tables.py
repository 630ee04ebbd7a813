"""GPU form of a profile: transforms for the tensor cores, and tables for the entropy coder.

The transforms of a profile are fp16, with rows of length 1. They are used unchanged, and their inputs are rounded to
fp16. The inverses are rounded to fp16, each column by a separate factor. Integers up to 2,048 are exact in fp16, larger
integers to 11 bits. All sums are float32.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from manthan.codec.errors import ProfileError
from manthan.codec.profile import Basis, Profile
from manthan.codec.tables.frequencies import ESCAPE, SCALE

BUCKET = 16
"""Slots with a common entry in a table for decoding."""
ENCODING_NBYTES = 1024
"""Bytes of a table for encoding."""
ESCAPED = 1 << 31

Entries = npt.NDArray[np.uint32]
Ranks = npt.NDArray[np.uint8]


class Transforms(NamedTuple):
    """Transforms of rows, keys or latents first, then values: [rows, C] float32 and [rows, C, C] float16.

    Encoding: rint(((x - mean) * gain) @ forward). Decoding: (q @ inverse) * gain_back + mean.
    """

    mean: Tensor
    gain: Tensor
    forward: Tensor
    gain_back: Tensor
    inverse: Tensor

    @classmethod
    def of(cls, profile: Profile, preset: str, device: torch.device) -> Self:
        """Raises ProfileError for a singular transform."""
        made = [_transform(basis, preset, device) for basis in _bases(profile)]
        return cls(*(torch.stack(parts) for parts in zip(*made, strict=True)))


class RowTables(NamedTuple):
    """Tables of rows.cu, uint8: for encoding, and for decoding. of_components: offset of each component's table in
    both, in 16 bytes, int32 [2, rows, C]. pool: offset of the common ranks in the table for decoding, in bytes.
    """

    encoding: Tensor
    decoding: Tensor
    of_components: Tensor
    pool: int

    @classmethod
    def of(cls, profile: Profile, preset: str, device: torch.device) -> Self:
        """Return the tables of the preset."""
        chosen = np.stack([basis.tables[preset] for basis in _bases(profile)])
        used, which = np.unique(chosen, return_inverse=True)
        frequencies = profile.frequencies[used].astype(np.uint32)
        encoding = np.concatenate([encoding_tables(frequencies).ravel(), reciprocals()]).view(np.uint8)
        decoding, starts, pool = decoding_tables(frequencies)
        places = np.stack([np.arange(len(used)) * ENCODING_NBYTES, starts])[:, which].reshape(2, *chosen.shape) // 16
        parts = (encoding, decoding, places.astype(np.int32))
        there = [torch.from_numpy(np.ascontiguousarray(part)).to(device) for part in parts]  # kernels know no strides
        return cls(there[0], there[1], there[2], pool)


def _bases(profile: Profile) -> Sequence[Basis]:
    return [layer.bases[kind] for kind in range(len(profile.info.kinds)) for layer in profile.layers]


def _transform(basis: Basis, preset: str, device: torch.device) -> tuple[Tensor, ...]:
    mean, scale, transform = (torch.from_numpy(part).to(device) for part in (basis.mean, basis.scale, basis.transform))
    step = basis.steps[preset]
    inverse, failed = torch.linalg.inv_ex(transform.double())
    if failed or not inverse.isfinite().all():
        raise ProfileError("the profile holds a transform that cannot be undone: calibrate the model again.")
    largest = torch.exp2(torch.ceil(torch.log2(inverse.abs().amax(0))))
    gain_back = (largest * step / scale).float()
    return mean, scale / step, transform, gain_back, (inverse / largest).half()


def encoding_tables(frequencies: Entries) -> Entries:
    """Return [tables, 256]: frequency; sum of earlier frequencies << 12; ESCAPED for a symbol coded by the escape."""
    before = np.cumsum(frequencies, axis=1, dtype=np.uint32) - frequencies
    entries: Entries = before << np.uint32(12) | frequencies
    entries[:, ESCAPE] |= np.uint32(ESCAPED)
    made: Entries = np.where(frequencies > 0, entries, entries[:, ESCAPE:])
    return made


def reciprocals() -> Entries:
    """Return 2**32 divided by each frequency, rounded down."""
    f = np.arange(SCALE, dtype=np.uint64)
    made: Entries = np.minimum((1 << 32) // np.maximum(f, 1), (1 << 32) - 1).astype(np.uint32)
    return made


def decoding_tables(frequencies: Entries) -> tuple[Ranks, npt.NDArray[np.int64], int]:
    """Return all tables, then the common ranks; offset of each table, and of the ranks.

    A symbol's rank is the number of earlier symbols with a frequency. A table: for each BUCKET of slots, uint16, the
    bucket of the symbols' ranks; by rank, uint32, frequency, sum << 12, symbol << 24; up to a multiple of 16 bytes.
    """
    pool: dict[bytes, int] = {}
    made, starts = [], [0]
    for row in frequencies:
        symbols = np.flatnonzero(row).astype(np.uint32)
        often = row[symbols]
        ranks = np.repeat(np.arange(len(symbols), dtype=np.uint8), often).reshape(-1, BUCKET)
        buckets = np.array([pool.setdefault(some.tobytes(), len(pool)) for some in ranks], np.uint16)
        entries = symbols << 24 | (np.cumsum(often, dtype=np.uint32) - often) << 12 | often
        table = np.concatenate([buckets.view(np.uint8), entries.view(np.uint8)])
        made.append(np.pad(table, (0, -len(table) % 16)))
        starts.append(starts[-1] + len(made[-1]))
    ranks_of_all = np.frombuffer(b"".join(pool), np.uint8)
    return np.concatenate([*made, ranks_of_all]), np.array(starts[:-1]), starts[-1]
