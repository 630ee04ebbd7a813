"""A KV pool as it is driven: vLLM's block pool, or the simulator's."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from manthan.manager.sessions.marks import Mark, Marks
from manthan.manager.sessions.pressure import FreeQueue
from manthan.manager.sessions.session import BlockName

B = TypeVar("B")


class Pool(FreeQueue, Protocol[B]):
    """Blocks of the KV cache group of chains, and of others where they are named. `B` is the pool's own handle of a
    block.

    A free block still holds what its key says until it is taken, from the head of the queue.
    """

    marks: Marks
    """By block id; cleared when a block is taken."""

    def mark(self, name: BlockName) -> Mark | None:
        """Mark of the block that holds this; None if no block does."""

    def block_ids(self, blocks: Sequence[B]) -> Sequence[int]:
        """Their numbers in the paged cache."""

    def hold(self, name: BlockName) -> B | None:
        """A block that holds this, with one more user: nobody overwrites a block with users."""

    def take(self, count: int) -> list[B]:
        """The first so many free blocks, for one user; what they held is lost."""

    def cache(self, block: B, key: bytes, depth: int, group: int | None = None) -> None:
        """A block, the one at `depth` of its chain, holds this from now on. group: of which it becomes one; None for
        that of chains."""

    def give_back(self, blocks: Sequence[B]) -> None:
        """One user less for each; the first of those that are free then is overwritten first."""

    def release(self, keys: Sequence[bytes]) -> None:
        """Blocks with these keys that nobody uses hold nothing any more, and are overwritten next, the last first."""

    def keep(self, keys: Sequence[bytes]) -> None:
        """Blocks with these keys are saved: nobody who uses the pool need spare them.

        When such a block is free it stands behind those that hold nothing and the saved ones that were there before,
        and is overwritten before all others. Those that are free now stand in the order of the keys.
        """

    def forget(self, keys: Sequence[bytes]) -> None:
        """Blocks with these keys are saved no more: free ones are overwritten last, the first at the very end."""
