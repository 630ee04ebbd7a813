"""Every block the manager knows, and totals over them that are always exact."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import cast

from manthan.manager.sessions.session import NO_CODES, Block, CodeState, Encoding, Session

ELSEWHERE = "\0"
"""Whose codes are that another engine has stored: they count towards no share, and no tenant can be called so."""


class BlockTable:
    """Blocks of chains by key, and those of other KV cache groups by group and key. All changes go through here, so
    that the totals need no scan.

    A block is forgotten when no session uses it and it has no codes. Bytes are those of all ranks together.
    """

    def __init__(self) -> None:
        self._blocks: dict[bytes, Block] = {}
        self._beside: dict[tuple[int, bytes], Block] = {}
        self.hot = 0
        """Blocks that a session believes to be in vLLM's pool."""
        self.exposed = 0
        """Blocks whose only copy vLLM may overwrite."""
        self.exact = 0
        """Cold blocks that keep tokens exact."""
        self.reserved = 0
        """Bytes that are taken in the cold store, now or as soon as what is ordered is encoded."""
        self.cold_of: Counter[int | None] = Counter()
        """Cold blocks by KV cache group; None for those of chains."""
        self.moved = 0
        """Bytes of the codes that had to leave the fast tier."""
        self.reserved_of: Counter[str] = Counter()
        """By tenant, what `reserved` counts together."""
        self.changed: dict[tuple[int | None, bytes], None] | None = None
        """By group and key, blocks that are not what they were in the cold store, where somebody asks for them."""
        self._count: Counter[CodeState] = Counter()
        self._nbytes: Counter[CodeState] = Counter()  # without what is to be replaced

    def __len__(self) -> int:
        return len(self._blocks) + len(self._beside)

    def __iter__(self) -> Iterator[Block]:
        return chain(self._blocks.values(), self._beside.values())

    @property
    def queued(self) -> int:
        return self._count[CodeState.QUEUED]

    @property
    def spilling(self) -> int:
        return self._count[CodeState.SPILLING]

    @property
    def cold(self) -> int:
        return self._count[CodeState.COLD]

    @property
    def stored(self) -> int:
        """`reserved` without what is still queued."""
        return self.reserved - self._nbytes[CodeState.QUEUED]

    @property
    def cold_nbytes(self) -> int:
        """Bytes of codes in the cold store."""
        return self.stored - self._nbytes[CodeState.SPILLING]

    def get(self, key: bytes, group: int | None = None) -> Block | None:
        """A chain's block, or that of another group."""
        return self._blocks.get(key) if group is None else self._beside.get((group, key))

    def obtain(self, key: bytes, depth: int, session: Session) -> Block:
        """The block of that key, new if need be; `depth` is its place in every chain, `session` needs it."""
        block = self._blocks.get(key)
        if block is None:
            block = self._blocks[key] = Block(key, depth, tenant=session.tenant)
        return block

    def obtain_beside(self, group: int, key: bytes, depth: int, session: Session) -> Block:
        """The same of another group's block."""
        block = self._beside.get((group, key))
        if block is None:
            block = self._beside[group, key] = Block(key, depth, group, tenant=session.tenant)
        return block

    def known(self, keys: Sequence[bytes]) -> int:
        """How many of these keys, from the first on without a gap, some session names. O(log n).

        A session that names a block names all before it.
        """
        return bisect_left(range(len(keys)), True, key=lambda depth: keys[depth] not in self._blocks)

    def run(self, keys: Sequence[bytes]) -> list[Block]:
        """Chains' blocks of these keys, up to the first that nobody names."""
        found = list(map(self._blocks.get, keys[: self.known(keys)]))
        end = found.index(None) if None in found else len(found)
        return cast("list[Block]", found[:end])

    def touch(self, key: bytes, group: int | None = None) -> None:
        """What is stored of the block, or behind it, is not what it was, or nobody needs it any more."""
        if self.changed is not None:
            self.changed[group, key] = None

    # -- who needs it ---------------------------------------------------------------------------------

    def pin(self, blocks: Iterable[Block], by: int) -> None:
        """Add to the pins of blocks, on which no total depends."""
        for block in blocks:
            block.pins += by

    def move(self, blocks: Sequence[Block], *, hot: int, running: int) -> None:
        """A session that holds these blocks changed its state: its blocks' counts, -1, 0 or 1 each, and the totals."""
        none = CodeState.NONE  # looked up once: that takes longer than the rest of a turn
        bare = [block for block in blocks if block.code is none]
        exposed = _exposed(bare)
        for block in blocks:
            block.hot += hot
            block.running += running
        if hot:
            edge = 1 if hot > 0 else 0
            self.hot += hot * [block.hot for block in blocks].count(edge)
        self.exposed += _exposed(bare) - exposed

    def change(self, blocks: Sequence[Block], *, users: int, hot: int, running: int) -> None:
        """Add to the blocks' counts, -1, 0 or 1 each, and keep the totals."""
        for block in blocks:
            block.users += users
        if users and self.changed is not None:
            self.changed.update(((block.group, block.key), None) for block in blocks)
        self.move(blocks, hot=hot, running=running)
        if users < 0:
            for block in blocks:
                self._forget_if_unused(block)

    # -- its codes ------------------------------------------------------------------------------------

    def queue(self, block: Block, encoding: Encoding, tenant: str) -> None:
        """The block is to be encoded, into so many bytes at most; codes that it has stay until they are replaced."""
        old = block.encoding if block.code is CodeState.COLD else None
        self._set(block, CodeState.QUEUED, encoding, old, tenant)

    def queue_all(self, blocks: Sequence[Block], encodings: Sequence[Encoding], tenant: str) -> None:
        """`queue` for blocks of chains that have no codes, all at once, for long chains."""
        self.exposed -= _exposed(blocks)
        queued = CodeState.QUEUED
        for block, encoding in zip(blocks, encodings, strict=True):
            block.code, block.encoding, block.tenant = queued, encoding, tenant
        if self.changed is not None:
            self.changed.update(((block.group, block.key), None) for block in blocks)
        nbytes = sum(encoding.nbytes for encoding in encodings)
        self._count[queued] += len(blocks)
        self._nbytes[queued] += nbytes
        self.reserved += nbytes
        if nbytes:
            self.reserved_of[tenant] += nbytes

    def begin(self, block: Block) -> None:
        """A queued block is being encoded."""
        assert block.code is CodeState.QUEUED
        for state, change in ((CodeState.QUEUED, -1), (CodeState.SPILLING, +1)):
            self._count[state] += change
            self._nbytes[state] += change * block.encoding.nbytes
        block.code = CodeState.SPILLING

    def store(self, block: Block, encoding: Encoding, tenant: str | None = None) -> None:
        """The codes are in the cold store, and this is what they take; older ones are replaced."""
        self._set(block, CodeState.COLD, encoding, None, tenant)

    def revert(self, block: Block) -> None:
        """The block will not be encoded; codes that were to be replaced stay."""
        if block.old is not None:
            self._set(block, CodeState.COLD, block.old, None)
        else:
            self.forget(block)

    def forget(self, block: Block) -> None:
        """The block has no codes any more."""
        self._set(block, CodeState.NONE, NO_CODES, None)

    def mark_moved(self, block: Block, moved: bool) -> None:
        """The codes left the fast tier, or are in it (again)."""
        self.moved += (moved - block.moved) * block.encoding.nbytes
        block.moved = moved

    def _set(
        self, block: Block, code: CodeState, encoding: Encoding, old: Encoding | None, tenant: str | None = None
    ) -> None:
        self.touch(block.key, block.group)
        if block.moved:
            self.mark_moved(block, False)
        was_exposed = block.exposed
        if block.code is not CodeState.NONE:
            self._add(block, -1)
        block.code, block.encoding, block.old = code, encoding, old
        if tenant is not None:
            block.tenant = tenant
        if code is not CodeState.NONE:
            self._add(block, +1)
        else:
            self._forget_if_unused(block)
        self.exposed += block.exposed - was_exposed

    def _add(self, block: Block, sign: int) -> None:
        """Add a block with codes to the totals, or take it out."""
        code, (nbytes, exact, _) = block.code, block.encoding
        self._count[code] += sign
        self._nbytes[code] += sign * nbytes
        if code is CodeState.COLD:
            self.exact += sign * (exact > 0)
            self.cold_of[block.group] += sign
        taken = sign * (nbytes if block.old is None else nbytes + block.old.nbytes)
        self.reserved += taken
        self.reserved_of[block.tenant] += taken
        if not self.reserved_of[block.tenant]:
            del self.reserved_of[block.tenant]

    def _forget_if_unused(self, block: Block) -> None:
        if block.users or block.reserves:
            return
        if block.group is None:
            self._blocks.pop(block.key, None)
        else:
            self._beside.pop((block.group, block.key), None)


def _exposed(bare: Sequence[Block]) -> int:
    """How many of these blocks without codes are `exposed`."""
    return len([block for block in bare if block.hot > 0 and not block.running])
