"""Interface of a tier, a place for the compressed blocks of one rank. docs/architecture.md has an example."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from manthan.codec import wire
from manthan.codec.errors import WireError

Buffer: TypeAlias = NDArray[np.uint8]

Found: TypeAlias = Buffer | str | None
"""Result of reading a block: its bytes; a cause, which is a metric label; or None if the tier does not have it."""

STORE_FULL = "store_full"
"""Cause of a refusal: the bytes do not fit in the budget, or on the medium."""


def part_ends(buf: Buffer) -> tuple[int, ...]:
    """Ends of a block's parts: of its base, and of each refinement. A block that is sealed or damaged has one part."""
    try:
        return tuple(wire.part_ends(buf))
    except WireError:
        return (buf.nbytes,)


class TierError(Exception):
    """Failure of a medium. `cause` is a metric label. No method of a tier raises it."""

    def __init__(self, message: str, cause: str) -> None:
        super().__init__(message)
        self.cause = cause


class Tier(ABC):
    """Compressed blocks by KV cache group and block hash.

    A failure of the medium is a cause, which is a metric label: no method raises for it, and each ends within the
    tier's timeout. A block that a put has not finished is not there.

    Threads: any number of threads call `put_all`, `read` and `absent` at once; these may wait for the medium. The
    model's thread calls `drop`, `trim` and `cleared`; these do no I/O.
    """

    can_trim = False
    """True if `trim` cuts blocks. Others keep them whole."""

    @abstractmethod
    def put_all(self, group: int, blocks: Mapping[bytes, Buffer], tenant: str = "") -> dict[bytes, str]:
        """Store blocks, each in place of the one with the same hash.

        Args:
            blocks: uint8 [bytes] by block hash. The caller does not change them until the call ends.
            tenant: Owner of the blocks, for a tier that seals them.

        Returns: the cause for each block that is not stored. Its hash has what it had before, or nothing.
        """

    @abstractmethod
    def read(self, group: int, keys: Sequence[bytes], tenant: str = "") -> Iterator[Found]:
        """Yield a result for each block, in order.

        The bytes never change, also when the block is dropped. They may be damaged where the medium has no checksum of
        its own: the decoder checks each block.

        Args:
            keys: Block hashes.
            tenant: Who asks.
        """

    @abstractmethod
    def absent(self, group: int, keys: Sequence[bytes]) -> list[bytes]:
        """Return the blocks that the tier is sure not to have; none if the medium does not answer."""

    @abstractmethod
    def drop(self, group: int, keys: Iterable[bytes]) -> None:
        """Remove blocks, and what is being put under their hashes. Unknown hashes are ignored.

        The blocks are not there from now on. A tier of this engine alone erases their bytes soon, on a thread, and
        before it uses their room again. One that engines share keeps them, and another part deletes those that are
        released or expired.
        """

    def trim(self, group: int, keys: Iterable[bytes], parts: int) -> None:  # noqa: B027 not all can
        """Keep the first `parts` parts of blocks; see `part_ends`. Those with fewer and unknown hashes are ignored.

        The bytes behind are not there from now on, and are erased like those of a dropped block. Nobody may read a
        block that is cut: the read may find nothing.
        """

    @abstractmethod
    def cleared(self, place: str) -> "Tier":
        """Return an empty tier to use in place of this one; it may be this one. Neither has what is being put now.

        No process finds later what is put from now on, because it may be of other weights.

        Args:
            place: New name in a tier that engines share.
        """

    @abstractmethod
    def close(self) -> None:
        """Release memory, connections and threads, and finish what was begun within a bounded time."""

    @abstractmethod
    def room(self, nbytes: int) -> int:
        """Return the bytes of the budget that a block of `nbytes` bytes takes."""

    def rooms(self, buf: Buffer) -> list[int]:
        """Return the bytes that a block takes with one part, two, and so on to all; only all if it cannot be cut."""
        return [self.room(end) for end in (part_ends(buf) if self.can_trim else (buf.nbytes,))]


TIER_KINDS = ("host", "device", "disk", "redis")
"""Values of `tiers.kind`. The worker half manages "device", which is GPU memory, itself."""
