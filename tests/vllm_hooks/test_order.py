"""A block may be named to be encoded in the very step that computes it: encodings begin behind the forward pass."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "helpers" / "same_step.py"


@pytest.fixture(
    scope="module", params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["loads last", "loads first"]
)
def report(request: pytest.FixtureRequest) -> dict[str, Any]:
    """vLLM has loads begun after the forward pass, or before it where a connector's loads are synchronous."""
    env = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
    job = json.dumps({"loads_first": request.param})
    done = subprocess.run([sys.executable, SCRIPT], input=job, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    loads = [step.index("loads") < step.index("forward") for step in found["steps"] if "forward" in step]
    assert set(loads) == {request.param}
    return found


def test_blocks_are_encoded_as_the_step_that_names_them_computes_them(report: dict[str, Any]) -> None:
    assert report["named"] == len(report["codes"]) > 16
    assert report["state"] == "cold"
    assert all(report["codes"])
    assert report["restored"] == len(report["codes"])  # the block behind them has another question
    assert report["right"] == [True] * 3
    assert report["failures"] == []


def test_no_encoding_begins_before_the_forward_pass_of_its_step(report: dict[str, Any]) -> None:
    both = [step for step in report["steps"] if "forward" in step and "spills" in step]
    assert both
    assert all(step.index("forward") < step.index("spills") for step in both)
