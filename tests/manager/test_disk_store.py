"""A cold store on disk: what is found again, by whom, and after what."""

import errno
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import disk_writer
import numpy as np
import pytest
from integrity import check_store
from numpy.typing import NDArray

from manthan.manager.tiers import disk as disk_store
from manthan.manager.tiers.disk import DiskError, DiskSlowError, DiskTier
from manthan.manager.tiers.disk_segment import HEADER, PAGE, room
from manthan.manager.tiers.tier import STORE_FULL

MIB = 1 << 20
KEYS = [bytes([number]) * 32 for number in range(50)]


def numbers(seed: int, nbytes: int = 5000) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def get(store: DiskTier, key: bytes, group: int = 0) -> NDArray[np.uint8] | None:
    [found] = store.read(group, [key])
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "rank-0"


@pytest.fixture
def store(folder: Path) -> Iterator[DiskTier]:
    store = DiskTier(folder, 4 * MIB)
    yield store
    store.close()


def again(store: DiskTier, max_bytes: int = 4 * MIB) -> DiskTier:
    """As the next process finds it."""
    store.close()
    return DiskTier(store.folder, max_bytes)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.seg"))


# -- what a store does ----------------------------------------------------------------------------------


def test_blocks_are_kept_by_group_and_key(store: DiskTier) -> None:
    assert store.put_all(0, {KEYS[0]: numbers(0), KEYS[1]: numbers(1, 0)}) == {}
    assert store.put_all(3, {KEYS[0]: numbers(3)}) == {}
    assert np.array_equal(get(store, KEYS[0]), numbers(0))
    assert np.array_equal(get(store, KEYS[0], 3), numbers(3))
    assert get(store, KEYS[1]).nbytes == 0
    assert get(store, KEYS[2]) is None
    assert store.absent(0, KEYS[:3]) == [KEYS[2]]
    assert store.used == 2 * room(5000) + room(0)
    store.drop(0, KEYS)
    assert get(store, KEYS[0]) is None
    assert np.array_equal(get(store, KEYS[0], 3), numbers(3))
    check_store(store)


def test_the_next_process_finds_what_was_there(store: DiskTier) -> None:
    store.put_all(0, {key: numbers(n) for n, key in enumerate(KEYS)})
    store.put_all(7, {KEYS[0]: numbers(100)})
    store = again(store)
    assert store.blocks() == {(0, key): 5000 for key in KEYS} | {(7, KEYS[0]): 5000}
    assert all(np.array_equal(get(store, key), numbers(n)) for n, key in enumerate(KEYS))
    check_store(store)
    store.close()


def test_files_stay_within_the_budget_while_blocks_come_and_go(store: DiskTier) -> None:
    rng, there = random.Random(0), {}
    keys = [bytes([number]) * 32 for number in range(100)]
    for number in range(1500):
        key = rng.choice(keys)
        if rng.random() < 0.3:
            store.drop(0, [key])
            there.pop(key, None)
        else:
            nbytes = rng.randrange(100_000)
            there.pop(key, None)
            if not store.put_all(0, {key: numbers(number, nbytes)}):
                there[key] = (number, nbytes)
        assert store.on_disk <= store.max_bytes
        assert sum(path.stat().st_size for path in files(store.folder)) <= store.max_bytes
    check_store(store)
    assert {key for _, key in store.blocks()} == set(there)
    for key, made in there.items():
        assert np.array_equal(get(store, key), numbers(*made))
    assert store.used >= 0.9 * store.usable


def test_a_full_store_refuses_and_takes_again_what_fits(store: DiskTier) -> None:
    large = {key: numbers(n, 200_000) for n, key in enumerate(KEYS)}
    refused = store.put_all(0, large)
    assert set(refused.values()) == {STORE_FULL}
    kept = [key for key in KEYS if key not in refused]
    assert len(kept) == store.usable // room(200_000)
    store.drop(0, kept[::2])
    assert store.put_all(0, {KEYS[-1]: large[KEYS[-1]]}) == {}
    assert all(np.array_equal(get(store, key), large[key]) for key in [*kept[1::2], KEYS[-1]])
    assert store.put_all(0, {b"x" * 32: numbers(0, store.max_bytes)}) == {b"x" * 32: STORE_FULL}


def test_what_was_cleared_is_not_found_by_the_next_process_nor_what_was_put_since(store: DiskTier) -> None:
    store.put_all(0, {key: numbers(n) for n, key in enumerate(KEYS)})
    assert store.cleared("elsewhere") is store
    assert (store.used, store.blocks()) == (0, {})
    store.put_all(0, {KEYS[3]: numbers(33)})
    assert np.array_equal(get(store, KEYS[3]), numbers(33))
    assert files(store.folder) == []
    check_store(store)
    store = again(store)
    assert store.blocks() == {}
    assert [path.name for path in store.folder.iterdir()] == ["lock"]
    store.put_all(0, {KEYS[3]: numbers(34)})
    store = again(store)
    assert np.array_equal(get(store, KEYS[3]), numbers(34))
    store.close()


def test_a_process_that_is_killed_behind_a_reset_leaves_nothing_of_what_came_since(folder: Path) -> None:
    child = os.fork()
    if not child:
        store = DiskTier(folder, 4 * MIB)
        store.put_all(0, {KEYS[0]: numbers(0)})
        store.cleared("")
        store.put_all(0, {KEYS[0]: numbers(1), KEYS[1]: numbers(1)})
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    store = DiskTier(folder, 4 * MIB)
    assert set(store.blocks()) <= {(0, KEYS[0])}
    assert (0, KEYS[0]) not in store.blocks() or np.array_equal(get(store, KEYS[0]), numbers(0))
    store.close()


# -- what can happen to a folder ------------------------------------------------------------------------


def test_a_smaller_budget_finds_all_and_takes_nothing_until_some_is_dropped(store: DiskTier) -> None:
    store.put_all(0, {key: numbers(n, 60_000) for n, key in enumerate(KEYS)})
    store = again(store, 2 * MIB)
    assert len(store.blocks()) == 50
    assert store.put_all(0, {b"x" * 32: numbers(0)}) == {b"x" * 32: STORE_FULL}
    store.drop(0, KEYS[10:])
    assert store.put_all(0, {b"x" * 32: numbers(0)}) == {}
    for n, key in enumerate(KEYS[:10]):
        assert np.array_equal(get(store, key), numbers(n, 60_000))
    store.put_all(0, {bytes([n]) * 31: numbers(n, 60_000) for n in range(10)})
    assert store.on_disk <= 2 * MIB
    store.close()


@pytest.mark.parametrize("cut", [1, PAGE - HEADER - 5000 % PAGE, 5000, 5000 + HEADER - 1, 2 * PAGE - 1])
def test_a_torn_last_record_is_not_there_and_all_before_it_are(store: DiskTier, cut: int) -> None:
    for n, key in enumerate(KEYS[:10]):
        store.put_all(0, {key: numbers(n)})
    [path] = files(store.folder)
    os.truncate(path, path.stat().st_size - cut)
    store = again(store)
    assert set(store.blocks()) == {(0, key) for key in KEYS[:9]}
    assert store.put_all(0, {KEYS[9]: numbers(9), KEYS[10]: numbers(10)}) == {}
    store = again(store)
    assert all(np.array_equal(get(store, key), numbers(n)) for n, key in enumerate(KEYS[:11]))
    store.close()


def test_a_hole_where_a_record_was_being_written_hides_none_behind_it(store: DiskTier) -> None:
    store.put_all(0, {key: numbers(n) for n, key in enumerate(KEYS[:10])})
    [path] = files(store.folder)
    with path.open("r+b") as file:
        file.seek(3 * room(5000))
        file.write(bytes(room(5000)))
    store = again(store)
    assert set(store.blocks()) == {(0, key) for n, key in enumerate(KEYS[:10]) if n != 3}
    store.close()


@pytest.mark.parametrize("flips", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_flipped_bytes_are_misses_whether_the_store_is_open_or_not(store: DiskTier, flips: int) -> None:
    rng, missed, right = random.Random(1), 0, [numbers(n) for n in range(len(KEYS))]
    store.put_all(0, {key: right[n] for n, key in enumerate(KEYS)})
    paths = files(store.folder)
    for number in range(flips):
        path = rng.choice(paths)
        with path.open("r+b") as file:
            at = rng.randrange(path.stat().st_size)
            file.seek(at)
            was = file.read(1)
            file.seek(at)
            file.write(bytes([was[0] ^ 1 << rng.randrange(8)]))
        if number % 10 == 0:
            store = again(store)
        for n, key in enumerate(KEYS):
            found = get(store, key)
            assert found is None or np.array_equal(found, right[n])
            missed += found is None
        if number % 50 == 49:  # some are whole again
            store.put_all(0, {key: right[n] for n, key in enumerate(KEYS)})
            paths = files(store.folder)
    assert missed > flips
    store.close()


@pytest.mark.parametrize(("fault", "cause"), [(errno.ENOSPC, STORE_FULL), (errno.EIO, DiskError.cause)])
def test_a_disk_that_takes_nothing(store: DiskTier, monkeypatch: pytest.MonkeyPatch, fault: int, cause: str) -> None:
    store.put_all(0, {KEYS[0]: numbers(0)})

    def fail(*_: object) -> int:
        raise OSError(fault, os.strerror(fault))

    with monkeypatch.context() as broken:
        broken.setattr(os, "pwritev", fail)
        assert store.put_all(0, {KEYS[1]: numbers(1)}) == {KEYS[1]: cause}
    assert store.put_all(0, {KEYS[2]: numbers(2)}) == {}
    store = again(store)
    assert set(store.blocks()) == {(0, KEYS[0]), (0, KEYS[2])}
    check_store(store)
    store.close()


def test_a_disk_that_gives_nothing(store: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put_all(0, {KEYS[0]: numbers(0)})

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as broken:
        broken.setattr(os, "preadv", fail)
        with pytest.raises(DiskError, match=r"00000001\.seg: Input/output error"):
            get(store, KEYS[0])
    assert np.array_equal(get(store, KEYS[0]), numbers(0))


def test_while_a_read_hangs_nobody_else_waits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskTier(folder, 4 * MIB, timeout_s=0.1)
    store.put_all(0, {KEYS[0]: numbers(0), KEYS[1]: numbers(1)})
    hung, real = threading.Event(), os.preadv

    def hang(*arguments: object) -> int:
        hung.wait(60)
        return real(*arguments)

    with monkeypatch.context() as broken:
        broken.setattr(os, "preadv", hang)
        for _ in range(2):
            with pytest.raises(DiskSlowError) as slow:
                get(store, KEYS[0])
            assert slow.value.cause == "store_down"
        assert "does not answer" in str(slow.value)
        assert store.absent(0, KEYS[:2]) == []
        hung.set()
    while store._stuck is not None and not store._stuck.done():
        time.sleep(0.01)
    assert np.array_equal(get(store, KEYS[1]), numbers(1))
    store.close()


def test_while_a_write_hangs_nothing_is_kept_and_nobody_waits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskTier(folder, 4 * MIB, timeout_s=0.1)
    assert store.put_all(0, {KEYS[0]: numbers(0), KEYS[1]: numbers(1)}) == {}
    begun, hung, real = threading.Event(), threading.Event(), os.pwritev

    def hang(*arguments: object) -> object:
        begun.set()
        assert hung.wait(60)
        return real(*arguments)

    with monkeypatch.context() as broken:
        broken.setattr(os, "pwritev", hang)
        assert store.put_all(0, {KEYS[2]: numbers(2), KEYS[3]: numbers(3)}) == dict.fromkeys(KEYS[2:4], "store_down")
        assert begun.is_set()
        begun.clear()
        assert store.put_all(0, {KEYS[1]: numbers(4)}) == {KEYS[1]: "store_down"}
        assert not begun.is_set(), "it is not asked once more"
        assert np.array_equal(get(store, KEYS[1]), numbers(1)), "what was there stays, and is read"
        assert store.absent(0, KEYS[:4]) == KEYS[2:4]
        hung.set()
    while store.put_all(0, {KEYS[5]: numbers(5)}):
        time.sleep(0.01)
    assert set(store.blocks()) == {(0, KEYS[number]) for number in (0, 1, 5)}
    check_store(store)
    store.close()


def test_while_a_sync_hangs_blocks_are_kept_and_nobody_waits(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun, hung, ended = threading.Event(), threading.Event(), list[bool]()
    with monkeypatch.context() as broken:
        broken.setattr(disk_store, "SYNC_S", 0.01)
        broken.setattr(disk_store, "CLOSE_S", 0.1)
        broken.setattr(os, "fdatasync", lambda _: begun.set() or ended.append(hung.wait(20)))
        store = DiskTier(folder, 4 * MIB, timeout_s=1.0)
        assert store.put_all(0, {KEYS[0]: numbers(0)}) == {}
        assert begun.wait(60)
        assert store.put_all(0, {KEYS[1]: numbers(1)}) == {}
        assert all(np.array_equal(get(store, KEYS[number]), numbers(number)) for number in (0, 1))
        store.close()
        assert ended == [], "somebody has waited for it"
        hung.set()
    assert "the disk does not answer; it is left as it is" in caplog.text


# -- a process that is killed ---------------------------------------------------------------------------


def survives(folder: Path, kills: int) -> int:
    """Kill writers at random moments, and look what the next process finds. Returns how many blocks were confirmed."""
    rng, version, confirmed = random.Random(2), 0, 0
    sure: dict[bytes, int] = {}
    """By key, the last version that was confirmed, if nothing was begun since."""
    for _ in range(kills):
        said = disk_writer.killed_after(folder, version, rng.random() * 0.03)
        open_ends: dict[bytes, int] = {}
        for what, key, version in said:
            if what == "P":
                sure[key], confirmed = version, confirmed + 1
                open_ends.pop(key, None)
            else:
                sure.pop(key, None)
                open_ends[key] = version
        store = DiskTier(folder, disk_writer.BUDGET)
        for key in disk_writer.KEYS:
            found = get(store, key)
            assert found is not None or key not in sure
            if found is not None:
                assert disk_writer.version_of(key, found) == sure.get(key, disk_writer.version_of(key, found))
        check_store(store)
        store.close()
    return confirmed


def test_what_was_confirmed_survives_kills(folder: Path) -> None:
    assert survives(folder, 40) > 40
