"""A block may be named to be encoded in the very step that computes it: encodings begin behind the forward pass, and
behind the draft's, which computes some of the block's layers."""

from typing import Any

import pytest
from draft_model import make_draft
from scripts import run_script

LOADS_FIRST, DRAFT = "loads first", "draft"


@pytest.fixture(scope="module", params=[DRAFT, pytest.param(LOADS_FIRST, marks=pytest.mark.slow)])
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """vLLM has loads begun after the forward pass, or before it where a connector's loads are synchronous."""
    more: dict[str, Any] = {}
    if request.param == DRAFT:
        draft = make_draft(tmp_path_factory.mktemp("draft"))
        more = {"speculative_config": {"method": "eagle", "model": draft, "num_speculative_tokens": 2}}
    job = {"scenario": "same_step", "loads_first": request.param == LOADS_FIRST, "vllm": more}
    found: dict[str, Any] = run_script("sessions.py", job)[0]
    loads = [step.index("loads") < step.index("forward") for step in found["steps"] if "forward" in step]
    assert set(loads) == {request.param == LOADS_FIRST}
    assert any("draft" in step for step in found["steps"]) == (request.param == DRAFT)
    return found


def test_blocks_are_encoded_as_the_step_that_names_them_computes_them(report: dict[str, Any]) -> None:
    assert 0 < report["named"] <= len(report["equal"])  # as many as are begun at once
    assert len(report["equal"]) > 16
    assert report["state"] == "cold"
    assert all(report["equal"])
    again = any("draft" in step for step in report["steps"])  # the last one found is computed again
    assert report["restored"] == report["asked"] - again
    assert report["right"] == [True] * 3
    assert report["failures"] == []


def test_no_encoding_begins_before_the_forward_pass_of_its_step(report: dict[str, Any]) -> None:
    both = [step for step in report["steps"] if "forward" in step and "stores" in step]
    assert both
    passes = [[at for at, what in enumerate(step) if what in ("forward", "draft")] for step in both]
    assert all(max(before) < step.index("stores") for before, step in zip(passes, both, strict=True))
