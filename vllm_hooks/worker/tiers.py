"""Memory that holds codes beside a GPU: pinned RAM, and a region of the GPU's own."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import NamedTuple

import torch

from manthan.manager.config.resolve import ConfigError
from manthan.manager.stores.arena import GRANULE, Arena, Extent
from manthan.vllm_hooks.telemetry.log import human_bytes
from manthan.vllm_hooks.worker.pinned import PinnedRam

Name = tuple[int, bytes]
"""KV cache group and block key."""


class Stored(NamedTuple):
    """An encoded block in a tier.

    extents: where it is; in several only where no hole was large enough. exact, first_token: as in the order to spill
    it; its header is checked against them.
    """

    extents: tuple[Extent, ...]
    nbytes: int
    exact: int
    first_token: int


class Tier:
    """One tier of one rank: encoded blocks in a buffer, least recently used first.

    codes: uint8 [nbytes]. A byte of it is free, taken (a block is being written to it), or a stored block's.
    """

    def __init__(self, codes: torch.Tensor, ram: PinnedRam | None = None) -> None:
        """ram: that the codes are in, if it is pinned yet to be used."""
        self.codes, self._ram = codes, ram
        self.arena = Arena(0 if ram else len(codes))
        self._spans = 0
        self._blocks: OrderedDict[Name, Stored] = OrderedDict()
        self.grow()

    @classmethod
    def on_device(cls, max_bytes: int, device: torch.device) -> "Tier":
        """GPU memory, allocated now; raises ConfigError if there is not so much."""
        try:
            return cls(torch.empty(max_bytes, dtype=torch.uint8, device=device))
        except torch.OutOfMemoryError:
            free, _ = torch.cuda.mem_get_info(device)
            raise ConfigError(
                f"cold_store.max_bytes asks for {human_bytes(max_bytes)} of memory on {device}, of which "
                f"{human_bytes(free)} are free: lower it, or leave more free with --gpu-memory-utilization."
            ) from None

    @classmethod
    def pinned(cls, max_bytes: int, device: torch.device) -> "Tier":
        """RAM that the GPU reads and writes itself, of which a part is there at once. Raises ConfigError."""
        ram = PinnedRam(max_bytes, device)
        return cls(ram.codes, ram)

    def start(self) -> None:
        """It is used from now on."""
        if self._ram is not None:
            self._ram.start()

    def grow(self) -> None:
        """What was pinned meanwhile can be taken."""
        if self._ram is not None:
            for span in self._ram.spans[self._spans :]:
                self.arena.join(span)
                self._spans += 1

    def __len__(self) -> int:
        return len(self._blocks)

    def put(self, blocks: Mapping[Name, Stored]) -> None:
        """Blocks that are not here yet are in the extents that were allocated for them.

        What was allocated beyond a block's bytes is free again.
        """
        for name, stored in blocks.items():
            extents = stored.extents
            taken = extents[0].nbytes if len(extents) == 1 else sum(size for _, size in extents)
            if taken - stored.nbytes >= GRANULE:
                stored = stored._replace(extents=self.arena.shrink(extents, stored.nbytes))
            self._blocks[name] = stored

    def run(self, group: int, keys: Iterable[bytes], in_place: bool) -> list[Stored]:
        """The first of these blocks, and those behind it that can be worked on together with it: with as many exact
        tokens and, where they are to be read in place, in one extent as well or not. Empty if the first is not here."""
        found: list[Stored] = []
        for stored in map(self._blocks.get, zip(repeat(group), keys)):
            if stored is None:
                break
            if found and stored.exact != found[0].exact:
                break
            if in_place and found and (len(stored.extents) == 1) != (len(found[0].extents) == 1):
                break
            found.append(stored)
        return found

    def used(self, group: int, keys: Iterable[bytes]) -> None:
        """These blocks, which are here, are used now."""
        for key in keys:
            self._blocks.move_to_end((group, key))

    def go_first(self, group: int, keys: Sequence[bytes]) -> None:
        """These blocks, as far as they are here, are to be taken out before all others, in this order."""
        for key in reversed(keys):
            if (group, key) in self._blocks:
                self._blocks.move_to_end((group, key), last=False)

    def oldest(self) -> tuple[Name, Stored] | None:
        """The block that was not used for longest."""
        return next(iter(self._blocks.items()), None)

    def drop(self, names: Iterable[Name]) -> None:
        """Remove blocks; unknown names are ignored."""
        for name in names:
            stored = self._blocks.pop(name, None)
            if stored is not None:
                self.arena.free(stored.extents)

    def clear(self) -> None:
        """Remove all blocks; what is taken stays so."""
        for stored in self._blocks.values():
            self.arena.free(stored.extents)
        self._blocks.clear()

    def release(self) -> None:
        """Unpin RAM; the tier is of no use afterwards."""
        if self._ram is not None:
            self._ram.close()
        self.codes = self.codes[:0]


class Demotion(NamedTuple):
    """A block that moves from the device to the host to make room; its codes are yet to be copied."""

    name: Name
    source: tuple[Extent, ...]
    target: tuple[Extent, ...]
    nbytes: int


class Taken(NamedTuple):
    """Room for a new block. in_place: it can be encoded there, rather than in a staging buffer."""

    tier: Tier
    extents: tuple[Extent, ...]
    in_place: bool


class Run(NamedTuple):
    """Stored blocks that are worked on together. in_place: where they are, rather than in a staging buffer."""

    tier: Tier
    in_place: bool
    blocks: list[Stored]


class Tiers:
    """The tiers of one rank, fastest first: the device, the host, or the device spilling to the host.

    New codes go to the first tier. When the device is full, codes in it move to the host: those that the policy chose,
    or else that were not used for longest. Where that frees too little, since the rest is still being written to, new
    codes go to the host at once. The manager sees to it that both together never have to hold more than
    `TierBytes.usable`.
    """

    def __init__(self, device: Tier | None, host: Tier | None) -> None:
        self.device, self.host = device, host
        self.all = [tier for tier in (device, host) if tier is not None]
        self.first = self.all[0]

    def start(self) -> None:
        """They are used from now on."""
        for tier in self.all:
            tier.start()

    def take(self, nbytes: int, count: int) -> tuple[list[Taken], list[Demotion]]:
        """Room for new blocks of so many bytes each, or for as many as fit; and what must be copied before it is
        used."""
        for tier in self.all:
            tier.grow()
        on_device, demotions = self.first is self.device, list[Demotion]()
        found = self.first.arena.allocate_some(nbytes, count)
        taken = [Taken(self.first, extents, on_device and len(extents) == 1) for extents in found]
        while len(taken) < count and (one := self._take(nbytes, demotions)):
            taken.append(one)
        return taken, demotions

    def find(self, group: int, keys: Sequence[bytes]) -> Run | None:
        """The first of these blocks and its run; None if no tier has it."""
        for tier in self.all:
            if blocks := tier.run(group, keys, tier is self.device):
                if len(self.all) > 1:  # where nothing moves down, the order does not matter
                    tier.used(group, keys[: len(blocks)])
                return Run(tier, tier is self.device and len(blocks[0].extents) == 1, blocks)
        return None

    def put(self, tier: Tier, blocks: Mapping[Name, Stored]) -> None:
        """Blocks are in the room that was taken for them, and in no tier where they were before."""
        for other in self.all:
            other.drop(blocks)
        tier.put(blocks)

    def go_first(self, group: int, keys: Sequence[bytes]) -> None:
        """These blocks move down before all others, in this order."""
        self.first.go_first(group, keys)

    def drop(self, group: int, keys: Sequence[bytes]) -> None:
        for tier in self.all:
            tier.drop(zip(repeat(group), keys))

    def clear(self) -> None:
        for tier in self.all:
            tier.clear()

    @property
    def used(self) -> int:
        """Bytes of all tiers that are stored blocks' or taken."""
        return sum(tier.arena.used for tier in self.all)

    def release(self) -> None:
        for tier in self.all:
            tier.release()

    def _take(self, nbytes: int, demotions: list[Demotion]) -> Taken | None:
        arena = self.first.arena
        extents = arena.allocate(nbytes)
        while extents is None and nbytes <= arena.nbytes and self._demote(demotions):
            extents = arena.allocate(nbytes)
        if extents is not None:
            return Taken(self.first, extents, self.first is self.device and len(extents) == 1)
        if self.host is None or self.host is self.first or (extents := self.host.arena.allocate(nbytes)) is None:
            return None
        return Taken(self.host, extents, False)

    def _demote(self, demotions: list[Demotion]) -> bool:
        """Move the device's oldest block to the host; whether there was one, and room for it."""
        if self.host is None or self.host is self.first or (oldest := self.first.oldest()) is None:
            return False
        name, stored = oldest
        target = self.host.arena.allocate(stored.nbytes)
        if target is None:
            return False
        self.first.drop([name])
        self.host.put({name: stored._replace(extents=target)})
        demotions.append(Demotion(name, stored.extents, target, stored.nbytes))
        return True
