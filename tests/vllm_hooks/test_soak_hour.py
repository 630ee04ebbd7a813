"""The soak (tests/helpers/soak_hour.py): two minutes of it, and that it says what is wrong."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import soak_hour
from soak_faults import FELT_LATER, Fault, Order
from soak_hour import came_back, survived

SCRIPT = Path(soak_hour.__file__)


# -- two minutes on real servers ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every fault, a sleep, both resets and a kill. The codec decodes whatever it is given."""
    folder = tmp_path_factory.mktemp("soak")
    options = "--minutes 2 --agents 20 --speed 8 --rate 2 --kills 1 --store-share 0.4 --warm-up 10 --codec k3v3"
    command = [sys.executable, str(SCRIPT), *options.split(), "--out", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "in use again: never" not in done.stdout
    return dict(json.loads((folder / "soak_hour.json").read_text()))


@pytest.mark.slow
def test_no_answer_is_wrong_and_no_user_sees_an_error(found: dict[str, Any]) -> None:
    counts = found["counts"]
    wrong = [counts.get(what, 0) for what in ("errors", "misled", "stale")]
    assert (wrong, found["messages"]) == ([0, 0, 0], [])
    assert counts["checked"] == counts["requests"] >= 300
    for what in ("posted", "streamed", "left", "named", "hinted", "agents", "exact"):
        assert counts[what] >= 5
    assert counts["agents"] < counts["requests"]


@pytest.mark.slow
def test_every_fault_is_felt_and_the_stores_are_in_use_again_after_each(found: dict[str, Any]) -> None:
    assert {event["what"] for event in found["events"]} == {*Fault, *Order}
    assert all(event["used_again_s"] is not None for event in found["events"])
    assert {event["what"] for event in found["events"] if event["failures"]} >= {*Fault} - FELT_LATER


@pytest.mark.slow
def test_sessions_come_back_after_the_kill_and_on_the_other_server(found: dict[str, Any]) -> None:
    lives = [[life["server"], life["ready_s"] < life["end_s"]] for life in found["lives"]]
    assert lives == [[0, True], [1, True], [-1, True], [0, True]]
    assert {who for who in found["returns"] if who.endswith("before")} <= {"4 before"}
    assert survived(found, 4)
    assert came_back(found, "1 other") + came_back(found, "2 other") > 0
    assert 0 < found["returns"]["1 same"]["cached"] <= found["returns"]["1 same"]["full"]


@pytest.mark.slow
def test_all_tiers_are_used_and_dropped_from(found: dict[str, Any]) -> None:
    told = Counter[str]()
    for life in found["lives"]:
        told.update(life["told"])
    for source in ("host", "disk", "external_unspecified"):
        assert told[f"prompt_tokens_cached_by_source_total{{{source}}}"] > 0
    assert told["evictions_total"] > 50
    assert sum(value for name, value in told.items() if name.startswith("dropped_blocks_total{")) > 0
