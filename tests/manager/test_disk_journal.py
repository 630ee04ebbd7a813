"""The journal of sessions on disk, as the next process finds it."""

import contextlib
import sqlite3
from pathlib import Path

import pytest
from disk_faults import small_disk
from some_blocks import until

from manthan.manager.tiers.journal import Journal, JournalBlock, JournalPoint, JournalSession, SavedBlocks


def session(name: str, blocks: int = 3, note: bytes = b"", **facts: object) -> JournalSession:
    own = tuple(JournalBlock(bytes([at]) * 32, 1, at, 4 * (at == 0), 0, note) for at in range(blocks))
    parts = tuple(JournalBlock(bytes([at]) * 32, group, at, 0, 1, note) for group in (0, 2) for at in range(blocks))
    points = (JournalPoint(blocks, parts), JournalPoint(1, ())) if blocks else ()
    return JournalSession(name, {"tenant": "", **facts}, SavedBlocks(own, points))


def found(folder: Path) -> dict[str, JournalSession]:
    journal = Journal(folder)
    sessions = {each.session_id: each for each in journal.sessions()}
    journal.close()
    return sessions


def test_the_next_process_finds_what_was_told_last(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.tell([session("a"), session("b", 2, pinned=True), session("ä b/c")])
    journal.tell([session("a", 5), session("b", 0)])
    journal.close()
    assert found(tmp_path) == {"a": session("a", 5), "ä b/c": session("ä b/c")}


@pytest.mark.parametrize("note", [b"", bytes(300)])
def test_facts_alone_change_while_the_blocks_and_their_notes_stay(tmp_path: Path, note: bytes) -> None:
    journal = Journal(tmp_path)
    journal.tell([session("a", note=note), session("b", note=note)])
    journal.tell([JournalSession("a", {"tenant": "x"}, None)])
    journal.close()
    journal = Journal(tmp_path)
    journal.tell([JournalSession("b", {"tenant": "y"}, None), JournalSession("c", {}, None)])
    journal.close()
    assert found(tmp_path) == {name: session(name, note=note, tenant=tenant) for name, tenant in ("ax", "by")}


def test_what_was_cleared_is_gone_and_what_was_told_afterwards_is_there(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.tell([session("a")])
    journal.clear()
    journal.tell([session("b")])
    journal.close()
    assert set(found(tmp_path)) == {"b"}


def test_one_of_another_version_is_begun_anew(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.tell([session("a")])
    journal.close()
    with sqlite3.connect(journal.path) as db:
        db.execute("PRAGMA user_version=99")
    assert found(tmp_path) == {}


@pytest.mark.parametrize("damaged", ["substr(saved, 1, 60)", "replace(saved, ',1,2,0,', ',1,-2,0,')", "5"])
def test_a_session_that_was_damaged_is_left_out(tmp_path: Path, damaged: str, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal(tmp_path)
    journal.tell([session("a"), session("b")])
    journal.close()
    with sqlite3.connect(journal.path) as db:
        db.execute(f"UPDATE sessions SET saved = {damaged} WHERE id = 'a'")
    assert set(found(tmp_path)) == {"b"}
    assert "1 sessions cannot be read, and are forgotten" in caplog.text


def test_what_a_full_disk_did_not_take_is_written_when_it_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path, 512 << 10):
        journal = Journal(tmp_path / "journal")
        journal.tell([session("a"), session("b")])
        until(lambda: len(list(journal.sessions())) == 2)
        filler = tmp_path / "filler"
        with contextlib.suppress(OSError):
            filler.write_bytes(bytes(512 << 10))
        journal.tell([session(f"{number}", 100) for number in range(5)])
        until(lambda: "not written until that is possible" in caplog.text)
        journal.tell([session("a", 7), session("b", 0)])
        filler.unlink()
        until(lambda: len(list(journal.sessions())) == 6)
        journal.close()
        there = found(tmp_path / "journal")
    assert there == {str(number): session(f"{number}", 100) for number in range(5)} | {"a": session("a", 7)}
