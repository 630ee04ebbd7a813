"""A disk store whose files are damaged, in all ways and each of them, opens and goes on; so does one on a full disk."""

import ctypes
import logging
import os
import random
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from disk_faults import small_disk

from manthan.manager.config.model import ConfigError
from manthan.manager.tiers.disk import LOCK, check_folder, found_in, open_rank, open_root
from manthan.manager.tiers.joined import Shard
from manthan.manager.tiers.journal import JOURNAL, Journal, JournalBlock, JournalSession, SavedBlocks

HASHES = [bytes([n]) * 32 for n in range(20)]
BLOCK = np.arange(9000, dtype=np.uint8)
MODEL = Path("model-0123456789ab")
SEGMENT = MODEL / "rank-0-of-1" / "blocks"
FILES = [
    LOCK,
    MODEL / JOURNAL,
    MODEL / f"{JOURNAL}-wal",
    MODEL / f"{JOURNAL}-shm",
    MODEL / "rank-0-of-1" / LOCK,
    SEGMENT,
]
FOLDERS = [MODEL, MODEL / "rank-0-of-1"]


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "file").write_text("in it")


def _file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("no folder")


Damage = Callable[[Path], object]
DAMAGES: dict[str, Damage] = {
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "zero": lambda path: path.write_bytes(bytes(4096) + path.read_bytes()[4096:]),
    "random": lambda path: path.write_bytes(random.Random(1).randbytes(path.stat().st_size + 5000)),
    "folder": _folder,
    "forbidden": lambda path: path.chmod(0),
}


CAPABILITY_VERSION = 0x20080522
DAC_OVERRIDE, DAC_READ_SEARCH = 1, 2


@contextmanager
def modes_count() -> Iterator[None]:
    """Let modes forbid this thread to open files, as for users that are not root."""
    if os.geteuid():
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    before, bound = (ctypes.c_uint32 * 6)(), (ctypes.c_uint32 * 6)()  # twice: effective, permitted, inheritable
    assert libc.capget(header, before) == 0
    bound[:] = before[:]
    bound[0] &= ~(1 << DAC_OVERRIDE | 1 << DAC_READ_SEARCH)
    assert libc.capset(header, bound) == 0
    try:
        yield
    finally:
        assert libc.capset(header, before) == 0


def fill(path: Path) -> None:
    """Write until the disk is full."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


class Server:
    """The parts of a server that a disk tier has files in."""

    def __init__(self, path: Path) -> None:
        check_folder(str(path))
        self.store = open_rank(path, MODEL.name, Shard(0, 1), 1 << 24)
        self.lock = open_root(path)
        self.journal = Journal(path / MODEL)
        self.found = found_in(path / MODEL, Shard(0, 1))
        self.sessions = list(self.journal.sessions())

    def use(self) -> int:
        """Return how many blocks can be stored and read."""
        self.store.put_all(0, dict.fromkeys(HASHES, BLOCK))
        saved = SavedBlocks(tuple(JournalBlock(block_hash, 0, at, 0) for at, block_hash in enumerate(HASHES)))
        self.journal.tell(JournalSession(f"s{n}", {}, saved) for n in range(50))
        found = list(self.store.read(0, HASHES))
        assert all(buf is None or np.array_equal(buf, BLOCK) for buf in found)
        return sum(buf is not None for buf in found)

    def close(self) -> None:
        self.journal.close()
        self.store.close()
        if self.lock is not None:
            self.lock.close()


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that a killed server has left: SQLite's other files are there, too."""
    folder, left = (tmp_path_factory.mktemp(name) for name in ("server", "left"))
    server = Server(folder)
    assert server.use() == len(HASHES)
    server.journal._thread.join(0.2)
    shutil.copytree(folder, left, dirs_exist_ok=True)
    server.close()
    assert all((left / file).exists() for file in FILES)
    return left


@pytest.fixture
def used(left: Path, tmp_path: Path) -> Path:
    """A copy of it, in which things are damaged."""
    shutil.copytree(left, tmp_path / "left")
    return tmp_path / "left"


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", FILES, ids=str)
def test_a_damaged_file_costs_what_it_had(
    used: Path, file: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    DAMAGES[damage](used / file)
    with modes_count(), caplog.at_level(logging.WARNING):
        server = Server(used)
    assert len(caplog.messages) <= 1
    assert all(str(used / file).removesuffix("-wal").removesuffix("-shm") in line for line in caplog.messages)
    assert all("\n" not in line for line in caplog.messages)
    assert server.use() == len(HASHES)
    server.close()
    again = Server(used)
    assert len(again.sessions) == 50
    assert len(again.found) == len(HASHES)
    again.close()


@pytest.mark.parametrize("damage", [_file, DAMAGES["forbidden"]], ids=["file", "forbidden"])
@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_a_damaged_folder_is_set_aside(used: Path, folder: Path, damage: Damage) -> None:
    damage(used / folder)
    bad = used / f"{folder}.bad"
    bad.mkdir()
    (bad / "of before").touch()
    with modes_count():
        server = Server(used)
    assert bad.exists()
    assert not (bad / "of before").exists()
    assert server.use() == len(HASHES)
    server.close()


@pytest.mark.parametrize("file", [LOCK, MODEL / JOURNAL, MODEL / "rank-0-of-1" / LOCK, SEGMENT], ids=str)
def test_what_cannot_be_set_aside_either(used: Path, file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The server starts, without what needs the file."""
    (used / file).chmod(0)
    (used / file).parent.chmod(0o500)
    with modes_count(), caplog.at_level(logging.WARNING):
        if file == LOCK:  # nothing can be written to the operator's folder
            with pytest.raises(ConfigError, match="nothing can be written there"):
                Server(used)
            return
        server = Server(used)
        server.use()
        server.close()
    assert caplog.messages


@pytest.mark.parametrize("is_used", [True, False])
def test_a_disk_that_is_full_at_start(tmp_path: Path, is_used: bool, caplog: pytest.LogCaptureFixture) -> None:
    with small_disk(tmp_path, 2 << 20):
        if is_used:
            server = Server(tmp_path)
            server.use()
            server.close()
        fill(tmp_path / "other")
        with caplog.at_level(logging.WARNING):
            server = Server(tmp_path)
        server.use()
        server.close()
        assert not list(tmp_path.rglob("*.bad"))
        assert caplog.messages


def test_random_bytes_in_a_journal(used: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each is found by SQLite, or by whoever reads a row, or costs a session."""
    path, rng = used / MODEL / JOURNAL, random.Random(3)
    Journal(path.parent).close()
    whole = path.read_bytes()
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(rng.choice([1, 3, 100])):
            at = rng.randrange(rng.choice([100, 4096, len(data)]))
            data[at] = rng.randrange(256)
        path.write_bytes(data)
        journal = Journal(path.parent)
        assert len(list(journal.sessions())) <= 50
        journal.tell([JournalSession("new", {})])
        journal.close()
        for file in path.parent.glob(f"{JOURNAL}*"):
            file.unlink()
    assert caplog.messages
    assert not any("\n" in line for line in caplog.messages)


def test_only_their_owner_reads_files_and_folders(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        server = Server(tmp_path)
        server.use()
        modes = {path: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    finally:
        os.umask(before)
    server.close()
    assert {tmp_path / file for file in FILES} < set(modes)
    assert all(mode == (0o700 if path.is_dir() else 0o600) for path, mode in modes.items())


def test_a_file_that_another_user_has_locked_stays(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give files away")
    (tmp_path / LOCK).touch(0o600)
    os.chown(tmp_path / LOCK, 12345, 12345)
    with modes_count(), pytest.raises(ConfigError, match="another server uses"):
        open_root(tmp_path)


def test_sqlite_s_errors_that_are_the_disk_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A journal that is whole is not set aside since another process reads it."""
    Journal(tmp_path).close()
    other = sqlite3.connect(tmp_path / JOURNAL, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *args, **kwargs: connect(*args, timeout=0.1, **kwargs))
    journal = Journal(tmp_path)
    assert list(journal.sessions()) == []
    journal.close()
    other.close()
    assert not list(tmp_path.glob("*.bad"))
