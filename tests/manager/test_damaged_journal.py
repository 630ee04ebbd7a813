"""A journal that is damaged is set aside, and a new one is begun."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from manthan.manager.stores.disk.journal import JOURNAL, Journal, JournalBlock, JournalChain, JournalSession


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _zero(path: Path) -> None:
    path.write_bytes(bytes(64) + path.read_bytes()[64:])


def _random(path: Path) -> None:
    path.write_bytes(os.urandom(64) + path.read_bytes()[64:])


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _told(folder: Path) -> Path:
    journal = Journal(folder)
    chain = JournalChain(tuple(JournalBlock(bytes([i]) * 32, 0, i, 0) for i in range(99)))
    journal.tell(JournalSession(f"s{i}", {}, chain) for i in range(50))
    journal.close()
    return folder / JOURNAL


@pytest.mark.parametrize("damage", [_cut, _zero, _random, _folder])
def test_a_damaged_journal_is_set_aside(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    path = _told(tmp_path)
    damage(path)
    journal = Journal(tmp_path)
    assert list(journal.sessions()) == []
    journal.close()
    assert Path(f"{path}.bad").exists()
    assert len(list(Journal(_told(tmp_path).parent).sessions())) == 50


def test_only_its_owner_reads_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    assert {file.stat().st_mode & 0o777 for file in tmp_path.glob(f"{JOURNAL}*")} == {0o600}
    journal.close()
