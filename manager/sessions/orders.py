"""What the manager wants done: codes to drop, bf16 to release, blocks to encode; and what is to be told of it."""

from collections import OrderedDict

from manthan.manager.sessions.blocks import BlockTable
from manthan.manager.sessions.session import Block, CodeState, Drop, Encoding, Eviction


class Orders:
    """Filled by the manager's parts, emptied by whoever drives it."""

    def __init__(self, blocks: BlockTable) -> None:
        self._blocks = blocks
        self.queue: OrderedDict[bytes, None] = OrderedDict()
        """The QUEUED blocks, first come first."""
        self.releases: list[bytes] = []
        self.drops: list[Drop] = []
        self.evictions: list[Eviction] = []

    def encode(self, block: Block, encoding: Encoding, tenant: str) -> None:
        self._blocks.queue(block, encoding, tenant)
        self.queue[block.key] = None

    def take_back(self, block: Block) -> None:
        """A queued block need not be encoded."""
        del self.queue[block.key]
        self._blocks.revert(block)

    def take_spills(self, limit: int) -> list[Block]:
        taken: list[Block] = []
        while self.queue and len(taken) < limit:
            key, _ = self.queue.popitem(last=False)
            block = self._blocks.get(key)
            assert block is not None
            assert block.code is CodeState.QUEUED
            self._blocks.begin(block)
            taken.append(block)
        return taken

    def take_drops(self) -> list[Drop]:
        taken, self.drops = self.drops, []
        return taken

    def take_releases(self) -> list[bytes]:
        keys, self.releases = self.releases, []
        return [key for key in keys if (b := self._blocks.get(key)) is None or not (b.hot or b.in_flight)]

    def take_evictions(self) -> list[Eviction]:
        taken, self.evictions = self.evictions, []
        return taken

    def __bool__(self) -> bool:
        """Whether something is to be taken, evictions aside, or the answer to a taken spill is outstanding."""
        return bool(self.queue or self.releases or self.drops or self._blocks.spilling)
