"""A tier on disk: what the next process finds, whatever happened to the file. The rest is in test_tiers.py."""

import errno
import os
import random
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from examples import examples
from integrity import check_store
from kv import packed
from some_blocks import until

from manthan.codec import wire
from manthan.codec.base import Section, SectionKind
from manthan.manager.tiers import disk, disk_files
from manthan.manager.tiers.arena import Extent
from manthan.manager.tiers.arena_tier import Placed
from manthan.manager.tiers.disk import DISK, HEADER, PAGE, DiskTier, found_in, room
from manthan.manager.tiers.joined import Shard
from manthan.manager.tiers.tier import STORE_FULL, Buffer, Found

MIB = 1 << 20
KEYS = [bytes([number]) * 32 for number in range(1, 51)]


def numbers(seed: int, nbytes: int = 5000) -> Buffer:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


SECTION = Section(SectionKind.KEYS, "any", 1, 16, 1, 8)
REFINED = wire.refined(
    packed(wire.BlockHeader(KEYS[0], bytes(16), 16, (SECTION,)), [numbers(0)]), [numbers(n, 9000) for n in range(3)]
)


def get(tier: DiskTier, key: bytes) -> Found:
    [found] = tier.read(0, [key])
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "rank-0-of-1"


@pytest.fixture
def tier(folder: Path) -> Iterator[DiskTier]:
    tier = DiskTier(folder, 4 * MIB)
    yield tier
    tier.close()


def again(tier: DiskTier, max_bytes: int = 4 * MIB) -> DiskTier:
    """The tier as the next process finds it."""
    tier.close()
    return DiskTier(tier.folder, max_bytes)


def raw(folder: Path) -> bytes:
    return (folder / "blocks").read_bytes()


def on_disk(folder: Path) -> int:
    return (folder / "blocks").stat().st_blocks * 512


def killed(folder: Path, do: Callable[[DiskTier], object]) -> None:
    """Do something in a process that is killed at its end."""
    child = os.fork()
    if not child:
        do(DiskTier(folder, 4 * MIB))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


def test_the_file_stays_within_the_budget_while_blocks_of_many_sizes_come_and_go(tier: DiskTier) -> None:
    rng, there, keys = random.Random(0), dict[bytes, tuple[int, int]](), [bytes([n]) * 32 for n in range(100)]
    for number in range(1500):
        key, nbytes = rng.choice(keys), rng.randrange(200_000)
        there.pop(key, None)
        if rng.random() < 0.3:
            tier.drop(0, [key])
        elif not tier.put_all(0, {key: numbers(number, nbytes)}):
            there[key] = (number, nbytes)
        if number % 10 == 0:
            assert on_disk(tier.folder) <= tier.max_bytes
    check_store(tier)
    assert any(len(placed.extents) > 1 for placed in tier._blocks.values())
    assert tier.used >= 0.9 * tier.usable
    tier = again(tier)
    assert {key for _, key in tier._blocks} == set(there)
    assert all(np.array_equal(get(tier, key), numbers(*made)) for key, made in there.items())
    check_store(tier)
    tier.close()


def test_a_smaller_budget_finds_all_and_takes_nothing_until_some_is_dropped(tier: DiskTier) -> None:
    tier.put_all(0, {key: numbers(n, 60_000) for n, key in enumerate(KEYS)})
    tier = again(tier, 2 * MIB)
    assert len(tier._blocks) == 50
    tier.drop(0, KEYS[45:])  # still more than the budget
    assert tier.put_all(0, {b"x" * 32: numbers(0)}) == {b"x" * 32: STORE_FULL}
    tier.drop(0, KEYS[10:])
    assert tier.put_all(0, {b"x" * 32: numbers(0)}) == {}
    assert all(np.array_equal(get(tier, key), numbers(n, 60_000)) for n, key in enumerate(KEYS[:10]))
    tier.close()
    assert on_disk(tier.folder) <= 2 * MIB


# -- erasing --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_holes", [True, False])
def test_what_is_dropped_is_gone_from_the_file(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, has_holes: bool
) -> None:
    """By a hole where the file system can make one: else it is overwritten."""
    if not has_holes:
        monkeypatch.setattr(disk_files, "_FALLOCATE", lambda *_: -1)
    tier.put_all(0, {key: numbers(n) for n, key in enumerate(KEYS)})
    before = on_disk(tier.folder)
    tier.drop(0, KEYS[:25])
    marks = [mark for n in range(25) for mark in (numbers(n)[:30].tobytes(), KEYS[n])]
    until(lambda: not any(mark in data for data in [raw(tier.folder)] for mark in marks))
    assert (on_disk(tier.folder) < before) is has_holes
    assert all(np.array_equal(get(tier, key), numbers(n)) for n, key in enumerate(KEYS[25:], 25))
    assert set(again(tier)._blocks) == {(0, key) for key in KEYS[25:]}


def test_what_was_dropped_before_a_kill_is_found_or_erased_and_not_half_there(folder: Path) -> None:
    """The process is killed after it has erased the headers of some blocks, and nothing else."""

    def drop(tier: DiskTier) -> None:
        tier.put_all(0, {key: numbers(n, 9000) for n, key in enumerate(KEYS)})
        os.pwrite(tier._fd, bytes(HEADER), tier._blocks[0, KEYS[3]].extents[0].start)
        disk.erase = lambda *_: time.sleep(60)
        tier.drop(0, KEYS[:5])

    killed(folder, drop)
    assert numbers(3, 9000)[:30].tobytes() in raw(folder)
    tier = DiskTier(folder, 4 * MIB)
    assert set(tier._blocks) == {(0, key) for n, key in enumerate(KEYS) if n != 3}
    assert numbers(3, 9000)[:30].tobytes() not in raw(folder)
    tier.drop(0, KEYS[:5])  # as the manager does with what no session needs
    tier.close()
    assert not any(numbers(n, 9000)[:30].tobytes() in raw(folder) for n in range(5))


@pytest.mark.parametrize("when", ["before the header", "before the hole", "at the end"])
def test_a_block_that_was_cut_before_a_kill_is_there_with_some_of_its_parts(folder: Path, when: str) -> None:
    ends = wire.part_ends(REFINED)

    def cut(tier: DiskTier) -> None:
        tier.put_all(0, {KEYS[0]: REFINED, KEYS[1]: numbers(1)})
        if when == "before the header":
            tier._shorten = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        elif when == "before the hole":
            disk.erase = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        tier.trim(0, KEYS[:2], 2)
        until(lambda: not tier._dropped_nbytes)

    killed(folder, cut)
    left = REFINED if when == "before the header" else REFINED[: ends[1]]
    assert found_in(folder.parent, Shard(0, 1))[0, KEYS[0]] == [room(end) for end in ends if end <= left.nbytes]
    tier = DiskTier(folder, 4 * MIB)
    assert np.array_equal(get(tier, KEYS[0]), left)
    assert np.array_equal(get(tier, KEYS[1]), numbers(1))
    assert tier.used == room(left.nbytes) + room(5000)
    tier.trim(0, KEYS[:2], 1)
    tier = again(tier)
    assert np.array_equal(get(tier, KEYS[0]), REFINED[: ends[0]])
    assert on_disk(folder) <= room(ends[0]) + room(5000)
    check_store(tier)
    tier.close()


def test_a_block_whose_cut_cannot_be_written_down_is_a_miss_for_the_next_process(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier.put_all(0, {KEYS[0]: REFINED})
    with monkeypatch.context() as broken:
        broken.setattr(disk, "write_all", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
        tier.trim(0, KEYS[:1], 1)
        until(lambda: not tier._dropped_nbytes)
    assert np.array_equal(get(tier, KEYS[0]), REFINED[: wire.part_ends(REFINED)[0]])
    tier = again(tier)
    assert get(tier, KEYS[0]) is None
    tier.close()


def test_a_process_that_is_killed_after_a_reset_leaves_nothing_of_what_came_since(folder: Path) -> None:
    def reset(tier: DiskTier) -> None:
        tier.put_all(0, {KEYS[0]: numbers(0)})
        tier.cleared("")
        tier.put_all(0, {KEYS[0]: numbers(1), KEYS[1]: numbers(1)})

    killed(folder, reset)
    tier = DiskTier(folder, 4 * MIB)
    assert list(tier._blocks) == []
    tier.cleared("")
    tier.close()
    assert [path.name for path in folder.iterdir()] == ["lock"]


# -- what can happen to the file ------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [1, PAGE, room(5000) - 1])
def test_a_torn_last_record_is_a_miss_and_all_before_it_are_there(tier: DiskTier, cut: int) -> None:
    for n, key in enumerate(KEYS[:10]):
        tier.put_all(0, {key: numbers(n)})
    tier.close()
    os.truncate(tier.folder / "blocks", 9 * room(5000) + room(5000) - cut - (room(5000) - HEADER - 5000))
    tier = again(tier)
    assert get(tier, KEYS[9]) is None
    assert tier.put_all(0, {KEYS[9]: numbers(9), KEYS[10]: numbers(10)}) == {}
    tier = again(tier)
    assert all(np.array_equal(get(tier, key), numbers(n)) for n, key in enumerate(KEYS[:11]))
    tier.close()


@pytest.mark.parametrize("newer", [0, 1])
def test_of_records_that_overlap_the_newer_one_holds(folder: Path, newer: int) -> None:
    """As they may after a power failure: an old header is on the disk, its erasing is not."""
    records = [
        Placed((Extent(0, PAGE), Extent(4 * PAGE, PAGE)), 5000, sequence=8),
        Placed((Extent(4 * PAGE, 2 * PAGE),), 5000, sequence=9 if newer else 7),
    ]
    folder.mkdir()
    with (folder / "blocks").open("wb") as file:
        for key, placed in zip(KEYS, records, strict=False):
            file.seek(placed.extents[0].start)
            file.write(disk._header((0, key), placed))
    tier = DiskTier(folder, 4 * MIB)
    assert list(tier._blocks) == [(0, KEYS[newer])]
    check_store(tier)
    tier.close()


@pytest.mark.parametrize("flips", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_flipped_bytes_are_misses_whether_the_tier_is_open_or_not(tier: DiskTier, flips: int) -> None:
    rng, missed, right = random.Random(1), 0, {key: numbers(n) for n, key in enumerate(KEYS)}
    tier.put_all(0, right)
    for number in range(flips):
        with (tier.folder / "blocks").open("r+b") as file:
            at = rng.randrange(len(KEYS) * room(5000))
            file.seek(at)
            was = file.read(1)
            file.seek(at)
            file.write(bytes([was[0] ^ 1 << rng.randrange(8)]))
        if number % 10 == 0:
            tier = again(tier)
        for key in KEYS:
            found = get(tier, key)
            assert found is None or np.array_equal(found, right[key])
            missed += found is None
        if number % 50 == 49:  # some are whole again
            tier.put_all(0, right)
    assert missed > flips
    tier.close()


@pytest.mark.parametrize(("fault", "cause"), [(errno.ENOSPC, STORE_FULL), (errno.EIO, DISK)])
def test_a_disk_that_fails(tier: DiskTier, monkeypatch: pytest.MonkeyPatch, fault: int, cause: str) -> None:
    tier.put_all(0, {KEYS[0]: numbers(0)})

    def fail(*_: object) -> int:
        raise OSError(fault, os.strerror(fault))

    with monkeypatch.context() as broken:
        broken.setattr(os, "pwritev", fail)
        broken.setattr(os, "preadv", fail)
        assert tier.put_all(0, {KEYS[1]: numbers(1)}) == {KEYS[1]: cause}
        assert get(tier, KEYS[0]) == DISK
    assert np.array_equal(get(tier, KEYS[0]), numbers(0))
    assert tier.put_all(0, {KEYS[2]: numbers(2)}) == {}
    tier = again(tier)
    assert set(tier._blocks) == {(0, KEYS[0]), (0, KEYS[2])}
    check_store(tier)
    tier.close()


def test_a_block_that_cannot_be_written_costs_no_other_block(tier: DiskTier) -> None:
    scattered = numbers(1, 10_000)[::2]  # not contiguous: ValueError, no OSError
    assert tier.put_all(0, {KEYS[0]: numbers(0), KEYS[1]: scattered, KEYS[2]: numbers(2)}) == {KEYS[1]: "internal"}
    assert [found is not None for found in tier.read(0, KEYS[:3])] == [True, False, True]
    assert tier.put_all(1 << 32, {KEYS[3]: numbers(3)}) == {KEYS[3]: "internal"}  # struct.error, after the body
    assert tier.used == 2 * room(5000)
    check_store(tier)


def test_while_a_sync_hangs_blocks_are_stored_and_nobody_waits(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun, hung, ended = threading.Event(), threading.Event(), list[bool]()
    with monkeypatch.context() as broken:
        broken.setattr(disk, "SYNC_S", 0.01)
        broken.setattr(disk, "CLOSE_S", 0.1)
        broken.setattr(os, "fdatasync", lambda _: begun.set() or ended.append(hung.wait(20)))
        tier = DiskTier(folder, 4 * MIB, timeout_s=1.0)
        assert begun.wait(60)
        assert tier.put_all(0, {KEYS[1]: numbers(1)}) == {}
        assert np.array_equal(get(tier, KEYS[1]), numbers(1))
        tier.close()
        assert ended == [], "somebody has waited for it"
        hung.set()
    assert "the disk does not answer; it is left as it is" in caplog.text


# -- a process that is killed ---------------------------------------------------------------------------


def body(at: int, version: int) -> Buffer:
    """Return the `version`-th block under a key. Its length and bytes follow from both."""
    seed = version * len(KEYS) + at
    return np.concatenate([np.array([version], np.int64).view(np.uint8), numbers(seed, seed * 7919 % 60_000)])


def write(tier: DiskTier, version: int, tell: int) -> None:
    """Put and drop until killed. Tell b"d" before each change, and b"P" after a put that was confirmed."""
    rng = random.Random(version)
    while True:
        version, at = version + 1, rng.randrange(len(KEYS))
        os.write(tell, b"d %d %d\n" % (at, version))
        if rng.random() < 0.2:
            tier.drop(0, [KEYS[at]])
        elif not tier.put_all(0, {KEYS[at]: body(at, version)}):
            os.write(tell, b"P %d %d\n" % (at, version))


def told_until_killed(folder: Path, version: int, seconds: float) -> list[tuple[bytes, int, int]]:
    listen, tell = os.pipe()
    child = os.fork()
    if not child:
        try:
            write(DiskTier(folder, MIB), version, tell)
        finally:
            os._exit(1)
    os.close(tell)
    with os.fdopen(listen, "rb") as pipe:
        select.select([pipe], [], [])  # it has opened the tier
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        lines = [line.split() for line in pipe]
    return [(what, int(at), int(version)) for what, at, version in lines]


def test_what_was_confirmed_survives_kills(folder: Path) -> None:
    """Writers are killed at random moments. Their budget is full, so that room is used again."""
    rng, version, confirmed = random.Random(2), 0, 0
    sure: dict[int, int] = {}  # by key, the last version that was confirmed, if nothing was begun since
    for _ in range(examples(100)):
        for what, at, number in told_until_killed(folder, version, rng.random() * 0.03):
            sure.pop(at, None)
            version = number
            if what == b"P":
                sure[at], confirmed = version, confirmed + 1
        tier = DiskTier(folder, MIB)
        for at, key in enumerate(KEYS):
            found = get(tier, key)
            assert found is not None or at not in sure
            if found is not None:
                assert isinstance(found, np.ndarray)
                there = int(found[:8].view(np.int64)[0])
                assert there == sure.get(at, there)
                assert np.array_equal(found, body(at, there))
        check_store(tier)
        tier.close()
    assert confirmed > 40
