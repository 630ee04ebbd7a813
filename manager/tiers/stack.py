"""Two tiers (stores of KV blocks) used as one: a fast tier with some blocks, in front of a slower tier with all."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from manthan.manager.tiers.arena_tier import ArenaTier
from manthan.manager.tiers.tier import Buffer, Found, JoinedTier, Tier


class StackedTier(JoinedTier):
    """Tier that stores all blocks in the tier behind. The front tier has copies of the blocks stored or read last.

    Args:
        front: RAM, or a disk, with a budget of its own. Its least recently used blocks make room for new blocks.
        behind: Tier with all blocks, such as another stack.
    """

    def __init__(self, front: ArenaTier, behind: Tier) -> None:
        super().__init__(behind, front)
        self.front, self.behind, self.can_trim = front, behind, behind.can_trim

    def put_all(self, group: int, blocks: Mapping[bytes, Buffer], tenant: str = "") -> dict[bytes, str]:
        refused = self.behind.put_all(group, blocks, tenant)
        self.front.drop(group, refused)
        self._keep(group, {key: buf for key, buf in blocks.items() if key not in refused}, tenant)
        return refused

    def read(self, group: int, keys: Sequence[bytes], tenant: str = "") -> Iterator[Found]:
        absent = set(self.front.absent(group, keys))
        self.front.touch(group, keys)
        here = self._in_front(group, [key for key in keys if key not in absent], tenant)
        far = self.behind.read(group, [key for key in keys if key in absent], tenant)
        for key in keys:
            buf = next(far if key in absent else here)
            if key in absent and isinstance(buf, np.ndarray):
                self._keep(group, {key: buf}, tenant)
            yield buf
        self.front.touch(group, keys)

    def _in_front(self, group: int, keys: Sequence[bytes], tenant: str) -> Iterator[Found]:
        """Yield blocks from the front tier. A block that it has just dropped, or cannot read, is read from `behind`."""
        for key, buf in zip(keys, self.front.read(group, keys, tenant), strict=True):
            yield buf if isinstance(buf, np.ndarray) else next(self.behind.read(group, [key], tenant))

    def absent(self, group: int, keys: Sequence[bytes]) -> list[bytes]:
        return self.behind.absent(group, self.front.absent(group, keys))

    def trim(self, group: int, keys: Iterable[bytes], parts: int) -> None:
        keys = list(keys)
        if self.can_trim:
            self.front.trim(group, keys, parts)
            self.behind.trim(group, keys, parts)

    def cleared(self, place: str) -> "StackedTier":
        return StackedTier(self.front.cleared(place), self.behind.cleared(place))

    def _keep(self, group: int, blocks: Mapping[bytes, Buffer], tenant: str) -> None:
        """Put blocks into the front tier, except those for which it cannot make room."""
        for key, buf in blocks.items():
            self.front.drop(group, [key])
            if self.front.make_room(self.front.room(buf.nbytes)):
                self.front.put_all(group, {key: buf}, tenant)
