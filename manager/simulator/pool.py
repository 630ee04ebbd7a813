"""vLLM's KV pool without the KV: which block holds what, who uses it, and which is overwritten next."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from manthan.manager.sessions.pressure import BlockName


class SimulatedPool:
    """Blocks by number, in the order in which vLLM's BlockPool would take them.

    A free block still holds what its key says until it is taken, from the head of the queue. Freed blocks go to the
    tail if they have a key, otherwise to the head.
    """

    def __init__(self, blocks: int) -> None:
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))
        self._users = [0] * blocks
        self._key: list[bytes | None] = [None] * blocks
        self._cached: dict[bytes, int] = {}
        self._copies: dict[bytes, list[int]] = {}  # further blocks of the same key, which nobody finds meanwhile

    def __len__(self) -> int:
        """How many blocks are free."""
        return len(self._free)

    def names(self) -> Iterator[BlockName | None]:
        """What the free blocks hold, from the head on."""
        keys = map(self._key.__getitem__, self._free)
        return (None if key is None else (key, None) for key in keys)

    def users(self, block: int) -> int:
        return self._users[block]

    def get(self, key: bytes) -> int | None:
        """The block with that key."""
        return self._cached.get(key)

    def hit(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of these keys up to the first that is not here."""
        blocks = []
        find = self._cached.get
        for key in keys:
            block = find(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def hold(self, key: bytes) -> int | None:
        """The block with that key, with one more user."""
        return self.hold_all((key,))[0]

    def hold_all(self, keys: Iterable[bytes]) -> list[int | None]:
        """The same of several."""
        blocks = list(map(self._cached.get, keys))
        self.touch([block for block in blocks if block is not None])
        return blocks

    def hold_beside(self, group: int, key: bytes) -> int | None:
        """There is one group."""
        return None

    def touch(self, blocks: Iterable[int]) -> None:
        """One more user for each."""
        users, free = self._users, self._free
        for block in blocks:
            if not users[block]:
                del free[block]
            users[block] += 1

    def take(self, count: int) -> list[int]:
        """The first so many free blocks, for one user; what they held is lost."""
        pop, users, keys = self._free.popitem, self._users, self._key
        blocks = [pop(last=False)[0] for _ in range(count)]
        for block in blocks:
            if keys[block] is not None:
                self._uncache(block)
            users[block] = 1
        return blocks

    def cache(self, block: int, key: bytes, depth: int = 0, group: int | None = None) -> None:
        """A block, which had no key, has one from now on."""
        self.cache_all((block,), (key,))

    def cache_all(self, blocks: Sequence[int], keys: Sequence[bytes]) -> None:
        """The same of several."""
        key_of, enter = self._key, self._cached.setdefault
        for block, key in zip(blocks, keys, strict=True):
            key_of[block] = key
            if enter(key, block) != block:
                self._copies.setdefault(key, []).append(block)

    def block_id(self, block: int) -> int:
        """Its number: here that is the block itself."""
        return block

    def give_back(self, blocks: Iterable[int]) -> None:
        """One user less for each; the first of those that are free then is overwritten first."""
        users, free, keys = self._users, self._free, self._key
        empty = []
        for block in blocks:
            users[block] = left = users[block] - 1
            if not left:
                free[block] = None
                if keys[block] is None:
                    empty.append(block)
        for block in reversed(empty):
            free.move_to_end(block, last=False)

    def release(self, keys: Iterable[bytes]) -> None:
        """Blocks of these keys which nobody uses hold nothing any more, and are overwritten next, the last first."""
        find, users, left = self._cached.get, self._users, list(dict.fromkeys(keys))
        while left:  # once more for those of which there are several
            found = [(key, block) for key in left if (block := find(key)) is not None and not users[block]]
            for _, block in found:
                self._uncache(block)
                self._free.move_to_end(block, last=False)
            left = [key for key, _ in found]

    def _uncache(self, block: int) -> None:
        key = self._key[block]
        if key is None:
            return
        self._key[block] = None
        copies = self._copies.get(key)
        if copies is None:
            del self._cached[key]
            return
        if self._cached[key] != block:
            copies.remove(block)
        else:
            self._cached[key] = copies.pop(0)
        if not copies:
            del self._copies[key]
