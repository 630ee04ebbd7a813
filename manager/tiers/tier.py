"""Interface of a tier: one store of a rank's compressed blocks. docs/architecture.md says how to add one."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from manthan.codec import wire
from manthan.codec.errors import WireError

Buffer: TypeAlias = NDArray[np.uint8]

Found: TypeAlias = Buffer | str | None
"""Result of reading a block: uint8 [bytes]; the cause of a failure, which is a metric's label; None if absent."""

STORE_FULL = "store_full"  # cause of a refusal: the bytes do not fit in the budget, or on the medium


def part_ends(buf: Buffer) -> tuple[int, ...]:
    """Return the ends, in bytes, of a block's parts: of the base, and of each refinement.

    A sealed or damaged block counts as a single part.
    """
    try:
        return tuple(wire.part_ends(buf))
    except WireError:
        return (buf.nbytes,)


class TierError(Exception):
    """Failure of a medium, inside a tier only: a tier's methods return `cause`, a metric's label, instead."""

    def __init__(self, message: str, cause: str) -> None:
        super().__init__(message)
        self.cause = cause


class Tier(ABC):
    """Compressed blocks by KV cache group and block hash.

    A failure of the medium is a cause, which becomes a metric's label. No method raises for a failure, and each ends
    within the tier's timeout. A block is absent until `put_all` has ended.

    Threads: any number of threads call `put_all`, `read` and `absent` at once; these may wait for the medium. The
    model's thread calls `drop`, `trim` and `cleared`; these do no I/O.

    In all methods `group` is a KV cache group's number, `keys` are block hashes, and `tenant` is empty for no tenant.
    """

    can_trim = False  # true if `trim` cuts blocks; False if blocks stay whole

    @abstractmethod
    def put_all(self, group: int, blocks: Mapping[bytes, Buffer], tenant: str = "") -> dict[bytes, str]:
        """Store blocks, each instead of the block with the same hash.

        Args:
            blocks: Bytes by block hash. The caller does not change them until the call ends.
            tenant: Owner of the blocks. A sealing tier encrypts with the tenant's key.

        Returns: the cause for each block that was not stored. The tier then has the earlier block, or none.
        """

    @abstractmethod
    def read(self, group: int, keys: Sequence[bytes], tenant: str = "") -> Iterator[Found]:
        """Yield a result for each block, in order.

        Yielded bytes do not change later, even if the block is dropped. A tier need not detect damage, because the
        decoder checks each block.

        Args:
            tenant: Tenant that asks. A sealing tier opens its blocks only.
        """

    @abstractmethod
    def absent(self, group: int, keys: Sequence[bytes]) -> list[bytes]:
        """Return the hashes of blocks that are surely absent; no hash if the medium does not answer."""

    @abstractmethod
    def drop(self, group: int, keys: Iterable[bytes]) -> None:
        """Remove blocks, and cancel puts of the same hashes that have not ended. Unknown hashes are ignored.

        The blocks are absent from now on. A tier of a single engine erases the bytes soon, on a thread, and before the
        room is used again. A tier that engines share (Redis) keeps the bytes, because others may need them.
        `RedisSessions` deletes released and expired blocks there.
        """

    def trim(self, group: int, keys: Iterable[bytes], parts: int) -> None:  # noqa: B027 not all can
        """Keep the first `parts` parts of blocks; see `part_ends`.

        Blocks with fewer parts and unknown hashes are ignored. The other parts are absent from now on, and are erased
        like a dropped block. The caller does not let a block be read meanwhile, because the read may find nothing.
        """

    @abstractmethod
    def cleared(self, place: str) -> "Tier":
        """Return an empty tier to use from now on, possibly this tier. Blocks of unfinished puts are in neither.

        Blocks put from now on are not found by later processes, because they may be of different weights.

        Args:
            place: Name of the new namespace, for a tier that engines share.
        """

    @abstractmethod
    def close(self) -> None:
        """Release memory, connections and threads, and finish pending work within a bounded time."""

    @abstractmethod
    def room(self, nbytes: int) -> int:
        """Return the bytes that a block of `nbytes` bytes takes of the budget."""

    def rooms(self, buf: Buffer) -> list[int]:
        """Return the bytes taken of the budget by a block's first part, by its first two parts, and so on to all.

        If `can_trim` is False, only the bytes of all parts.
        """
        return [self.room(end) for end in (part_ends(buf) if self.can_trim else (buf.nbytes,))]


TIER_KINDS = ("host", "device", "disk", "redis")
"""Values of `tiers.kind`. Blocks in GPU memory, "device", are not in a Tier, but in `vllm_hooks/worker/slabs.py`."""
