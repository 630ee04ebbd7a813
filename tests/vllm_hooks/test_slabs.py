"""Where compressed blocks lie next to a GPU: nothing overlaps, nothing is lost, whatever its size."""

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

import fake_cuda
import numpy as np
import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from integrity import check_store

from manthan.manager.config.resolve import ConfigError
from manthan.manager.tiers.arena import GRANULE, Extent, room
from manthan.vllm_hooks.worker.capacity import TierBytes
from manthan.vllm_hooks.worker.slabs import Demotion, Slab, Slabs, Stored, Taken, pieces


def tier(nbytes: int) -> Slab:
    return Slab(torch.zeros(nbytes, dtype=torch.uint8))


def keep(tiers: Slabs, *keys: bytes, nbytes: int = GRANULE) -> list[Demotion]:
    """Put blocks into what is taken for them."""
    taken, demotions = tiers.take(nbytes, len(keys))
    for key, one in zip(keys, taken, strict=True):
        tiers.put(one.tier, {(0, key): Stored(one.extents, nbytes, 0, 0)})
    return demotions


def has(tier: Slab, key: bytes) -> bool:
    return (0, key) in tier


def test_a_full_device_moves_the_oldest_to_the_host() -> None:
    tiers = Slabs(tier(2 * GRANULE), tier(2 * GRANULE))
    assert keep(tiers, b"a", b"b") == []
    run = tiers.find(0, [b"a", b"b"])
    assert (run.tier, run.in_place, len(run.extents)) == (tiers.device, True, 2)
    tiers.find(0, [b"a"])  # b is the oldest now
    assert tiers.find(1, [b"b"]) is None
    source = tiers.device.stored((0, b"b")).extents
    [moved] = keep(tiers, b"c")
    assert (moved.name, moved.source, moved.nbytes) == ((0, b"b"), source, GRANULE)
    run = tiers.find(0, [b"b"])
    assert (run.tier, run.in_place, run.exact, run.extents) == (tiers.host, False, 0, [moved.target])
    assert (run.nbytes.tolist(), run.first_tokens.tolist()) == ([GRANULE], [0])
    assert tiers.device.stored((0, b"c")).extents == source
    assert len(tiers.find(0, [b"a", b"b"]).starts) == 1  # a run ends where its tier does
    keep(tiers, b"d")
    assert tiers.take(1, 2) == ([], [])
    assert fake_cuda.used(tiers) == 4 * GRANULE
    tiers.drop(0, [b"b", b"d"])
    tiers.drop(1, [b"c"])  # another group's
    assert tiers.find(0, [b"b"]) is None
    assert has(tiers.host, b"c")
    assert len(tiers.take(1, 1)[0]) == 1
    tiers.clear()
    assert fake_cuda.used(tiers) == GRANULE  # what was taken and never put


def test_blocks_are_cut_behind_any_of_their_parts() -> None:
    """In one piece or several, on the device or the host; the rest is free, and is to be erased."""
    device = tier(8 * GRANULE)
    tiers = Slabs(device, tier(4 * GRANULE))
    whole, pieces = (Extent(0, 4 * GRANULE),), (Extent(4 * GRANULE, GRANULE), Extent(6 * GRANULE, 2 * GRANULE))
    device.arena.allocate(8 * GRANULE)
    nbytes, inner = 3 * GRANULE, (GRANULE - 9, GRANULE + 7)
    stored = Stored(whole, nbytes, 0, 0, inner=inner)
    device.put({(0, b"a"): stored, (0, b"b"): stored._replace(extents=pieces), (0, b"c"): Stored((), 0, 0, 0)})
    assert device.stored((0, b"b")).inner == device.blocks()[0, b"a"].inner == inner
    tiers.trim(0, [b"a", b"b", b"c", b"d"], 3)
    assert device.stored((0, b"a")).nbytes == nbytes
    device.freed.clear()
    tiers.trim(0, [b"a", b"b"], 2)
    assert device.stored((0, b"a")) == Stored((Extent(0, 2 * GRANULE),), GRANULE + 7, 0, 0, inner=inner[:1])
    left = pieces[0], Extent(6 * GRANULE, GRANULE)
    assert device.stored((0, b"b")) == Stored(left, GRANULE + 7, 0, 0, inner=inner[:1])
    assert device.freed == [Extent(2 * GRANULE, GRANULE), Extent(7 * GRANULE, GRANULE)]
    tiers.trim(0, [b"b"], 1)
    assert device.stored((0, b"b")) == Stored(pieces[:1], GRANULE - 9, 0, 0)
    run = tiers.find(0, [b"a", b"b"])
    assert (run.nbytes.tolist(), run.pieces) == ([GRANULE + 7, GRANULE - 9], {})
    tiers.drop(0, [b"a", b"b"])
    assert not device._inner
    assert not device._pieces
    assert device.arena.used == GRANULE  # what was taken and never put


class TierMachine(RuleBasedStateMachine):
    """Two tiers, or one, whose blocks' bytes are written, moved and read as the path with a GPU does it.

    In order of age, as far as it is known; `taken` are blocks that are still being written.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rng = random.Random(5)
        self.bytes: dict[tuple[int, bytes], bytes] = {}
        self.taken: list[tuple[tuple[int, bytes], Taken, int]] = []

    @initialize(device=st.integers(0, 20), host=st.integers(0, 40))
    def begin(self, device: int, host: int) -> None:
        host = host if device else max(1, host)
        both = [tier(nbytes * GRANULE) if nbytes else None for nbytes in (device, host)]
        self.tiers = Slabs(*both)
        self.bound = 6 * GRANULE
        self.usable = TierBytes(device * GRANULE, host * GRANULE).usable({self.bound})

    keys = st.integers(0, 12).map(lambda n: bytes([n]) * (1 + n % 3))
    names = st.tuples(st.integers(0, 1), keys)
    sizes = st.integers(1, 6 * GRANULE)

    @rule(names=st.lists(names, min_size=1, max_size=4), nbytes=sizes)
    def take(self, names: list[tuple[int, bytes]], nbytes: int) -> None:
        used = fake_cuda.used(self.tiers)
        found, demotions = self.tiers.take(nbytes, len(names))
        for move in demotions:
            copy(self.tiers.device, move.source, self.tiers.host, move.target, move.nbytes)
        used += len(found) * room(nbytes)
        assert fake_cuda.used(self.tiers) == used
        assert len(found) == len(names) or used + room(nbytes) > self.usable  # what was promised is kept
        self.taken += [(name, taken, nbytes) for name, taken in zip(names, found, strict=False)]

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """A block is written, and takes as much as was taken for it or less; or it comes to nothing."""
        name, taken, nbytes = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))
        real = data.draw(st.integers(0, nbytes))
        if real:
            self.bytes[name] = self.rng.randbytes(real)
            write(taken, self.bytes[name])
            self.tiers.put(taken.tier, {name: Stored(taken.extents, real, real % 2, real)})
        else:
            taken.tier.arena.free(taken.extents)

    @rule(group=st.integers(0, 1), keys=st.lists(keys, unique=True))
    def drop(self, group: int, keys: list[bytes]) -> None:
        self.tiers.drop(group, keys)
        self.bytes = {name: kept for name, kept in self.bytes.items() if name[0] != group or name[1] not in keys}

    @rule()
    def clear(self) -> None:
        self.tiers.clear()
        self.bytes = {}

    @rule(group=st.integers(0, 1), keys=st.lists(keys, unique=True))
    def read(self, group: int, keys: list[bytes]) -> None:
        """A session is read run by run, and ends at the first block that is not there."""
        wanted = [self.bytes.get((group, key)) for key in keys]
        done = 0
        while done < len(keys) and (run := self.tiers.find(group, keys[done:])):
            read = zip(run.extents, run.nbytes.tolist(), run.first_tokens.tolist(), strict=True)
            for (extents, nbytes, first_token), right in zip(read, wanted[done:], strict=False):
                assert right is not None
                assert b"".join(spans(run.tier, extents, nbytes)) == right
                assert run.in_place == (run.tier is self.tiers.device and len(extents) == 1)
                assert (run.exact, first_token) == (len(right) % 2, len(right))
            done += len(run.starts)
        assert done == len(keys) or wanted[done] is None

    @invariant()
    def nothing_overlaps_and_nothing_is_lost(self) -> None:
        if not hasattr(self, "tiers"):
            return
        assert {name for one in self.tiers.all for name in one.blocks()} == self.bytes.keys()
        assert sum(len(one.blocks()) for one in self.tiers.all) == len(self.bytes)
        for one in self.tiers.all:
            check_store(one.arena)
            stored = [extent for block in one.blocks().values() for extent in block.extents]
            stored += [extent for _, taken, _ in self.taken if taken.tier is one for extent in taken.extents]
            stored.sort()
            assert all(a.start + a.nbytes <= b.start for a, b in pairwise(stored))
            assert sum(extent.nbytes for extent in stored) == one.arena.used
            assert one.arena.used + one.arena.available == len(one.buffer)
            for (group, key), block in one.blocks().items():
                assert b"".join(spans(one, block.extents, block.nbytes)) == self.bytes[group, key]


def spans(tier: Slab, extents: Sequence[Extent], nbytes: int) -> Iterator[memoryview]:
    """The first so many bytes of a block, as views."""
    for start, size in extents:
        yield memoryview(tier.buffer.numpy())[start : start + min(size, nbytes)]
        nbytes -= min(size, nbytes)


def write(taken: Taken, numbers: bytes) -> None:
    at = 0
    for view in spans(taken.tier, taken.extents, len(numbers)):
        view[:] = numbers[at : at + len(view)]
        at += len(view)


def copy(source: Slab, froms: Sequence[Extent], target: Slab, tos: Sequence[Extent], nbytes: int) -> None:
    for at, to, size in pieces([froms], [tos], [nbytes]).t().tolist():
        target.buffer[to : to + size] = source.buffer[at : at + size]


TestTiers = TierMachine.TestCase
TestTiers.settings = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)


@given(st.data())
def test_pieces_are_the_blocks_bytes_in_order(data: st.DataObject) -> None:
    """Whatever extents a block lies in on either side."""
    blocks = data.draw(st.integers(1, 3))
    sizes = [data.draw(st.integers(1, 4 * GRANULE)) for _ in range(blocks)]
    shapes = [[data.draw(st.lists(st.integers(1, 3), min_size=4, max_size=4)) for _ in range(blocks)] for _ in range(2)]
    sides = []
    for shape in shapes:
        order = iter(random.Random(blocks).sample(range(100), 100))
        sides.append([[Extent(next(order) * 3 * GRANULE, size * GRANULE) for size in extents] for extents in shape])
    source = np.random.default_rng(blocks).integers(0, 256, 300 * GRANULE, np.uint8)
    target = np.zeros_like(source)
    for at, to, size in pieces(*sides, sizes).t().tolist():
        target[to : to + size] = source[at : at + size]
    for froms, tos, nbytes in zip(*sides, sizes, strict=True):
        wanted, found = (
            np.concatenate([memory[e.start : e.start + e.nbytes] for e in places])[:nbytes]
            for memory, places in ((source, froms), (target, tos))
        )
        assert np.array_equal(wanted, found)


def test_ram_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"of RAM cannot be pinned .*: lower tiers.max_bytes"):
        Slab.pinned(1 << 60, torch.device("cpu"))
