"""A small, fast store in front of one that has everything."""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import compress

from manthan.manager.tiers.tier import Buffer, Found, FrontTier, Landing, Tier, TierError

Name = tuple[int, bytes]
"""Of a block: its KV cache group, and its key."""


class StackedTier(Tier):
    """What was stored or read last is read from the front. All is written to the store behind as well, which may be one
    of these itself.

    front: RAM, or a disk, with a budget of its own. What was not used for longest makes room in it, because the
    store behind has it as well.
    """

    def __init__(self, front: FrontTier, behind: Tier) -> None:
        self.front, self.behind = front, behind
        self._lock = threading.Lock()
        """Of all below. No I/O while it is held."""
        self._order: OrderedDict[Name, None] = OrderedDict.fromkeys(front.names())
        """What is in front, least recently used first."""
        self._coming: dict[Name, object] = {}
        """What is being written there, and by whom."""
        self._is_void = False

    def put_all(self, group: int, blocks: Mapping[bytes, Buffer], tenant: str = "") -> dict[bytes, str]:
        refused = self.behind.put_all(group, blocks, tenant)
        for key, buf in blocks.items():
            if key not in refused:
                self._keep((group, key), buf, tenant)
        return refused

    def read(self, group: int, keys: Sequence[bytes], tenant: str = "", into: Landing | None = None) -> Iterator[Found]:
        """Raises what the store behind raises, when it comes to the first block that is not in front."""
        with self._lock:
            near = [(group, key) in self._order for key in keys]
        self._touch(group, keys)
        here = self._in_front(group, list(compress(keys, near)), tenant, into)
        if all(near):
            yield from here
            return
        far = self.behind.read(
            group, [key for key, is_near in zip(keys, near, strict=True) if not is_near], tenant, into
        )
        for key, is_near in zip(keys, near, strict=True):
            if is_near:
                yield next(here)
                continue
            buf = next(far)
            if not (buf is None or isinstance(buf, str)):
                self._keep((group, key), buf, tenant)
            yield buf
        next(far, None)  # the store behind does the same at its end
        self._touch(group, keys)

    def _touch(self, group: int, keys: Sequence[bytes]) -> None:
        """Blocks are used now. Of those that are read together tails make room first."""
        with self._lock:
            for key in reversed(keys):
                if (group, key) in self._order:
                    self._order.move_to_end((group, key))

    def _in_front(self, group: int, keys: Sequence[bytes], tenant: str, into: Landing | None) -> Iterator[Found]:
        """What is not to be had there, since it had to make room, or cannot be read, comes from behind."""
        found = self.front.read(group, keys, tenant, into)
        for key in keys:
            try:
                buf = next(found, None)
            except TierError:
                buf = None
            yield next(self.behind.read(group, [key], tenant, into)) if buf is None else buf

    def absent(self, group: int, keys: Sequence[bytes]) -> list[bytes]:
        return self.behind.absent(group, self.front.absent(group, keys))

    def drop(self, group: int, keys: Iterable[bytes]) -> None:
        keys = list(keys)
        with self._lock:
            for key in keys:
                self._forget((group, key))
        self.front.drop(group, keys)
        self.behind.drop(group, keys)

    def reached(self, step: int) -> None:
        self.front.reached(step)
        self.behind.reached(step)

    def cleared(self, place: str) -> "StackedTier":
        """A new one; what is under way in this one is forgotten with it."""
        with self._lock:
            self._is_void = True
            self._order.clear()
            self._coming.clear()
        return StackedTier(self.front.cleared(place), self.behind.cleared(place))

    def close(self) -> None:
        self.front.close()
        self.behind.close()

    def room(self, nbytes: int) -> int:
        """What it takes of the store behind: what is in front beside that has a budget of its own."""
        return self.behind.room(nbytes)

    def _keep(self, name: Name, buf: Buffer, tenant: str) -> None:
        """In front, if it fits there and is not dropped meanwhile."""
        (group, key), mine = name, object()
        need = self.front.room(buf.nbytes)
        with self._lock:
            self._forget(name)
            self._coming[name] = mine
        self.front.drop(group, [key])
        kept = need <= self.front.usable and self._make_room(need) and not self.front.put_all(group, {key: buf}, tenant)
        with self._lock:
            is_wanted = self._coming.get(name) is mine and not self._is_void
            if is_wanted:
                del self._coming[name]
            if kept and is_wanted:
                self._order[name] = None
        if kept and not is_wanted:
            self.front.drop(group, [key])

    def _make_room(self, need: int) -> bool:
        while self.front.used + need > self.front.usable:
            with self._lock:
                first = next(iter(self._order), None)
                if first is None:
                    return False
                self._forget(first)
            group, key = first
            self.front.drop(group, [key])
        return True

    def _forget(self, name: Name) -> None:
        self._order.pop(name, None)
        self._coming.pop(name, None)
