"""Every block the manager knows, and counts over them that are always exact."""

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from manthan.manager.sessions.session import Block, CodeState, Session


class BlockTable:
    """Blocks by key. All changes go through `change`, so that the counts need no scan.

    A block is forgotten when no session uses it and it has no codes.
    exact_parts: blocks' room that an exact copy takes beside the codes.
    """

    def __init__(self, exact_parts: int = 0) -> None:
        self.exact_parts = exact_parts
        self._blocks: dict[bytes, Block] = {}
        self.hot = 0
        """Blocks that a session believes to be in vLLM's pool."""
        self.exposed = 0
        """Blocks whose only copy vLLM may overwrite."""
        self.moved = 0
        """Room of the codes, and of exact copies beside them, that had to leave the fast tier."""
        self.copies: OrderedDict[bytes, Block] = OrderedDict()
        """Blocks that have an exact copy, or room for one; those used least recently first."""
        self.reserved_of: Counter[str] = Counter()
        """By tenant, what `reserved` counts together."""
        self._codes: Counter[CodeState] = Counter()
        self._copies: Counter[CodeState] = Counter()  # of blocks in `copies`

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks.values())

    @property
    def queued(self) -> int:
        return self._codes[CodeState.QUEUED]

    @property
    def spilling(self) -> int:
        return self._codes[CodeState.SPILLING]

    @property
    def cold(self) -> int:
        return self._codes[CodeState.COLD]

    @property
    def reserved(self) -> int:
        """Blocks' room that is taken in the cold store, now or as soon as they are encoded."""
        return self.queued + self.spilling + self.cold + self.exact_parts * len(self.copies)

    @property
    def stored(self) -> int:
        """The same without what is still queued."""
        copies = len(self.copies) - self._copies[CodeState.QUEUED]
        return self.spilling + self.cold + self.exact_parts * copies

    @property
    def copied(self) -> int:
        """Cold blocks that have an exact copy."""
        return self._copies[CodeState.COLD]

    def get(self, key: bytes) -> Block | None:
        return self._blocks.get(key)

    def obtain(self, key: bytes, depth: int, session: Session) -> Block:
        """The block of that key, new if need be; `depth` is its place in every chain, `session` needs it."""
        block = self._blocks.get(key)
        if block is None:
            block = self._blocks[key] = Block(key, depth, tenant=session.tenant)
        return block

    def known(self, keys: Sequence[bytes]) -> int:
        """How many of these keys, from the first on without a gap, some session names. O(log n).

        A session that names a block names all before it.
        """
        return bisect_left(range(len(keys)), True, key=lambda depth: keys[depth] not in self._blocks)

    def pin(self, blocks: Iterable[Block], by: int) -> None:
        """Add to the pins of blocks, on which no total depends."""
        for block in blocks:
            block.pins += by

    def mark_moved(self, block: Block, moved: bool) -> None:
        """The codes left the fast tier, or are in it (again), or are gone."""
        self.moved += (moved - block.moved) * self.room(block)
        block.moved = moved

    def room(self, block: Block) -> int:
        """Blocks' room that its codes take, with an exact copy beside them if there is one."""
        return 1 + self.exact_parts * block.exact

    def mark_exact(self, block: Block, exact: bool) -> None:
        """Room for an exact copy is taken, or given back; the block has codes, or will have."""
        by = (exact - block.exact) * self.exact_parts
        self.reserved_of[block.tenant] += by
        self.moved += by * block.moved
        self._copies[block.code] += exact - block.exact
        block.exact = exact
        if exact:
            self.copies[block.key] = block
        else:
            self.copies.pop(block.key, None)

    def move(self, blocks: Iterable[Block], *, hot: int, running: int) -> None:
        """A session that holds these blocks changed its state: `change` for all of them at once, for long chains."""
        for block in blocks:
            was_hot, was_exposed = block.hot > 0, block.exposed
            block.hot += hot
            block.running += running
            self.hot += (block.hot > 0) - was_hot
            self.exposed += block.exposed - was_exposed

    def change(
        self,
        block: Block,
        *,
        users: int = 0,
        hot: int = 0,
        running: int = 0,
        code: CodeState | None = None,
    ) -> None:
        """Add to the block's counts, set the state of its codes, and keep the totals."""
        was_hot, was_exposed = block.hot > 0, block.exposed
        block.users += users
        block.hot += hot
        block.running += running
        if code is not None:
            self.reserved_of[block.tenant] += (code is not CodeState.NONE) - block.reserves
            was, block.code = block.code, code
            self._codes[was] -= 1
            self._codes[code] += 1
            if block.moved:
                self.mark_moved(block, False)
            if block.exact:
                self._copy_follows(block, was)
        self.hot += (block.hot > 0) - was_hot
        self.exposed += block.exposed - was_exposed
        if not (block.users or block.reserves):
            self._blocks.pop(block.key, None)

    def _copy_follows(self, block: Block, was: CodeState) -> None:
        """The codes beside which there is an exact copy changed their state; without them it is of no use."""
        self._copies[was] -= 1
        self._copies[block.code] += 1
        if block.code is CodeState.NONE:
            self.mark_exact(block, False)
