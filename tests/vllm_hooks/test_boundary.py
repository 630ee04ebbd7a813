"""No exception of Manthan's ends the engine: thrown in each call, in each state, it costs a recompute."""

from typing import Any

import pytest
from scripts import run_script

ALL = ("new", "load", "store", "load, after", "store, after")


@pytest.fixture(scope="module", params=[(6, "load"), pytest.param((1, *ALL), marks=pytest.mark.slow)], ids=len)
def report(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What became of requests, by call and state. An engine takes a second or two to be started after each."""
    found: dict[str, Any] = run_script("boundary_sessions.py", request.param)[0]
    return found


def test_every_request_ends_and_is_right_and_no_block_stays_referenced(report: dict[str, Any]) -> None:
    assert len(report) == {1: 3, 5: 79}[len({case.split(" ", 1)[1] for case in report})]
    assert not {case: found for case, found in report.items() if not found["right"]}
    assert not {case: found for case, found in report.items() if found["held"]}


def test_each_call_was_made_to_raise(report: dict[str, Any]) -> None:
    calls = {case.split()[0] for case, found in report.items() if found["raised"]}
    assert calls == {case.split()[0] for case in report}


def test_each_is_counted(report: dict[str, Any]) -> None:
    assert {case: found for case, found in report.items() if found["raised"] != (found["counted"] == 1)} == {}


def test_the_engine_rests_and_resets_after_it(report: dict[str, Any]) -> None:
    assert not {case: found for case, found in report.items() if found["busy"] or not found["reset"]}
