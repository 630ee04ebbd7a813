"""Every block the manager knows, and totals over them that are always exact."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import cast

from manthan.manager.sessions.session import NO_CODES, Block, BlockName, CodeState, Encoding, Session

_NONE, _QUEUED, _SPILLING, _COLD = CodeState
# Python 3.11 looks up a member of an enum in a tenth of a microsecond, as long as the rest of a block's bookkeeping.

NOBODY = "\0"
"""Tenant of blocks that another engine has stored. They count towards no share, and no tenant can be called so."""


class BlockTable:
    """Blocks of chains by key, and those of other KV cache groups by group and key. All changes go through here, so
    that the totals need no scan.

    A block is forgotten when no session uses it and it has no codes. Bytes are those of all ranks together.
    """

    def __init__(self) -> None:
        self._blocks: dict[BlockName, Block] = {}
        self.named: Callable[[BlockName], Block | None] = self._blocks.get
        """The block of that name, for long loops."""
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
        self.moved: Counter[int] = Counter()
        """By its number, bytes of the codes that had to leave a fast tier."""
        self.reserved_of: Counter[str] = Counter()
        """By tenant, what `reserved` counts together."""
        self.changed: dict[tuple[int | None, bytes], None] | None = None
        """By group and key, blocks whose codes came or went, or that are forgotten, where somebody asks for them."""
        self._count: Counter[CodeState] = Counter()
        self._nbytes: Counter[CodeState] = Counter()  # without what is to be replaced

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks.values())

    @property
    def queued(self) -> int:
        return self._count[_QUEUED]

    @property
    def spilling(self) -> int:
        return self._count[_SPILLING]

    @property
    def cold(self) -> int:
        return self._count[_COLD]

    @property
    def stored(self) -> int:
        """`reserved` without what is still queued."""
        return self.reserved - self._nbytes[_QUEUED]

    @property
    def cold_nbytes(self) -> int:
        """Bytes of codes in the cold store."""
        return self.stored - self._nbytes[_SPILLING]

    def get(self, key: bytes, group: int | None = None) -> Block | None:
        """A chain's block, or that of another group."""
        return self._blocks.get(key if group is None else (group, key))

    def of(self, keys: Sequence[bytes], group: int | None = None) -> list[Block | None]:
        """Several blocks of one group, as `get` finds them."""
        return [self._blocks.get(key if group is None else (group, key)) for key in keys]

    def join(self, keys: Sequence[bytes], session: Session) -> None:
        """A HOT session's chain goes on with the blocks of these keys, which are new if need be."""
        chain, blocks, tenant = session.chain, self._blocks, session.tenant
        hot = exposed = 0
        for depth, key in enumerate(keys, len(chain)):
            block = blocks.get(key)
            if block is None:  # by place, which is faster: users, hot and running are 1
                block = blocks[key] = Block(key, depth, None, _NONE, NO_CODES, None, 1, 1, 1, 0, tenant, session)
                hot += 1
            else:
                hot += not block.hot
                exposed += block.hot > 0 and not block.running and block.code is _NONE
                block.users += 1
                block.hot += 1
                block.running += 1
                if block.origin is None:
                    block.origin = session
            chain.append(block)
        self.hot += hot
        self.exposed -= exposed

    def leave(self, blocks: Sequence[Block], session: Session, *, hot: int, running: int) -> None:
        """A session's chain ends before these blocks; hot, running: whether it counted as such."""
        if hot or running:
            self.move(blocks, hot=-hot, running=-running)
        known, changed = self._blocks, self.changed
        for block in blocks:
            block.users = users = block.users - 1
            if block.origin is session:
                block.origin = None
            if not users and block.code is _NONE:
                known.pop(block.key, None)
                if changed is not None:
                    changed[None, block.key] = None

    def obtain_beside(self, group: int, key: bytes, depth: int, session: Session) -> Block:
        """The same of another group's block."""
        block = self._blocks.get((group, key))
        if block is None:
            block = self._blocks[group, key] = Block(key, depth, group, tenant=session.tenant)
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

    def safe(self, names: Iterable[BlockName | None], most: int) -> int:
        """Return how many of these blocks, so many at most, come before the first that is at risk: whose only copy is
        bf16 that is not held, since it waits to be encoded or nobody has ordered that. None stands for no block.

        Written for speed: it is asked of thousands of blocks.
        """
        find, count = self._blocks.get, 0
        for count, name in enumerate(islice(names, most), 1):
            if name is not None and (block := find(name)) is not None:
                code = block.code
                if code is _QUEUED or (code is _NONE and block.hot):
                    return count - 1
        return count

    def touch(self, key: bytes, group: int | None = None) -> None:
        """Note that the block's codes came or went, that it is forgotten, or that it is to be looked at again."""
        if self.changed is not None:
            self.changed[group, key] = None

    # -- who needs it ---------------------------------------------------------------------------------

    def pin(self, blocks: Iterable[Block], by: int) -> None:
        """Add to the pins of blocks, on which no total depends."""
        for block in blocks:
            block.pins += by

    def move(self, blocks: Sequence[Block], *, hot: int, running: int) -> None:
        """A session that holds these blocks changed its state: add -1, 0 or 1 to their counts, and keep the
        totals."""
        if not hot:
            self._run(blocks, running)
            return
        edge = 1 if hot > 0 else 0
        at_edge = exposed = 0
        for block in blocks:
            if block.code is _NONE:
                exposed -= block.hot > 0 and not block.running
                block.running = left = block.running + running
                block.hot = users = block.hot + hot
                exposed += users > 0 and not left
            else:
                block.running += running
                block.hot = users = block.hot + hot
            at_edge += users == edge
        self.hot += hot * at_edge
        self.exposed += exposed

    def _run(self, blocks: Sequence[Block], running: int) -> None:
        """Requests of a session that is hot before and after begin or end: all of its blocks are hot."""
        if not running:
            return
        edge = 1 if running > 0 else 0
        exposed = 0
        for block in blocks:
            block.running = left = block.running + running
            if left == edge and block.code is _NONE:
                exposed -= running
        self.exposed += exposed

    def use(self, blocks: Sequence[Block], by: int) -> None:
        """Add to the number of anchors that blocks of other groups are part of."""
        for block in blocks:
            block.users += by
            self._forget_if_unused(block)

    # -- its codes ------------------------------------------------------------------------------------

    def queue(self, block: Block, encoding: Encoding, tenant: str) -> None:
        """The block is to be encoded, into so many bytes at most; codes that it has stay until they are replaced."""
        old = block.encoding if block.code is _COLD else None
        self._set(block, _QUEUED, encoding, old, tenant)

    def queue_new(self, blocks: Sequence[Block], encodings: Iterable[Encoding], tenant: str) -> None:
        """The same of blocks without codes, all at once."""
        nbytes = exposed = 0
        for block, encoding in zip(blocks, encodings, strict=True):
            exposed += block.hot > 0 and not block.running
            block.code, block.encoding, block.tenant = _QUEUED, encoding, tenant
            nbytes += encoding.nbytes
        self.exposed -= exposed
        self._count[_QUEUED] += len(blocks)
        self._nbytes[_QUEUED] += nbytes
        self._reserve(nbytes, tenant)

    def begin(self, blocks: Sequence[Block]) -> None:
        """Queued blocks are being encoded."""
        nbytes = 0
        for block in blocks:
            nbytes += block.encoding.nbytes
            block.code = _SPILLING
        for code, sign in ((_QUEUED, -1), (_SPILLING, +1)):
            self._count[code] += sign * len(blocks)
            self._nbytes[code] += sign * nbytes

    def store(self, block: Block, encoding: Encoding, tenant: str | None = None) -> None:
        """The codes are in the cold store, and this is what they take; older ones are replaced."""
        self._set(block, _COLD, encoding, None, tenant)

    def settle(self, blocks: Sequence[Block], sizes: Sequence[int]) -> None:
        """Blocks of one group that were being encoded are in the cold store, where each takes so many bytes."""
        changed, group = self.changed, blocks[0].group
        count = exact = reserved = stored = 0
        for block, nbytes in zip(blocks, sizes, strict=True):
            at_most, tokens, codec = block.encoding
            if block.old is not None:
                self.store(block, Encoding.of(nbytes, tokens, codec))
                continue
            if changed is not None:
                changed[group, block.key] = None
            block.code = _COLD
            if nbytes != at_most:
                block.encoding = Encoding.of(nbytes, tokens, codec)
                self._reserve(nbytes - at_most, block.tenant)
            count, exact = count + 1, exact + (tokens > 0)
            reserved, stored = reserved + at_most, stored + nbytes
        self._count[_SPILLING] -= count
        self._count[_COLD] += count
        self._nbytes[_SPILLING] -= reserved
        self._nbytes[_COLD] += stored
        self.exact += exact
        self.cold_of[group] += count

    def revert(self, block: Block) -> None:
        """The block will not be encoded; codes that were to be replaced stay."""
        if block.old is not None:
            self._set(block, _COLD, block.old, None)
        else:
            self.forget(block)

    def forget(self, block: Block) -> None:
        """The block has no codes any more."""
        self._set(block, _NONE, NO_CODES, None)

    def forget_all(self, blocks: Sequence[Block]) -> None:
        """The same of several of one group and tenant, most of which are cold and in every fast tier."""
        changed, group, tenant = self.changed, blocks[0].group, blocks[0].tenant
        count = freed = exact = exposed = 0
        for block in blocks:
            if block.code is not _COLD or block.moved:
                self.forget(block)
                continue
            if changed is not None:
                changed[group, block.key] = None
            nbytes, tokens, _ = block.encoding
            count, freed, exact = count + 1, freed + nbytes, exact + (tokens > 0)
            block.code, block.encoding = _NONE, NO_CODES
            if block.users:
                exposed += block.hot > 0 and not block.running
            else:
                self._blocks.pop(block.name, None)
        self.exposed += exposed
        self.exact -= exact
        self._count[_COLD] -= count
        self._nbytes[_COLD] -= freed
        self.cold_of[group] -= count
        self._reserve(-freed, tenant)

    def mark_moved(self, block: Block, moved: int) -> None:
        """The codes left these fast tiers, as `Block.moved` has them, and are in all others (again)."""
        changed = moved ^ block.moved
        for tier in range(changed.bit_length()):
            if changed >> tier & 1:
                self.moved[tier] += block.encoding.nbytes if moved >> tier & 1 else -block.encoding.nbytes
        block.moved = moved

    def _set(
        self, block: Block, code: CodeState, encoding: Encoding, old: Encoding | None, tenant: str | None = None
    ) -> None:
        if self.changed is not None:
            self.touch(block.key, block.group)
        if block.moved:
            self.mark_moved(block, 0)
        was_none, is_none = block.code is _NONE, code is _NONE
        if was_none != is_none and block.hot and not block.running:
            self.exposed += is_none - was_none
        if not was_none:
            self._add(block, -1)
        block.code, block.encoding, block.old = code, encoding, old
        if tenant is not None:
            block.tenant = tenant
        if not is_none:
            self._add(block, +1)
        else:
            self._forget_if_unused(block)

    def _add(self, block: Block, sign: int) -> None:
        """Add a block with codes to the totals, or take it out."""
        code, (nbytes, exact, _) = block.code, block.encoding
        self._count[code] += sign
        self._nbytes[code] += sign * nbytes
        if code is _COLD:
            self.exact += sign * (exact > 0)
            self.cold_of[block.group] += sign
        self._reserve(sign * (nbytes if block.old is None else nbytes + block.old.nbytes), block.tenant)

    def _reserve(self, nbytes: int, tenant: str) -> None:
        self.reserved += nbytes
        self.reserved_of[tenant] += nbytes
        if not self.reserved_of[tenant]:
            del self.reserved_of[tenant]

    def _forget_if_unused(self, block: Block) -> None:
        if block.users or block.reserves:
            return
        self._blocks.pop(block.name, None)
        self.touch(block.key, block.group)
