"""Engines on one disk that are killed at random moments; `make kills` does it for longer."""

import sys
from pathlib import Path

import pytest
from kills import ENOUGH, kill


@pytest.mark.slow
def test_no_answer_is_wrong_after_kills_and_what_was_saved_comes_back(tmp_path: Path) -> None:
    kills = kill(3, 0, tmp_path, sys.stdout)
    assert kills.answers > 50
    assert kills.wrong == []
    assert kills.saved > 100
    assert kills.share >= ENOUGH
