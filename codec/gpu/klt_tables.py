"""Tables of the entropy coder on a GPU, of frequencies uint32 [tables, 256]."""

import numpy as np
import numpy.typing as npt

from manthan.codec.tables.frequencies import ESCAPE, SCALE

BUCKET = 16
"""Slots with a common entry in a table for decoding."""
ESCAPED = 1 << 31

Entries = npt.NDArray[np.uint32]
Ranks = npt.NDArray[np.uint8]


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
