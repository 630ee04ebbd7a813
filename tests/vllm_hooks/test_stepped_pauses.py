"""Sleep and resets of an engine that lives in its caller's process, which would not come to rest by itself."""

import json

import pytest
from scripts import run_script

pytestmark = pytest.mark.slow
SCRIPT = "stepped_pauses.py"


@pytest.mark.parametrize("what", ["nap", "no nap"])
def test_what_was_begun_ends_before_it_sleeps(what: str) -> None:
    told = json.loads(run_script(SCRIPT, what)[0])
    assert (told["steps"], told["held"]) == (False, False)
    assert all(told["restored"]) == (what == "nap")


def test_a_reset_loses_no_output() -> None:
    told = json.loads(run_script(SCRIPT, "reset")[0])
    assert told["was_reset"] == [True] * 3
    assert told["answers"] == [told["undisturbed"]] * 2
    assert told["left"] == 0
