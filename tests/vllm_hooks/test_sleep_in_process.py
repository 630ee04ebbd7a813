"""The same of an engine that lives in its caller's process, which would not come to rest by itself."""

import json

import pytest
from scripts import run_script


@pytest.mark.parametrize("has_time", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_an_engine_that_its_caller_steps_ends_what_was_begun_before_it_sleeps(has_time: bool) -> None:
    told = json.loads(run_script("nap.py", has_time)[0])
    assert (told["steps"], told["held"]) == (False, False)
    assert sorted(map(bool, told["restored"])) == ([True] * 3 if has_time else [False, False, True])
