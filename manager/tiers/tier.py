"""Interface of a tier: one store of a rank's compressed KV blocks. docs/architecture.md says how to add a tier."""

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

    The first part is the base, decodable alone. Each further part is a refinement, which makes the decoded KV finer.
    A sealed or damaged block counts as a single part.

    Args:
        buf: uint8, a whole compressed block.
    """
    try:
        return tuple(wire.part_ends(buf))
    except WireError:
        return (buf.nbytes,)


class TierError(Exception):
    """Failure of a medium. Methods of `Tier` do not raise it. `put_all` and `read` report `cause`, a metric's label."""

    def __init__(self, message: str, cause: str) -> None:
        super().__init__(message)
        self.cause = cause


class Tier(ABC):
    """Compressed blocks by KV cache group and block hash.

    No method raises for a failure of the medium (RAM, disk, Redis). `put_all` and `read` report a failure as a cause,
    which becomes a metric's label. Each method ends in bounded time. A block may be absent while `put_all` replaces it.

    Any number of threads may call `put_all`, `read` and `absent` at once. These methods may wait for the medium. The
    methods `drop`, `trim` and `cleared` do no I/O, because the worker's thread that runs the model calls them.

    In all methods `group` is the index of a KV cache group, `keys` are block hashes, and `tenant` is a tenant's
    name, empty for none.
    """

    can_trim = False  # True if `trim` cuts blocks; False if blocks stay whole

    @abstractmethod
    def put_all(self, group: int, blocks: Mapping[bytes, Buffer], tenant: str = "") -> dict[bytes, str]:
        """Store blocks. Each replaces the stored block with the same group and hash, if there is one.

        Args:
            group: See the class.
            blocks: Bytes by block hash. The caller does not change them until the call ends.
            tenant: Owner of the blocks. A sealing tier encrypts with the tenant's key.

        Returns: by hash, the cause of each failure. The tier then has the earlier block, none, or even the new one.
        """

    @abstractmethod
    def read(self, group: int, keys: Sequence[bytes], tenant: str = "") -> Iterator[Found]:
        """Yield a result for each of `keys`, in order.

        Yielded bytes do not change later, even if the block is dropped. A tier need not detect damage, because the
        decoder checks each block.

        Args:
            group, keys: See the class.
            tenant: Tenant that asks. A sealing tier decrypts this tenant's blocks only.
        """

    @abstractmethod
    def absent(self, group: int, keys: Sequence[bytes]) -> list[bytes]:
        """Return the hashes of blocks that are surely absent; empty if the medium does not answer.

        Args:
            group, keys: See the class.
        """

    @abstractmethod
    def drop(self, group: int, keys: Iterable[bytes]) -> None:
        """Remove blocks, and cancel puts of the same hashes that have not ended. Unknown hashes are ignored.

        In a tier of a single engine, the blocks are absent from now on. The tier erases the bytes soon, on a thread,
        and before it uses the room again. A tier that engines share (Redis) keeps the blocks, because other engines may
        need them. Deletion there is not by `drop`: see `redis_sessions.DELETED`.

        Args:
            group, keys: See the class.
        """

    def trim(self, group: int, keys: Iterable[bytes], parts: int) -> None:  # noqa: B027 not all can
        """Cut blocks to their first parts; see `part_ends`. Do nothing if `can_trim` is False.

        Blocks of at most `parts` parts, and unknown hashes, are ignored. The cut-off parts are absent from now on, and
        are erased like a dropped block. A `read` of the blocks that runs during the call may find nothing.

        Args:
            group, keys: See the class.
            parts: Number of parts that stay, at least 1.
        """

    @abstractmethod
    def cleared(self, place: str) -> "Tier":
        """Return an empty tier to use from now on, possibly this tier. Unfinished puts do not store into it.

        No later process finds blocks that are put into it, because this engine's weights may be different from now on.

        Args:
            place: Name of the new namespace, for a tier that engines share; may be empty for other tiers.
        """

    @abstractmethod
    def close(self) -> None:
        """Finish pending work within a bounded time, and end connections and threads. RAM is freed with the object."""

    @abstractmethod
    def room(self, nbytes: int) -> int:
        """Return the bytes that a block takes of the budget.

        Args:
            nbytes: Bytes of the compressed block.
        """

    def rooms(self, buf: Buffer) -> list[int]:
        """Return the bytes of the budget taken by a block's first part, by its first two parts, and so on to all.

        If `can_trim` is False, return only the bytes taken by all parts.

        Args:
            buf: uint8, a whole compressed block.
        """
        return [self.room(end) for end in (part_ends(buf) if self.can_trim else (buf.nbytes,))]


TIER_KINDS = ("host", "device", "disk", "redis")
"""Values of the option `tiers.kind`. If the codec runs on the GPU, blocks of "host" and "device" are not in a `Tier`,
but in `Slabs` of `vllm_hooks/worker`."""
