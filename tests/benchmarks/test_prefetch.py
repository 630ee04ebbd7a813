"""The prefetch benchmark: its arms, and what it makes of what it found."""

import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from manthan.benchmarks.prefetch import BACK_AFTER_S, IDLE_AFTER_S, LEAD_S, MODEL, arms
from manthan.benchmarks.prefetch_report import counted, ratios, rows, saved_ms, show


def returns(*times_ms: float) -> list[dict[str, Any]]:
    """The first is the one that warmed up."""
    return [{"ttft_s": time / 1e3, "cached_tokens": 1984, "right": time < 50} for time in (999.0, *times_ms)]


@pytest.fixture
def report() -> dict[str, Any]:
    machine = {"gpu": [], "cpu": "a CPU", "cores": 2, "vllm": "0.32.0", "torch": "2"}
    ours = {"restore": returns(40, 60, 50), "hot": returns(10, 10, 10), "prefetch": returns(10, 20, 30), "start_s": 9}
    arguments = {"tokens": 2000, "made_up": False}
    return {
        "machine": machine,
        "arguments": arguments,
        "arms": {"recompute": {"recompute": returns(500, 500, 500)}, "manthan": ours},
    }


def test_a_return_is_compared_with_the_restore_of_its_session_before_it(report: dict[str, Any]) -> None:
    assert {kind: len(found) for kind, found in counted(report).items()} == {
        "recompute": 3,
        "restore": 3,
        "prefetch": 3,
        "hot": 3,
    }
    assert ratios(rows(report)) == pytest.approx(
        {"restore / recompute": 0.1, "prefetch / restore": 0.4, "prefetch / hot": 2}
    )
    saved = saved_ms(report)
    assert saved is not None
    assert saved.samples == pytest.approx([30, 40, 20])


def test_the_report_is_shown_without_an_arm_that_failed(report: dict[str, Any], tmp_path: Path) -> None:
    console = Console(width=140, record=True, file=sys.stderr)
    show(report, tmp_path / "plot.png", console)
    text = console.export_text()
    assert "a prefetch saved 30.0 ms of a restore (25.0 to 35.0)" in text
    assert "1 of 3" in text  # of the restores, one is right
    del report["arms"]["manthan"]
    assert [row.name for row in rows(report)] == ["recompute"]
    show(report, tmp_path / "plot.png", console)


def test_a_session_goes_cold_and_is_prefetched_before_it_is_back() -> None:
    parameters = {"returns": 3, "tokens": 2000, "seed": 0, "made_up": False}
    plain, ours = arms(MODEL, "host", 32, True, 8192, parameters)
    assert IDLE_AFTER_S < BACK_AFTER_S - LEAD_S < BACK_AFTER_S < BACK_AFTER_S - LEAD_S + IDLE_AFTER_S
    assert plain.engine.manthan is None
    assert 2000 < 32 * plain.engine.blocks < 2 * 2000  # others overwrite it
    assert 32 * ours.engine.blocks * 0.9 > 2000 + 64  # it fits beside what low_watermark leaves free
    assert ours.engine.manthan["prefetch"] == {"lead_s": LEAD_S}
