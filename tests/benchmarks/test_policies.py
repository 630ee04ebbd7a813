"""The policies' benchmark at a tiny size: every policy has figures, and they are shown again."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from manthan.policies import policy_names

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "policies.py"


def run(*arguments: object) -> str:
    done = subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policies")
    run("--sessions", "100", "--events", 100, "--rounds", 3, "--out", folder)
    return folder


def test_every_policy_has_times_and_memory(folder: Path) -> None:
    arms = json.loads((folder / "policies.json").read_text())["arms"]
    assert list(arms) == policy_names()
    for by_size in arms.values():
        assert list(by_size) == ["100"]
        assert len(by_size["100"]["us"]) == 3
        assert min(by_size["100"]["us"]) > 0
        assert 40 < by_size["100"]["nbytes"] / 100 < 10_000


def test_the_report_is_shown_again(folder: Path) -> None:
    text = run("--plot-only", folder / "policies.json")
    assert text.count("s3fifo") == 1
    assert "wanted: below 20 µs" in text


def test_policies_and_sizes_can_be_chosen(tmp_path: Path) -> None:
    run("--only", "lru", "--sessions", "60,200", "--events", 100, "--rounds", 1, "--out", tmp_path)
    arms = json.loads((tmp_path / "policies.json").read_text())["arms"]
    assert {name: list(by_size) for name, by_size in arms.items()} == {"lru": ["60", "200"]}
