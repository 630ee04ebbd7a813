"""`manthan simulate`, end to end."""

import json
from pathlib import Path
from typing import Any

import pytest
from traces import EXCERPT
from typer.testing import CliRunner, Result

from manthan.benchmarks.simulator.traces import read_trace
from manthan.manager.cli import app


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first 300 requests."""
    path: Path = tmp_path_factory.mktemp("traces") / "short.jsonl"
    path.write_text("".join(EXCERPT.read_text().splitlines(keepends=True)[:300]))
    return path


def figures(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text())["results"]
    return rows


@pytest.mark.slow
def test_a_table_and_json_that_are_the_same_each_time(short: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    result = run(
        *("simulate", short, "--policy", "lru,lru,returns:prior=4", "--hot", "130k", "--cold", "2%,51200"),
        *("--json", rows),
    )
    assert result.exit_code == 0, result.output
    head, *lines = result.stdout.splitlines()
    assert head.split()[:3] == ["policy", "hot", "tokens"]
    small = f"{int(0.02 * read_trace(short).distinct_blocks) * 512:,}"
    assert [line.split()[:3] for line in lines] == [
        [policy, "129,536", cold] for policy in ("lru", "lru", "returns:prior=4") for cold in (small, "51,200")
    ]
    found = figures(rows)
    for row in found:
        assert 0 < row["hot_share"] + row["restored_share"] < 1
    assert json.loads(rows.read_text())["trace"]["requests"] == 300
    assert found[:2] == found[2:4]


def test_flags_change_what_happens(short: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"

    def one(*flags: object) -> dict[str, Any]:
        result = run("simulate", short, "--policy", "lru", "--hot", "130k", "--cold", "400k", "--json", path, *flags)
        assert result.exit_code == 0, result.output
        return figures(path)[0]

    assert one("--hot", "10M", "--idle-after", 300)["evictions"] < one("--hot", "10M", "--idle-after", 20)["evictions"]
    assert one("--measure-from", 0.75)["evictions"] < (plain := one())["evictions"]
    assert plain["divergence_mean"] is None


@pytest.mark.slow
def test_blocks_that_shrink_find_more_and_differ_less_than_coarse_ones(short: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    found: list[dict[str, Any]] = []
    for options in (["--level", 0], ["--level", 4], ["--level", 4, "--no-shrink"], []):
        words = "simulate", short, "--policy", "lru", "--hot", "130k", "--cold", "15%", "--json", rows, *options
        result = run(*words)
        assert result.exit_code == 0, result.output
        assert ("divergence" in result.stdout) == bool(options)
        found += figures(rows)
    coarse, shrinking, lossless, plain = found
    assert plain["divergence_mean"] is None
    assert lossless["restored_share"] < shrinking["restored_share"] <= coarse["restored_share"]
    assert 0 == lossless["divergence_mean"] < shrinking["divergence_mean"] < coarse["divergence_mean"]


def test_one_cache_and_the_share_of_the_gap_that_is_closed(short: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    result = run("simulate", short, "--policy", "lru,returns", "--hot", 0, "--cold", "5%,20%", "--json", path)
    assert result.exit_code == 0, result.output
    assert len(result.stdout.splitlines()) == 5
    for row in figures(path):
        assert 0 < row["found_share"] <= row["best_share"] < 1
        assert row["gap_closed"] == 0 or row["policy"] == "returns"
    run("simulate", short, "--policy", "returns", "--hot", 0, "--cold", "5%", "--json", path)
    assert figures(path)[0]["gap_closed"] is None


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--cold", "5x"], "--cold must be tokens, such as 64000 or 4M, or a share, such as 5%, not '5x'"),
        (["--cold", "0"], "--cold 0 is less than a block of 512 tokens: give it more"),
        (["--hot", "100"], "--hot 100 is less than a block of 512 tokens: give it more"),
        (["--idle-after", "0"], "--idle-after must be a plain number of seconds above 0, such as 2, not 0.0"),
        (["--policy", "lru:x=1"], "--policy lru:x=1: policy.x is no option of policy lru (there are none)"),
    ],
)
def test_a_mistake_is_one_sentence(arguments: list[str], sentence: str) -> None:
    result = run("simulate", EXCERPT, *arguments)
    assert result.exit_code == 1
    assert result.stderr == sentence + "\n"


def test_other_mistakes_are_one_sentence_too(tmp_path: Path) -> None:
    result = run("simulate", EXCERPT, "--hot", "30k")
    assert result.stderr.startswith(
        "--hot 30k is too small for the largest request of mooncake_conversation_1000.jsonl,"
    )
    assert run("simulate", EXCERPT, "--policy", "lur").stderr.startswith("unknown policy 'lur': choose one of ")
    assert run("simulate", tmp_path / "no").stderr.endswith("no: cannot be read: No such file or directory\n")
