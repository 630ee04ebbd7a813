"""RAM that blocks lie in, by address."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from manthan.manager.stores.arena import Extent

Buffer = NDArray[np.uint8]

CHUNK = 64 << 20
"""Memory is taken in pieces of so many bytes, as it is needed."""


@dataclass(slots=True, eq=False)
class Kept:
    """A block in memory: where, and how many bytes it has. lent: to so many readers. is_dropped: its room is free when
    the last of them has given it back."""

    extents: tuple[Extent, ...]
    nbytes: int
    lent: int = 0
    is_dropped: bool = False


class Memory(ABC):
    """Bytes by address."""

    @property
    @abstractmethod
    def spans(self) -> Sequence[Extent]:
        """The addresses that may be used, in order. There may come more behind them; none goes."""

    @property
    @abstractmethod
    def lendable(self) -> Buffer | None:
        """All of it, by address, if it can be read where it lies; else it has to be copied."""

    def start(self) -> None:  # noqa: B027 most memory is there at once
        """It is used from now on."""

    @abstractmethod
    def close(self) -> None:
        """It is not used any more."""

    @abstractmethod
    def _piece(self, start: int, nbytes: int) -> Buffer:
        """A view of what is at these addresses, or of the first of them."""

    def write(self, kept: Kept, buf: Buffer) -> None:
        at = 0
        for piece in self._pieces(kept):
            piece[:] = buf[at : at + piece.nbytes]
            at += piece.nbytes

    def read(self, kept: Kept) -> Buffer:
        """A copy."""
        return np.concatenate(list(self._pieces(kept)))

    def _pieces(self, kept: Kept) -> Iterator[Buffer]:
        """A block's bytes as views, in order."""
        left = kept.nbytes
        for start, size in kept.extents:
            end = start + min(size, left)
            left -= end - start
            while start < end:
                piece = self._piece(start, end - start)
                yield piece
                start += piece.nbytes


class Chunks(Memory):
    """So many bytes; the system gives them when they are first written."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._chunks: dict[int, Buffer] = {}

    @property
    def spans(self) -> Sequence[Extent]:
        return (Extent(0, self._nbytes),)

    @property
    def lendable(self) -> None:
        return None

    def close(self) -> None:
        """Nothing: it goes when nobody has it any more."""

    def _piece(self, start: int, nbytes: int) -> Buffer:
        number, at = divmod(start, CHUNK)
        if number not in self._chunks:
            self._chunks.setdefault(number, np.empty(min(CHUNK, self._nbytes - number * CHUNK), np.uint8))
        return self._chunks[number][at : at + nbytes]
