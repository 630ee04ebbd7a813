"""What the manager wants done: codes to drop, bf16 to release, blocks to encode; and what is to be told of it."""

import sys
from collections import deque
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter

from manthan.manager.sessions.blocks import BlockTable
from manthan.manager.sessions.session import Block, CodeState, Drop, DropCause, Encoding, Eviction, News

_NONE, _QUEUED, _SPILLING, _COLD = CodeState  # looked up once, see `manthan.manager.sessions.blocks`
_GROUP_AND_TENANT = attrgetter("group", "tenant")

MOST_NEWS = 10_000
"""Of those that nobody takes, the oldest are forgotten."""


class Orders:
    """Filled by the manager's parts, emptied by whoever drives it. group: of the blocks of chains; None where they
    have no codes."""

    def __init__(self, blocks: BlockTable, group: int | None) -> None:
        self._blocks, self._group = blocks, group
        self._queue: deque[list[Block]] = deque()  # runs, each from its end; what is QUEUED no longer is passed over
        self.releases: list[bytes] = []
        self.drops: list[Drop] = []
        self.evictions: list[Eviction] = []
        self.news: deque[News] = deque(maxlen=MOST_NEWS)
        self.has_freed = False
        """Whether codes that were in the cold store have been dropped."""

    def encode(self, block: Block, encoding: Encoding, tenant: str) -> None:
        """A block of another group goes ahead of those of chains: the pool loses it sooner. What has no codes of its
        own is cold at once."""
        if block.group is None and self._group is None:
            self._blocks.store(block, encoding, tenant)
            return
        self._blocks.queue(block, encoding, tenant)
        if block.group is None:
            self._queue.append([block])
        else:
            self._queue.appendleft([block])

    def encode_all(self, blocks: Sequence[Block], encodings: Sequence[Encoding], tenant: str) -> None:
        """The same of blocks of chains without codes, the first to be encoded first."""
        if self._group is None:
            for block, encoding in zip(blocks, encodings, strict=True):
                self._blocks.store(block, encoding, tenant)
            return
        self._blocks.queue_new(blocks, encodings, tenant)
        self._queue.append(list(reversed(blocks)))

    def keep(self, blocks: Sequence[Block]) -> None:
        """Have the pool overwrite the saved ones among these before others, the last first."""
        self.releases += [block.key for block in reversed(blocks) if block.code is _COLD]

    def take_back(self, block: Block) -> None:
        """A queued block need not be encoded."""
        self._blocks.revert(block)

    def queued(self) -> set[Block]:
        """Blocks that wait to be encoded."""
        return {block for run in self._queue for block in run if block.code is _QUEUED}

    def forget_codes(self, blocks: Sequence[Block], cause: DropCause) -> None:
        """These are to leave the cold store."""
        for (of_group, _), some in groupby(blocks, _GROUP_AND_TENANT):
            alike, group = list(some), self._group if of_group is None else of_group
            if group is not None:
                self.drops.append(Drop(group, [block.key for block in alike], cause))
                self.has_freed = self.has_freed or any(block.code is _COLD for block in alike)
            self._blocks.forget_all(alike)

    def take_spills(self, limit: int) -> list[Block]:
        taken: list[Block] = []
        while self._queue and (room := limit - len(taken)) > 0:
            run = self._queue[0]
            some = [block for block in reversed(run[-room:]) if block.code is _QUEUED]
            del run[-room:]
            self._blocks.begin(some)  # before the next run, in which one may be again
            taken += some
            if not run:
                self._queue.popleft()
        return taken

    def take_drops(self) -> list[Drop]:
        """Return codes to remove, before any spill taken later is begun."""
        taken, self.drops = self.drops, []
        return taken

    def take_releases(self, limit: int = sys.maxsize) -> list[bytes]:
        """Return up to `limit` blocks whose bf16 copy nobody needs any more, the first to be overwritten first."""
        if not self.releases:
            return []
        keys, self.releases[:limit] = self.releases[:limit], []
        keys = list(dict.fromkeys(reversed(keys)))[::-1]  # who is there twice was put in order again
        find = self._blocks.named
        return [
            key
            for key in keys
            if (block := find(key)) is None or (code := block.code) is _COLD or (code is _NONE and not block.hot)
        ]

    def take_evictions(self) -> list[Eviction]:
        """Return evictions that ended since the last call, for logs and metrics."""
        taken, self.evictions = self.evictions, []
        return taken

    def take_news(self) -> list[News]:
        """Return what else happened to sessions since the last call."""
        taken = list(self.news)
        self.news.clear()
        return taken

    def __bool__(self) -> bool:
        """Whether something is to be taken, evictions and news aside, or the answer to a taken spill is outstanding."""
        return bool(self._blocks.queued or self.releases or self.drops or self._blocks.spilling)
