"""Rows of entropy-coded numbers as bytes, little-endian, within a bound:

    | words of each row | states of each row's streams, u32 | words of all rows, u16 |

How many words a row has is u16, or u32 where a row is so long that it might not fit.

A section that does not fit its bound doubles its steps until it does, and so does one with a number of more than 16
bits. Its whole numbers are divided by 2 to the number of doublings and rounded, ties to even. They end as zeros, which
take less than any table lets expect.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from manthan.codec.base import Codes
from manthan.codec.cpu.rans import Coded, Coder, Integers, Rows, streams_of
from manthan.codec.errors import SizeError

WORDS_A_NUMBER = 28 / 16
"""At most: 12 bits for the escape, and 16 behind it."""
SLACK = 27, 20
"""A section may take this multiple of what is expected of it: 1.35, as whole numbers."""
MOST_DOUBLINGS = 16
"""After which all 16-bit numbers are 0."""
FURTHEST = 32767
"""The largest number that is written, of either sign."""


def bound(expected_nbytes: int) -> int:
    """The most bytes of a section of which so many are expected."""
    times, of = SLACK
    return -(-expected_nbytes * times // of)


def encode_rows(
    coder: Coder, numbers: Integers | npt.NDArray[np.float64], rows_of: Callable[[int], Rows], out: Codes
) -> tuple[int, int]:
    """Write whole numbers into the front of `out`, with as few doublings of their steps as fit.

    Args:
        numbers: of all rows, one row behind the other; float64 where some take more than 16 bits.
        rows_of: rows by the number of doublings.
        out: as long as the rows may be.

    Returns: the number of doublings, and of bytes that were written.
    """
    short = numbers.dtype == np.int16
    least = 0 if short else max(0, int(np.frexp(np.abs(numbers).max())[1]) - 15)
    for doublings in range(least, least + MOST_DOUBLINGS + 1):
        rows = rows_of(doublings)
        halved = np.rint(np.ldexp(numbers.astype(np.float64), -doublings)) if doublings else numbers
        if not short and np.abs(halved).max() > FURTHEST:
            continue
        coded = coder.encode(halved.astype(np.int16, copy=False), rows, (out.size - front(rows)) // 2)
        if coded is not None:
            return doublings, write(coded, rows, out)
    raise AssertionError(f"{numbers.size} zeros do not fit into {out.size} bytes")


def row_front(numbers: int) -> int:
    """Bytes ahead of the words for a row of so many numbers."""
    return _counts(numbers).itemsize + 4 * streams_of(numbers)


def front(rows: Rows) -> int:
    """Bytes ahead of the words."""
    return len(rows.components) * row_front(_numbers(rows))


def write(coded: Coded, rows: Rows, out: Codes) -> int:
    """Into the front of `out`; how many bytes."""
    sizes = coded.sizes.astype(_counts(_numbers(rows)))
    at = 0
    for part in (sizes, coded.states.astype("<u4"), coded.words.astype("<u2", copy=False)):
        out[at : at + part.nbytes] = np.ascontiguousarray(part).view(np.uint8).ravel()
        at += part.nbytes
    return at


def parse(codes: Codes, rows: Rows) -> Coded:
    """The opposite. Raises SizeError."""
    count, dtype, begin = len(rows.components), _counts(_numbers(rows)), front(rows)
    if codes.size < begin or (codes.size - begin) % 2:
        raise SizeError(f"{codes.size} bytes are not {count} entropy-coded rows: {begin} and words of 2 bytes are.")
    at = count * dtype.itemsize
    sizes = codes[:at].copy().view(dtype).astype(np.int64)
    states = codes[at:begin].copy().view("<u4").reshape(count, rows.streams).astype(np.uint32)
    return Coded(states, sizes, codes[begin:].copy().view("<u2").astype(np.uint16, copy=False))


def _numbers(rows: Rows) -> int:
    return int(rows.components[0]) * rows.tokens


def _counts(numbers: int) -> np.dtype[np.unsignedinteger]:
    return np.dtype("<u2" if numbers * WORDS_A_NUMBER < 1 << 16 else "<u4")
