"""Two tiers as one: a fast tier with some blocks in front of a tier with all blocks."""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import compress

import numpy as np

from manthan.manager.pool import BlockName
from manthan.manager.tiers.arena_tier import ArenaTier
from manthan.manager.tiers.tier import Buffer, Found, Tier


class StackedTier(Tier):
    """Writes each block to both tiers, and reads it from the front tier if it was stored or read recently.

    Args:
        front: RAM, or a disk, with a budget of its own. The least recently used block makes room.
        behind: The tier with all blocks, or another stack.
    """

    def __init__(self, front: ArenaTier, behind: Tier) -> None:
        self.front, self.behind, self.can_trim = front, behind, behind.can_trim
        self._lock = threading.Lock()  # held to read or change `_order`, but never during I/O
        self._order: OrderedDict[BlockName, None] = OrderedDict.fromkeys(front.names())
        """Blocks of the front tier, least recently used first. It may have dropped some meanwhile."""

    def put_all(self, group: int, blocks: Mapping[bytes, Buffer], tenant: str = "") -> dict[bytes, str]:
        refused = self.behind.put_all(group, blocks, tenant)
        self.front.drop(group, refused)
        self._keep(group, {key: buf for key, buf in blocks.items() if key not in refused}, tenant)
        return refused

    def read(self, group: int, keys: Sequence[bytes], tenant: str = "") -> Iterator[Found]:
        with self._lock:
            near = [(group, key) in self._order for key in keys]
        self._touch(group, keys)
        here = self._in_front(group, list(compress(keys, near)), tenant)
        far = self.behind.read(group, list(compress(keys, [not one for one in near])), tenant)
        for key, is_near in zip(keys, near, strict=True):
            buf = next(here if is_near else far)
            if not is_near and isinstance(buf, np.ndarray):
                self._keep(group, {key: buf}, tenant)
            yield buf
        self._touch(group, keys)

    def _touch(self, group: int, keys: Sequence[bytes]) -> None:
        """Mark blocks as used now. Of blocks read together, the last ones make room first."""
        with self._lock:
            for key in reversed(keys):
                if (group, key) in self._order:
                    self._order.move_to_end((group, key))

    def _in_front(self, group: int, keys: Sequence[bytes], tenant: str) -> Iterator[Found]:
        """Yield blocks from the front tier; from behind if they were dropped there meanwhile, or cannot be read."""
        for key, buf in zip(keys, self.front.read(group, keys, tenant), strict=True):
            yield buf if isinstance(buf, np.ndarray) else next(self.behind.read(group, [key], tenant))

    def absent(self, group: int, keys: Sequence[bytes]) -> list[bytes]:
        return self.behind.absent(group, self.front.absent(group, keys))

    def drop(self, group: int, keys: Iterable[bytes]) -> None:
        keys = list(keys)
        with self._lock:
            for key in keys:
                self._order.pop((group, key), None)
        self.front.drop(group, keys)
        self.behind.drop(group, keys)

    def trim(self, group: int, keys: Iterable[bytes], parts: int) -> None:
        keys = list(keys)
        if self.can_trim:
            self.front.trim(group, keys, parts)
            self.behind.trim(group, keys, parts)

    def cleared(self, place: str) -> "StackedTier":
        return StackedTier(self.front.cleared(place), self.behind.cleared(place))

    def close(self) -> None:
        self.front.close()
        self.behind.close()

    def room(self, nbytes: int) -> int:
        """See Tier. The budget is that of the tier behind."""
        return self.behind.room(nbytes)

    def _keep(self, group: int, blocks: Mapping[bytes, Buffer], tenant: str) -> None:
        """Put those blocks into the front tier that fit."""
        for key, buf in blocks.items():
            self.front.drop(group, [key])
            need = self.front.room(buf.nbytes)
            is_kept = self._make_room(need) and not self.front.put_all(group, {key: buf}, tenant)
            with self._lock:
                self._order.pop((group, key), None)
                if is_kept:
                    self._order[group, key] = None

    def _make_room(self, need: int) -> bool:
        """Drop blocks until `need` bytes are free in the front tier. Return False if they cannot be."""
        while need <= self.front.usable and self.front.used + need > self.front.usable:
            with self._lock:
                if not self._order:
                    return False
                (group, key), _ = self._order.popitem(last=False)
            self.front.drop(group, [key])
        return need <= self.front.usable
