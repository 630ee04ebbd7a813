"""Causes of failures, block names and weights that the driver and the workers share, and what the guard measures."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from manthan.codec.fidelity import Fidelity

STORE_DOWN = "store_down"
"""The cause of a failure that says nothing about the codes."""
RESET = "reset"
"""The cause of a transfer's end before it was complete: the prefix cache is reset. It says nothing about the codes."""
NEEDED = "needed"
"""The cause of a transfer's end before it began: requests need its blocks. It is no failure."""


Name: TypeAlias = tuple[int, bytes]
"""Of a block: its KV cache group, and its key."""


Weigh: TypeAlias = Callable[[Sequence[int]], int]
"""What a block takes of the budget, from what its shards take."""


def on_each(shards: int) -> Weigh:
    """Where each of so many ranks has an equal part of the budget: as if a block took as much on all of them as where
    it takes most. So none is full while the budget is not, however different their shards are."""
    return lambda sizes: shards * max(sizes)


class Verdict(NamedTuple):
    """Measurement by a rank of what codecs do to KV of the model.

    measured: of each lossy codec, the configured one first; none where it failed. compute_s: seconds in which the model
    computes a token of a prompt; 0 if that is not known.
    """

    rank: int
    measured: Sequence[Fidelity] = ()
    compute_s: float = 0.0

    def is_slow(self, place: int) -> bool:
        """True if to restore a token in this codec takes longer than to compute it."""
        return 0 < self.compute_s < self.measured[place].decode_s
