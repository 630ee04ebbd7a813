"""Staging buffers for compressed blocks between a paged cache and a tier."""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from manthan.manager.tiers.arena import Extent

Places = Sequence[tuple[Extent, ...]]
"""Extents of each block."""


class Staging:
    """Buffer on the device. codes: bytes of compressed blocks, uint8 [nbytes]."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.codes = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._places: dict[int, list[tuple[Extent]]] = {}

    def places(self, nbytes: int) -> Sequence[tuple[Extent]]:
        """Consecutive extents for blocks of `nbytes`, as many as fit."""
        if nbytes not in self._places:
            fit = range(len(self.codes) // nbytes)
            self._places[nbytes] = [(Extent(n * nbytes, nbytes),) for n in fit]
        return self._places[nbytes]

    def starts(self, nbytes: int) -> npt.NDArray[np.int64]:
        """Offsets for blocks of `nbytes`, as many as fit: int64 [blocks]."""
        return nbytes * np.arange(len(self.codes) // nbytes)


def pieces(sources: Places, targets: Places, nbytes: Sequence[int]) -> torch.Tensor:
    """Return the `n` copies that move blocks from `sources` to `targets`: int64 [3, n], in bytes.

    The rows are offsets in the source, offsets in the target, and sizes. nbytes: size of each block.
    """
    if max(map(len, sources)) == max(map(len, targets)) == 1:
        starts = [source[0].start for source in sources], [target[0].start for target in targets]
        return torch.tensor([*starts, nbytes], dtype=torch.int64)
    found = [piece for one in zip(sources, targets, nbytes, strict=True) for piece in _pieces(*one)]
    return torch.tensor(found, dtype=torch.int64).t().contiguous()


def _pieces(source: tuple[Extent, ...], target: tuple[Extent, ...], left: int) -> Iterator[tuple[int, int, int]]:
    """Yield the copies that move one block. Each ends where an extent of the source or of the target ends."""
    froms, tos = iter(source), iter(target)
    (at, here), (to, there) = next(froms), next(tos)
    while left:
        size = min(here, there, left)
        yield at, to, size
        left -= size
        at, here, to, there = at + size, here - size, to + size, there - size
        if left and not here:
            at, here = next(froms)
        if left and not there:
            to, there = next(tos)
