"""Sleep and resets of an engine that lives in its caller's process, which would not come to rest by itself."""

import json

import pytest
from scripts import run_script

pytestmark = pytest.mark.slow
SCRIPT = "stepped_pauses.py"


def test_a_sleep_amid_an_encoding_comes_to_rest_and_loses_what_was_hot() -> None:
    told = json.loads(run_script(SCRIPT, "nap")[0])
    assert told == {"steps": False, "held": False, "restored": [0, 0, 0]}


def test_a_reset_loses_no_output() -> None:
    told = json.loads(run_script(SCRIPT, "reset")[0])
    assert told["was_reset"] == [True] * 3
    assert told["answers"] == [told["undisturbed"]] * 2
    assert told["left"] == 0
