"""Interface of a tier of a rank's compressed blocks. docs/architecture.md has an example."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from manthan.codec import wire
from manthan.codec.errors import WireError

Buffer: TypeAlias = NDArray[np.uint8]

Found: TypeAlias = Buffer | str | None
"""Result of reading a block: the bytes; a cause, a metric label; or None for an absent block."""

STORE_FULL = "store_full"
"""Cause of a refusal: the bytes do not fit in the budget, or on the medium."""


def part_ends(buf: Buffer) -> tuple[int, ...]:
    """Ends of a block's parts: of the base, and of each refinement. A sealed or damaged block has a single part."""
    try:
        return tuple(wire.part_ends(buf))
    except WireError:
        return (buf.nbytes,)


class TierError(Exception):
    """Failure of a medium. `cause` is a metric label. No method of a tier raises a TierError."""

    def __init__(self, message: str, cause: str) -> None:
        super().__init__(message)
        self.cause = cause


class Tier(ABC):
    """Compressed blocks by KV cache group and block hash.

    A failure of the medium is a cause, used as a metric label. No method raises for a failure, and each ends within the
    tier's timeout. A block is absent until the put has finished.

    Threads: any number of threads call `put_all`, `read` and `absent` at once; these may wait for the medium. The
    model's thread calls `drop`, `trim` and `cleared`; these do no I/O.
    """

    can_trim = False
    """True if `trim` cuts blocks; False if blocks stay whole."""

    @abstractmethod
    def put_all(self, group: int, blocks: Mapping[bytes, Buffer], tenant: str = "") -> dict[bytes, str]:
        """Store blocks, each instead of the block with the same hash.

        Args:
            blocks: uint8 [bytes] by block hash. The caller does not change them until the call ends.
            tenant: Owner of the blocks, for a sealing tier.

        Returns: the cause for each unstored block. The hash then has the earlier block, or nothing.
        """

    @abstractmethod
    def read(self, group: int, keys: Sequence[bytes], tenant: str = "") -> Iterator[Found]:
        """Yield a result for each block, in order.

        The bytes never change, even if the block is dropped. They may be damaged in a medium without a checksum,
        because the decoder checks each block.

        Args:
            keys: Block hashes.
            tenant: Asking tenant.
        """

    @abstractmethod
    def absent(self, group: int, keys: Sequence[bytes]) -> list[bytes]:
        """Return the blocks surely absent from the tier; none if the medium does not answer."""

    @abstractmethod
    def drop(self, group: int, keys: Iterable[bytes]) -> None:
        """Remove blocks, and puts under way of the same hashes. Unknown hashes are ignored.

        The blocks are absent from now on. A tier of a single engine erases the bytes soon, on a thread, and before the
        room is used again. A tier common to engines keeps the bytes, and another part deletes released or expired
        blocks.
        """

    def trim(self, group: int, keys: Iterable[bytes], parts: int) -> None:  # noqa: B027 not all can
        """Keep the first `parts` parts of blocks; see `part_ends`.

        Blocks with fewer parts and unknown hashes are ignored. The bytes behind are gone from now on, and are erased
        like a dropped block's. A block must not be read during the cut, because the read may find nothing.
        """

    @abstractmethod
    def cleared(self, place: str) -> "Tier":
        """Return an empty tier to use from now on, possibly this tier. Puts under way are in neither.

        No later process finds blocks put from now on, because the blocks may be of different weights.

        Args:
            place: New name in a tier common to engines.
        """

    @abstractmethod
    def close(self) -> None:
        """Release memory, connections and threads, and finish pending work within a bounded time."""

    @abstractmethod
    def room(self, nbytes: int) -> int:
        """Return the bytes of the budget for a block of `nbytes` bytes."""

    def rooms(self, buf: Buffer) -> list[int]:
        """Return the bytes of a block's first part, of two parts, and so on to all; only all if blocks stay whole."""
        return [self.room(end) for end in (part_ends(buf) if self.can_trim else (buf.nbytes,))]


TIER_KINDS = ("host", "device", "disk", "redis")
"""Values of `tiers.kind`. The worker half manages "device", GPU memory, directly."""
