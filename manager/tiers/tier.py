"""Where codes lie: cold stores by kind. A store belongs to one rank and is called from several threads."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Buffer: TypeAlias = NDArray[np.uint8]

Found: TypeAlias = Buffer | str | None
"""What was read: a block; the cause why what is there cannot be used, a metric label; or None, if nothing is there."""

STORE_FULL = "store_full"
"""The cause of a refusal: the bytes do not fit in what is left of the budget."""


class Landing(ABC):
    """Memory of whoever reads, which blocks may come to lie in. For the thread that reads."""

    @abstractmethod
    def room(self, nbytes: int, blocks: int = 1) -> Buffer:
        """So many bytes for so many blocks, wherever they are."""

    @abstractmethod
    def lend(self, memory: Buffer, give_back: Callable[[], object]) -> None:
        """Blocks are read where they lie in this memory, which the reader reaches as it reaches its own. give_back: to
        be called when it has done with them."""

    @abstractmethod
    def lose(self) -> None:
        """Rooms that were given may be written to at any time from now on: they are not to be used again."""


class TierError(Exception):
    """A store did not do what was asked; `cause` is a metric label."""

    cause: str = "store"


class Tier(ABC):
    """Encoded blocks by KV cache group and block key.

    Whoever keeps the store's books, the heart or scripts in Redis, reserves bytes before a block is encoded. The store
    itself counts what it has, and refuses what does not fit.
    """

    @abstractmethod
    def put_all(self, group: int, blocks: Mapping[bytes, Buffer], tenant: str = "") -> dict[bytes, str]:
        """Keep blocks; keys that are there already are replaced. tenant: whose they are, for a store that seals them.

        Returns those that were not kept, each with the cause, a metric label.
        """

    @abstractmethod
    def read(
        self, group: int, keys: Sequence[bytes], tenant: str = "", into: "Landing | None" = None
    ) -> Iterator[Found]:
        """The blocks, in order. tenant: who asks. Raises TierError where it cannot tell.

        Each is the reader's own, or never changes: it stays as it is when the block is dropped. into: where those may
        come to lie that the store reads itself; what it lends then stays as it is until `into` gives it back.
        """

    @abstractmethod
    def absent(self, group: int, keys: Sequence[bytes]) -> list[bytes]:
        """Those of these blocks that are not there. Raises TierError where it cannot tell."""

    @abstractmethod
    def drop(self, group: int, keys: Iterable[bytes]) -> None:
        """Remove blocks; unknown keys are ignored."""

    def reached(self, step: int) -> None:  # noqa: B027 most stores are one rank's alone
        """All drops that were ordered up to this step of the engine, by its number, are carried out on this rank.

        Before the first step nothing is asked for."""

    @abstractmethod
    def cleared(self, place: str) -> "Tier":
        """An empty store to use instead of this one from now on, which may be this one; `place` is the directory's
        name for it."""

    @abstractmethod
    def close(self) -> None:
        """Let go of memory, connections and threads."""

    @abstractmethod
    def room(self, nbytes: int) -> int:
        """What a block of so many bytes takes of the budget."""


class FrontTier(Tier):
    """One that may stand in front of another: see `manthan.manager.tiers.stack`."""

    @property
    @abstractmethod
    def usable(self) -> int:
        """Bytes that blocks should take, at most."""

    @property
    @abstractmethod
    def used(self) -> int:
        """Bytes that blocks take, those that are being written too."""

    @abstractmethod
    def names(self) -> list[tuple[int, bytes]]:
        """KV cache group and key of the blocks that are there, in the order in which they were stored."""

    @abstractmethod
    def cleared(self, place: str) -> "FrontTier":
        """See Tier."""


TIER_KINDS = ("host", "device", "disk", "redis")
"""What `tiers.kind` may be; "device" is GPU memory, which the worker half manages itself."""
