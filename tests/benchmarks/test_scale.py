"""`manthan bench scale`: the real heart with many sessions, what it costs, and what is said of the goals."""

import gc
from pathlib import Path
from typing import Any

import pytest
from bench_command import is_png, refusal, report, run

from manthan.benchmarks.scale_engine import ANSWER_BLOCKS, WHOLE, Heart
from manthan.benchmarks.scale_report import GOALS, said
from manthan.manager.session.table import SessionState

SMALL = ("--tokens", 512, "--steps", 300, "--repeats", 2)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("scale")
    return folder, report(folder, "scale", "--sessions", "4000,1000", *SMALL)


def test_a_small_run_has_figures_and_a_picture(made: tuple[Path, dict[str, Any]]) -> None:
    folder, found = made
    assert [run["sessions"] for run in found["runs"]] == [1000, 4000]
    for one in found["runs"]:
        assert one["blocks"] == one["sessions"] * 512 // 16
        assert 0 < one["table_nbytes"] < one["block_nbytes"]
        assert len(one["repeats"]) == 2
        for repeat in one["repeats"]:
            assert 0 < repeat["step_us"]["p50"] <= repeat["step_us"]["p99"] <= repeat["step_us"]["max"]
            assert min(repeat["collection_ms"], repeat["requests_a_second"], repeat["request_us"]["p50"]) > 0
    assert is_png(folder / "scale.png")


def test_nothing_is_tracked_for_each_session_or_block(made: tuple[Path, dict[str, Any]]) -> None:
    """Whatever a session had that the garbage collector tracks would count once for each, or more."""
    for one in made[1]["runs"]:
        assert one["objects_a_session"] < 0.05
        assert one["objects_a_block"] < 0.01


def test_a_report_is_shown_again(made: tuple[Path, dict[str, Any]]) -> None:
    path = made[0] / "scale.json"
    output = run("scale", "--plot-only", path).output
    assert "4,000" in output
    assert "of 2 measurements" in output


def test_sessions_go_cold_and_return_from_the_tier() -> None:
    heart = Heart(512, "lru", 0)
    heart.fill(300)
    manager, blocks = heart.manager, 512 // 16
    assert +manager.table.states == {SessionState.COLD: 300}
    assert len(manager.blocks) == sum(manager.blocks.saved_blocks.values()) == 300 * blocks
    of_pool = heart.pool.lookup(0, heart.hashes(299, blocks))
    assert min(of_pool) >= 0, "the last are made as on a server"
    assert set(heart.pool.lookup(0, heart.hashes(299 - WHOLE, blocks))) == {-1}
    times = heart.serve(600, 4, is_full=False)
    assert len(times.steps) == 600
    assert len(times.requests) >= 4
    grown = [session for session in manager.table.by_id.values() if len(session.rows) > blocks]
    assert grown
    for session in grown:
        assert session.uses > 1
        assert (len(session.rows) - blocks) <= (session.uses - 1) * (ANSWER_BLOCKS + 1)
    assert +manager.table.states == {SessionState.COLD: len(manager.table.by_id)}
    assert len(heart.pool) == heart.pool.size, "no block is left referenced"


@pytest.mark.parametrize("is_full", [False, True])
def test_a_full_tier_takes_no_more(is_full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    heart = Heart(512, "lru", 0)
    heart.fill(200)
    before = heart.manager.blocks.saved_nbytes
    monkeypatch.setattr(heart, "settle", lambda: None)  # which saves what had to wait
    heart.serve(600, 4, is_full)
    assert (heart.manager.blocks.saved_nbytes <= before) is is_full


def test_a_session_is_not_visited_by_the_garbage_collector() -> None:
    heart = Heart(512, "lru", 0)
    heart.fill(100)
    for session in heart.manager.table.by_id.values():
        assert not any(map(gc.is_tracked, [session, session.rows, session.points]))


def of_the_goals(**figures: float) -> dict[str, Any]:
    figures = {"collection_ms": 20, "p99": 200, "block_nbytes": 200, "objects": 0, "requests": 1000} | figures
    repeat = {
        "collection_ms": figures["collection_ms"],
        "step_us": {"p99": figures["p99"]},
        "requests_a_second": figures["requests"],
    }
    slower = {"collection_ms": 900, "step_us": {"p99": 9000}, "requests_a_second": 1}
    return {
        "sessions": 100_000,
        "tokens": 8192,
        "block_nbytes": figures["block_nbytes"],
        "objects_a_block": figures["objects"],
        "repeats": [slower, repeat],
    }


def test_the_least_of_the_repeats_meets_a_goal_or_misses_it() -> None:
    assert all(line.endswith(" met") for line in said([of_the_goals()]))
    worse = {"collection_ms": 21, "p99": 201, "block_nbytes": 201, "objects": 1, "requests": 999}
    for at, (name, value) in enumerate(worse.items()):
        words = [line.rsplit(" ", 1)[1] for line in said([of_the_goals(**{name: value})])]
        assert words == ["missed" if n == at else "met" for n in range(len(GOALS))]
    assert said([of_the_goals() | {"tokens": 512}]) == []


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    assert "--sessions must be whole numbers from 200 on, not '1000,x'" in refusal("scale", "--sessions", "1000,x")
    assert "--sessions must be" in refusal("scale", "--sessions", "199")
    assert "--plot-only takes one report" in refusal("scale", tmp_path / "scale.json")
