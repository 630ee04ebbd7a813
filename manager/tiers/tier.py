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
"""Result of reading a block: its bytes; or the cause of a failure, a metric's label; or None if it is absent."""

STORE_FULL = "store_full"  # cause of a refusal: the bytes do not fit in the budget, or on the medium


def part_ends(buf: Buffer) -> tuple[int, ...]:
    """Return the offset, in bytes, at which each part of a compressed block ends.

    The first part is the base, which decodes alone. Each further part is a refinement, which makes the KV more exact.
    A sealed or damaged block counts as a single part.
    """
    try:
        return tuple(wire.part_ends(buf))
    except WireError:
        return (buf.nbytes,)


class TierError(Exception):
    """Failure of a medium, raised only inside a tier. Methods of `Tier` return `cause`, a metric's label, instead."""

    def __init__(self, message: str, cause: str) -> None:
        super().__init__(message)
        self.cause = cause


class Tier(ABC):
    """Compressed blocks by KV cache group and block hash.

    No method raises for a failure of the medium (RAM, disk, Redis). Methods report a failure as a cause, which becomes
    a metric's label. Each method ends in bounded time. A block may be absent until `put_all` has ended.

    Threads: any number of threads call `put_all`, `read` and `absent` at once. These may wait for the medium. The
    worker's thread that runs the model calls `drop`, `trim` and `cleared`. These do no I/O.

    In all methods `group` is the index of a KV cache group, `keys` are block hashes, and `tenant` is the name of the
    blocks' owner, empty for no tenant.
    """

    can_trim = False  # True if `trim` cuts blocks; False if blocks stay whole

    @abstractmethod
    def put_all(self, group: int, blocks: Mapping[bytes, Buffer], tenant: str = "") -> dict[bytes, str]:
        """Store blocks. Each replaces the stored block with the same group and hash, if there is one.

        Args:
            blocks: Bytes by block hash. The caller does not change them until the call ends.
            tenant: Owner of the blocks. A sealing tier encrypts with the tenant's key.

        Returns: by hash, the cause for each block that was not stored. The tier then has the earlier block, or none.
        """

    @abstractmethod
    def read(self, group: int, keys: Sequence[bytes], tenant: str = "") -> Iterator[Found]:
        """Yield a result for each of `keys`, in order.

        Yielded bytes do not change later, even if the block is dropped. A tier need not detect damage, because the
        decoder checks each block.

        Args:
            tenant: Tenant that asks. A sealing tier decrypts this tenant's blocks only.
        """

    @abstractmethod
    def absent(self, group: int, keys: Sequence[bytes]) -> list[bytes]:
        """Return the hashes in `keys` of blocks that are surely absent; none if the medium does not answer."""

    @abstractmethod
    def drop(self, group: int, keys: Iterable[bytes]) -> None:
        """Remove blocks, and cancel puts of the same hashes that have not ended. Unknown hashes are ignored.

        In a tier of a single engine, the blocks are absent from now on. The tier erases the bytes soon, on a thread,
        and before it uses the room again. A tier that engines share (Redis) keeps the blocks, because other engines may
        need them. `RedisSessions` deletes those that this engine dropped for a cause in its list DELETED.
        """

    def trim(self, group: int, keys: Iterable[bytes], parts: int) -> None:  # noqa: B027 not all can
        """Cut blocks to their first `parts` parts; see `part_ends`.

        Blocks with at most `parts` parts, and unknown hashes, are ignored. The parts behind are absent from now on, and
        are erased like a dropped block. No `read` of the blocks may run during the call, or the read may find nothing.
        """

    @abstractmethod
    def cleared(self, place: str) -> "Tier":
        """Return an empty tier to use from now on, possibly this tier. Unfinished puts do not store into it.

        No later process finds blocks that are put into it, because the model's weights may be different by then.

        Args:
            place: Name of the new namespace in a tier that engines share; may be empty for others.
        """

    @abstractmethod
    def close(self) -> None:
        """Release memory, connections and threads, and finish pending work within a bounded time."""

    @abstractmethod
    def room(self, nbytes: int) -> int:
        """Return the bytes that a block of `nbytes` bytes takes of the budget."""

    def rooms(self, buf: Buffer) -> list[int]:
        """Return the bytes of the budget taken by a block's first part, by its first two parts, and so on to all.

        If `can_trim` is False, return only the bytes taken by all parts.
        """
        return [self.room(end) for end in (part_ends(buf) if self.can_trim else (buf.nbytes,))]


TIER_KINDS = ("host", "device", "disk", "redis")
"""Values of the option `tiers.kind`. If the codec runs on the GPU, blocks of "host" and "device" are not in a `Tier`,
but in `vllm_hooks/worker/slabs.py`."""
