"""What a driver orders of those who hold the memory, and what they answer."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from manthan.codec.fidelity import Fidelity
from manthan.manager.sessions.marks import Mark
from manthan.manager.sessions.session import Encoding

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


class GroupKeys(NamedTuple):
    """Blocks of one KV cache group, by key."""

    group: int
    keys: Sequence[bytes]


class GroupBlocks(NamedTuple):
    """Blocks of one KV cache group, and where in the paged cache each belongs."""

    group: int
    keys: Sequence[bytes]
    block_ids: Sequence[int]


class SpillBlock(NamedTuple):
    """Encode this block of the paged cache and keep it under its key.

    first_token: the place of its first token in the chain. exact: how many of its first tokens are kept exact. codec:
    its name; empty for the configured one. tenant: whose it is.
    """

    key: bytes
    group: int
    block_id: int
    first_token: int
    exact: int = 0
    codec: str = ""
    tenant: str = ""
    mark: Mark = Mark.EXACT


class SpillBlocks(NamedTuple):
    """The same of several blocks of one KV cache group and one tenant, in columns."""

    keys: Sequence[bytes]
    group: int
    block_ids: Sequence[int]
    first_tokens: Sequence[int]
    encodings: Sequence[Encoding]
    tenant: str
    marks: Sequence[Mark]

    def one_by_one(self) -> Iterator[SpillBlock]:
        columns = zip(self.keys, self.block_ids, self.first_tokens, self.encodings, self.marks, strict=True)
        for key, block_id, first_token, (_, exact, codec), mark in columns:
            yield SpillBlock(key, self.group, block_id, first_token, exact, codec, self.tenant, mark)


class Load(NamedTuple):
    """Decode these codes into these blocks of the paged cache, for a request that waits for them.

    is_prefetch: no request waits, and the id is our own. tenant: for whom it is.
    """

    request_id: str
    parts: Sequence[GroupBlocks]
    is_prefetch: bool = False
    tenant: str = ""

    @property
    def blocks(self) -> int:
        return sum(len(part.keys) for part in self.parts)


class SpillResult(NamedTuple):
    """`cause` is None if the codes are in the rank's tier, and a metric label otherwise; `nbytes` they take there."""

    key: bytes
    group: int
    cause: str | None
    seconds: float
    nbytes: int = 0


class StoredBlocks(NamedTuple):
    """Blocks of one KV cache group that every rank has stored, and what each takes of the budget."""

    group: int
    keys: Sequence[bytes]
    sizes: Sequence[int]


class FailedBlock(NamedTuple):
    """A block that could not be loaded; `cause` is a metric label."""

    group: int
    key: bytes
    cause: str


class LoadResult(NamedTuple):
    """What became of a load on one rank. nbytes: of the codes that were read."""

    request_id: str
    failed: Sequence[FailedBlock]
    nbytes: int
    seconds: float
    is_prefetch: bool = False


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
