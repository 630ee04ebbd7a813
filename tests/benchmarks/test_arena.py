"""The soak of the arena in a small form: real memory, blocks of mixed sizes, a store that is always full."""

import json
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from manthan.benchmarks.arena import MOST_LOST, Found, WrongBytesError, main, measure
from manthan.manager.stores.cold_store import HostStore

BUDGET = 24 << 20


def test_a_soak_says_what_was_lost(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(main)
    path = tmp_path / "arena.json"
    result = CliRunner().invoke(app, ["--minutes", "0.02", "--budget", "24MiB", "--json", str(path)])
    assert result.exit_code == 0, result.output
    found = Found(**json.loads(path.read_text()))
    assert found.puts >= 1000
    assert found.reads == found.puts // 8
    assert found.budget == BUDGET
    assert found.used <= found.peak <= BUDGET - found.spare
    assert found.peak > 0.8 * BUDGET
    assert found.grown < 2 * BUDGET  # its own, and what is written and compared at a time
    assert 0.02 < found.share_lost < MOST_LOST
    assert found.extents < 3 * found.puts
    assert f"{found.puts:,} in " in result.output


def test_a_store_that_mixes_blocks_up_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = HostStore._read
    monkeypatch.setattr(HostStore, "_read", lambda store, block: whole(store, block) + 1)
    with pytest.raises(WrongBytesError):
        measure(BUDGET, 0, 0, Console())


def test_a_store_that_leaks_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostStore, "_remove", lambda store, block: store._blocks.pop(block, None))
    with pytest.raises(WrongBytesError, match="count as used"):
        measure(BUDGET, 0, 0, Console())
