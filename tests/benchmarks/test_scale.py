"""The benchmark of many sessions with a few: all that happens to sessions happens, and every call has figures."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from manthan.benchmarks.scale import numbers, scale
from manthan.benchmarks.scale_world import REQUEST, WITH_SHARE, Scale, World, figures
from manthan.manager.sessions.integrity import check_integrity
from manthan.policies import policy_names

SMALL = Scale("lru", 400, 0.3, 8, 2000, 1000.0, 1500, 0, 0)


def invoke(*arguments: object) -> str:
    app = typer.Typer()
    app.command()(scale)
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    return result.output


def test_a_run_has_figures_for_every_call_and_look(tmp_path: Path) -> None:
    small = ("--sessions", 120, "--blocks", 8, "--pool", 8192, "--requests", 80, "--warm-up", 40, "--rounds", 2)
    text = invoke(*small, "--out", tmp_path)
    assert "lru, 120 × 8" in text
    [found] = json.loads((tmp_path / "scale.json").read_text())["runs"]
    kinds = found["kinds"]
    assert found["known"] == 120
    assert kinds.keys() >= {"started", "wanted", "finished", "step", REQUEST, WITH_SHARE, "list by id", "state"}
    assert all(0 < spent["p50"] <= spent["p99"] <= spent["max"] for spent in kinds.values())
    assert kinds[REQUEST]["count"] >= 80
    assert found["traced"]["nbytes"] > 120 * 6 * 32  # the keys alone
    assert (tmp_path / "scale.png").exists()
    again = invoke("--plot-only", tmp_path / "scale.json", "--plot-only", tmp_path / "scale.json")
    assert "lru, 120 × 8" in again


@pytest.mark.parametrize("policy", policy_names())
def test_sessions_are_of_all_kinds_and_the_books_agree(policy: str) -> None:
    world = World(SMALL._replace(policy=policy))
    world.fill()
    check_integrity(world.manager)
    known = len(world.manager.table.by_id)
    assert known == 400
    assert 60 < len(world.manager.table.chains.of("", "app")) < 180
    world.serve(SMALL.requests)
    world.meter.close()
    check_integrity(world.manager)
    spent = world.meter.spent
    assert {"restored", "encoded", "prefetched"} <= spent.keys()
    assert len(world.spent) == len(spent["finished"])
    assert all(0 < own <= shared for own, shared in world.spent.values())
    assert world.manager.usage.sessions["cold"] > 100
    assert world.manager.budget.free < 0.1 * world.manager.budget.nbytes, "evictions have to make room"
    events = {event.kind for name in world.manager.table.by_id for event in world.lives.of(name)}
    assert {"turn", "evicted", "restored", "pinned"} <= events


def test_figures_are_of_all_that_was_measured() -> None:
    found = figures([1000 * number for number in range(1, 201)])
    assert (found["count"], found["p50"], found["p99"], found["max"]) == (200, 101, 199, 200)


def test_what_is_no_list_of_numbers_is_refused() -> None:
    assert numbers("sessions", "10, 20") == [10, 20]
    with pytest.raises(typer.BadParameter, match=r"--sessions must be whole numbers, 4 or more.*'many'"):
        numbers("sessions", "many")
