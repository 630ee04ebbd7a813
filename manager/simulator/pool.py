"""vLLM's KV pool without the KV: which block holds what, who uses it, and which is overwritten next."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, repeat

from manthan.manager.sessions.marks import Mark, Marks
from manthan.manager.sessions.session import BlockName


class SimulatedPool:
    """Blocks by number, in the order in which vLLM's BlockPool would take them.

    A free block still holds what its key says until it is taken, from the head of the queue. Freed blocks go to the
    tail if they have a key, otherwise to the head.
    """

    def __init__(self, blocks: int) -> None:
        self._empty = list(range(blocks))[::-1]
        """The head of the queue: free blocks that hold nothing, and are found by nobody. The last is taken first."""
        self._kept: OrderedDict[int, None] = OrderedDict()
        """Behind them: those that are saved, the first to be taken first."""
        self._saved = set[int]()
        """Saved ones, free or not."""
        self._queue: OrderedDict[int, None] = OrderedDict()
        """The rest of it: the others that have keys."""
        self.marks = Marks(blocks)
        self._users = [0] * blocks
        self._key: list[bytes | None] = [None] * blocks
        self._cached: dict[BlockName, int] = {}
        self._copies: dict[bytes, list[int]] = {}  # further blocks of the same key, which nobody finds meanwhile

    def __len__(self) -> int:
        """How many blocks are free."""
        return len(self._empty) + len(self._kept) + len(self._queue)

    def names(self) -> Iterator[BlockName | None]:
        """What the free blocks hold, from the head on."""
        return chain(repeat(None, len(self._empty)), map(self._key.__getitem__, chain(self._kept, self._queue)))

    def users(self, block: int) -> int:
        return self._users[block]

    def mark(self, name: BlockName) -> Mark | None:
        """Mark of the block that holds this; None if no block does."""
        block = self._cached.get(name)
        return None if block is None else self.marks[block]

    def hit(self, keys: Iterable[bytes], serves: Callable[[int], bool] = lambda block: True) -> list[int]:
        """The blocks of these keys up to the first that is not here, or that may not be served to who asks."""
        blocks = []
        find = self._cached.get
        for key in keys:
            block = find(key)
            if block is None or not serves(block):
                break
            blocks.append(block)
        return blocks

    def hold(self, name: BlockName) -> int | None:
        """The block with that key, with one more user; there is one group."""
        block = self._cached.get(name)
        self.touch(() if block is None else (block,))
        return block

    def touch(self, blocks: Iterable[int]) -> None:
        """One more user for each, which have keys."""
        users = self._users
        for block in blocks:
            if not users[block]:
                self._unqueue(block)
            users[block] += 1

    def _unqueue(self, block: int) -> None:
        del (self._kept if block in self._kept else self._queue)[block]

    def take(self, count: int) -> list[int]:
        """The first so many free blocks, for one user; what they held is lost."""
        at = max(0, len(self._empty) - count)
        blocks = self._empty[at:][::-1]
        del self._empty[at:]
        while len(blocks) < count:
            block, _ = (self._kept or self._queue).popitem(last=False)
            self._lose(block)
            blocks.append(block)
        for block in blocks:
            self._users[block] = 1
        self.marks.clear(blocks)
        return blocks

    def cache(self, block: int, key: bytes, depth: int = 0, group: int | None = None) -> None:
        """A block, which had no key, has one from now on."""
        self.cache_all((block,), (key,))

    def cache_all(self, blocks: Sequence[int], keys: Sequence[bytes]) -> None:
        """The same of several."""
        key_of, enter = self._key, self._cached.setdefault
        for block, key in zip(blocks, keys, strict=True):
            key_of[block] = key
            if (first := enter(key, block)) == block:
                continue
            copies = self._copies.setdefault(key, [])
            if self.marks[first] > self.marks[block]:  # the exact copy is the one that is found
                self._cached[key] = block
                copies.append(first)
            else:
                copies.append(block)

    def block_ids(self, blocks: Sequence[int]) -> Sequence[int]:
        """Their numbers: here these are the blocks themselves."""
        return blocks

    def give_back(self, blocks: Iterable[int]) -> None:
        """One user less for each; the first of those that are free then is overwritten first."""
        users, keys, empty = self._users, self._key, list[int]()
        for block in blocks:
            users[block] = left = users[block] - 1
            if not left:
                if keys[block] is None:
                    empty.append(block)
                else:
                    (self._kept if block in self._saved else self._queue)[block] = None
        self._empty += reversed(empty)

    def release(self, keys: Iterable[bytes]) -> None:
        """Blocks of these keys which nobody uses hold nothing any more, and are overwritten next, the last first."""
        for block in self._blocks_of(keys):
            if not self._users[block]:
                self._unqueue(block)
                self._lose(block)
                self._empty.append(block)

    def keep(self, keys: Iterable[bytes]) -> None:
        """Blocks of these keys are saved, and stand before unsaved ones, the first first."""
        for block in self._blocks_of(keys):
            if not self._users[block]:
                self._unqueue(block)
                self._kept[block] = None
            self._saved.add(block)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Blocks of these keys are saved no more, and stand last, the first at the very end."""
        for block in reversed(self._blocks_of(keys)):
            if not self._users[block]:
                self._unqueue(block)
                self._queue[block] = None
            self._saved.discard(block)

    def _blocks_of(self, keys: Iterable[bytes]) -> list[int]:
        """All blocks of these keys."""
        first = ((key, self._cached.get(key)) for key in dict.fromkeys(keys))
        return [block for key, one in first if one is not None for block in (one, *self._copies.get(key, ()))]

    def _lose(self, block: int) -> None:
        """A block holds nothing any more."""
        self._saved.discard(block)
        key, self._key[block] = self._key[block], None
        assert key is not None
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
