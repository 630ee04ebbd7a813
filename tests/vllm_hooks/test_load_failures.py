"""Loads that fail, on a real engine: vLLM computes what they did not bring, from the first bad block on, once.

Asynchronous scheduling begins a step before the results of the one before are known.
"""

from typing import Any

import pytest
from scripts import run_script

WHAT = ["some", "shared", "beside", "aborted", "preempted"]
NOTHING = {"loads": 0, "requests": 0, "referenced": 0}

Report = dict[str, Any]


@pytest.fixture(scope="module", params=[pytest.param("synchronous", marks=pytest.mark.slow), "asynchronous"])
def report(request: pytest.FixtureRequest) -> Report:
    job = {"is_async": request.param == "asynchronous", "what": WHAT}
    told: Report = run_script("failed_loads.py", job)[0]
    return told


def check(told: Report, **began: int) -> None:
    """All answers are those of the first time, and each request computed only what it had to, once.

    Args:
        began: number of blocks of which a request computed nothing; all full ones if it is not named.
    """
    assert told["began"] == told["full"] | began
    assert told["same"]
    assert told["computed_once"]
    assert told["wrong"] == 0, "a block in the prefix cache is not the one that its hash names"
    assert not told["is_broken"]
    assert told["left"] == NOTHING


@pytest.mark.parametrize("at", [0, 1, 2], ids=["the first, so that all fail", "one amid them", "the last"])
def test_a_request_computes_from_the_first_bad_block_on(report: Report, at: int) -> None:
    told = report["some"][at]
    [(name, full)] = told["full"].items()
    assert full > 10
    check(told, **{name: (0, 5, full - 1)[at]})


def test_of_two_requests_with_one_head_only_the_one_whose_block_is_bad_computes_it(report: Report) -> None:
    check(report["shared"]["at_once"], one=3)


def test_others_find_the_head_that_was_computed_again(report: Report) -> None:
    told = report["shared"]["third"]
    assert told["began"]["three"] > 10
    check(told, three=told["began"]["three"])
    check(report["shared"]["again"])


def test_a_failure_is_not_felt_by_those_who_run_or_load_meanwhile(report: Report) -> None:
    check(report["beside"], fails=7)


def test_a_load_that_fails_when_its_request_is_gone_costs_nobody_else_anything(report: Report) -> None:
    check(report["aborted"]["meanwhile"])
    check(report["aborted"]["again"], gone=2)


def test_a_load_that_fails_when_its_request_has_lost_its_blocks_is_done_again(report: Report) -> None:
    check(report["preempted"])
