"""Model of vLLM's block pool without the KV: block hashes, reference counts, and the order of the free queue."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice

from manthan.manager.pool import BlockName, FreeBlock, Marks


class SimulatedPool:
    """`manthan.manager.pool.Pool` over simulated blocks, with a free queue like that of vLLM's BlockPool.

    A block is saved if a tier (a store of Manthan) has a compressed copy. A free block keeps its KV until it is taken
    from the free queue's head or evicted. The queue has empty blocks, then saved blocks, then unsaved blocks. A newly
    freed block goes to the head of the empty blocks, or to the end of the saved or of the unsaved blocks.
    """

    def __init__(self, blocks: int) -> None:
        self.size = blocks
        self.marks = Marks()
        self._empty = list(range(blocks))[::-1]
        """Free blocks without a hash. The last is taken first."""
        self._kept: OrderedDict[int, None] = OrderedDict()
        """Free blocks of `_saved`. The first is taken first."""
        self._rest: OrderedDict[int, None] = OrderedDict()
        """Free unsaved blocks. The first is taken first."""
        self._saved: set[int] = set()
        """Saved blocks, free or not, and all of `_given_up`."""
        self._given_up: set[int] = set()
        """Blocks to overwrite next, although a tier may have no copy: in `_saved` until used, saved or forgotten."""
        self._users = [0] * blocks
        self._name: list[BlockName | None] = [None] * blocks
        self._cached: dict[BlockName, int] = {}
        self._copies: dict[BlockName, list[int]] = {}  # further blocks of a hash, not in `_cached`

    def __len__(self) -> int:
        return len(self._empty) + len(self._kept) + len(self._rest)

    def users(self, block: int) -> int:
        return self._users[block]

    def lookup(self, group: int, block_hashes: Iterable[bytes]) -> list[int]:
        if group < 0:
            raise ValueError(f"there is no group {group}")  # vLLM's pool raises, too
        find = self._cached.get
        return [find((group, block_hash), -1) for block_hash in block_hashes]

    def hit(
        self, block_hashes: Iterable[bytes], serves: Callable[[int], bool] = lambda block: True, group: int = 0
    ) -> list[int]:
        """Return the blocks of the hashes before the first absent block, or the first that `serves` refuses."""
        blocks = []
        for block_hash in block_hashes:
            block = self._cached.get((group, block_hash))
            if block is None or not serves(block):
                break
            blocks.append(block)
        return blocks

    def hold(self, block_ids: Iterable[int]) -> None:
        for block in block_ids:
            if not self._users[block]:
                self._unqueue(block)
            self._users[block] += 1
            if block in self._given_up:
                self._given_up.discard(block)
                self._saved.discard(block)

    def _unqueue(self, block: int) -> None:
        del (self._kept if block in self._kept else self._rest)[block]

    def take(self, count: int) -> list[int]:
        at = max(0, len(self._empty) - count)
        blocks = self._empty[at:][::-1]
        del self._empty[at:]
        while len(blocks) < count:
            block, _ = (self._kept or self._rest).popitem(last=False)
            self._lose(block)
            blocks.append(block)
        for block in blocks:
            self._users[block] = 1
        self.marks.clear(blocks)
        return blocks

    def cache(self, block_id: int, group: int, block_hash: bytes, position: int = 0) -> None:
        self.cache_all((block_id,), (block_hash,), group)

    def cache_all(self, block_ids: Sequence[int], block_hashes: Sequence[bytes], group: int = 0) -> None:
        """Enter blocks without a hash into the prefix cache. An exact block evicts lossy blocks with the same hash."""
        for block, block_hash in zip(block_ids, block_hashes, strict=True):
            name = group, block_hash
            self._name[block] = name
            if (first := self._cached.setdefault(name, block)) == block:
                continue
            copies = self._copies.setdefault(name, [])
            copies.append(block)
            if not self.marks[block]:
                self._evict([copy for copy in (first, *copies) if self.marks[copy]])

    def free(self, block_ids: Iterable[int]) -> None:
        empty = list[int]()
        for block in block_ids:
            self._users[block] = left = self._users[block] - 1
            if not left:
                if self._name[block] is None:
                    self._saved.discard(block)
                    empty.append(block)
                else:
                    (self._kept if block in self._saved else self._rest)[block] = None
        self._empty += reversed(empty)

    def clear(self) -> None:
        """Empty the prefix cache, as vLLM's reset does. No request may reference a block, but a transfer may."""
        for block in (*self._kept, *self._rest):
            self._empty.append(block)
        self._kept.clear()
        self._rest.clear()
        self._saved.clear()
        self._given_up.clear()
        self._name = [None] * self.size
        self._cached.clear()
        self._copies.clear()
        self.marks.clear(range(self.size))

    def release(self, group: int, block_hashes: Iterable[bytes]) -> None:
        self._evict(self._blocks_of(group, block_hashes))

    def _evict(self, blocks: Iterable[int]) -> None:
        """Take blocks out of the prefix cache, and move blocks without references to the head of the free queue."""
        for block in blocks:
            if not self._users[block]:
                self._unqueue(block)
                self._empty.append(block)
            self._lose(block)

    def loaded(self, block_ids: Iterable[int]) -> None:
        self._saved.update(block_ids)

    def keep(self, group: int, block_hashes: Iterable[bytes]) -> None:
        for block in self._blocks_of(group, block_hashes):
            if not self._users[block]:
                self._unqueue(block)
                self._kept[block] = None
            self._saved.add(block)
            self._given_up.discard(block)

    def give_up(self, group: int, block_hashes: Iterable[bytes]) -> None:
        for block in self._blocks_of(group, block_hashes):
            if not self._users[block]:
                self._unqueue(block)
                self._kept[block] = None
                self._kept.move_to_end(block, last=False)
                self._saved.add(block)
                self._given_up.add(block)

    def lead(self, group: int, block_hashes: Iterable[bytes]) -> None:
        for block in reversed(self._blocks_of(group, block_hashes)):
            if block in self._kept:
                self._kept.move_to_end(block, last=False)

    def forget(self, group: int, block_hashes: Iterable[bytes]) -> None:
        for block in reversed(self._blocks_of(group, block_hashes)):
            if block in self._kept:
                self._unqueue(block)
                self._rest[block] = None
            self._saved.discard(block)
            self._given_up.discard(block)

    def runway(self, most: int) -> int:
        assert most >= 0
        return min(most, len(self._empty) + len(self._kept))

    def unsaved(self, most: int) -> Iterator[FreeBlock]:
        assert most >= 0  # vLLM's pool would raise
        before = len(self._empty) + len(self._kept)
        return (self._named(block) for block in list(islice(self._rest, max(0, most - before))))

    def saved(self, most: int) -> Iterator[tuple[int, FreeBlock]]:
        assert most >= 0
        before = len(self._empty)
        first = enumerate(list(islice(self._kept, max(0, most - before))), before)
        return ((at, self._named(block)) for at, block in first if block not in self._given_up)

    def redundant(self, spare: int) -> Iterator[FreeBlock]:
        computed = self._saved.difference(self._given_up, self.marks.decoded)
        used = [block for block in computed if self._users[block] and self._name[block] is not None]
        later = [block for block in islice(reversed(self._kept), max(0, len(self._kept) - spare)) if block in computed]
        return map(self._named, chain(used, later))

    def _named(self, block: int) -> FreeBlock:
        name = self._name[block]
        assert name is not None
        return FreeBlock(*name, block)

    def _blocks_of(self, group: int, block_hashes: Iterable[bytes]) -> list[int]:
        """Return all blocks with these hashes."""
        names = [(group, block_hash) for block_hash in dict.fromkeys(block_hashes)]
        found = map(self._cached.get, names)
        if not self._copies:
            return [block for block in found if block is not None]
        first = zip(names, found, strict=True)
        return [block for name, one in first if one is not None for block in (one, *self._copies.get(name, ()))]

    def _lose(self, block: int) -> None:
        self._saved.discard(block)
        self._given_up.discard(block)
        name, self._name[block] = self._name[block], None
        assert name is not None
        copies = self._copies.get(name)
        if copies is None:
            del self._cached[name]
            return
        if self._cached[name] != block:
            copies.remove(block)
        else:
            self._cached[name] = copies.pop(0)
        if not copies:
            del self._copies[name]
