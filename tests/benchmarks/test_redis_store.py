"""The Redis benchmark at a tiny size: what it leaves behind, and that its report can be shown again."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import redis
import typer
from redis_server import RedisServer
from rich.console import Console
from typer.testing import CliRunner

from manthan.benchmarks.redis_report import OURS, RAW, latency_ratios, latency_rows, show, speed_ratios
from manthan.benchmarks.redis_store import Setting, latency_arm, main


def run(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(main)
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of a run on a server of the test's own, to which nothing of the run is left."""
    folder = tmp_path_factory.mktemp("redis-benchmark")
    with RedisServer(folder) as server:
        server.client.set("another's", "1")
        sizes = ("--blocks", "23", "--block-bytes", "200000", "--rounds", "3")
        result = run("--only", "speed", "--url", server.url, "--out", str(folder), *sizes)
        assert result.exit_code == 0, result.output
        assert server.client.keys() == ["another's"]
    return json.loads((folder / "redis_store.json").read_text())


def test_all_arms_have_a_rate_for_each_round(report: dict[str, Any]) -> None:
    speed = report["speed"]
    assert speed["rates"].keys() == {"put", "get"}
    for arms in speed["rates"].values():
        assert arms.keys() == {OURS, RAW}
        assert all(len(rates) == 3 and min(rates) > 0 for rates in arms.values())
    assert speed["megabytes"] == pytest.approx(4.6)
    assert speed["batch"] == 20
    assert report["machine"]["cores"] >= 1


def test_it_says_what_it_was_measured_with(report: dict[str, Any]) -> None:
    assert report["speed"]["redis-py"] == redis.__version__
    assert report["speed"]["parser"] == "HiredisParser"
    assert int(report["speed"]["redis"].split(".")[0]) >= 7


def test_the_report_is_shown_again(report: dict[str, Any], tmp_path: Path) -> None:
    returns = [{"ttft_s": time, "cached_tokens": 1984, "right": time < 3} for time in (9, 2, 3, 4)]
    report = report | {"arms": {"latency redis": {"returns": returns}, "latency host": {"returns": returns[:2]}}}
    console = Console(width=140, record=True, file=sys.stderr)
    show(report, tmp_path / "plot.png", console)
    text = console.export_text()
    assert "put, redis-py" in text
    assert "1 of 3" in text
    assert latency_ratios(latency_rows(report)) == {"redis / host": 1.5}


def test_the_ratio_is_that_of_each_round() -> None:
    rates = {"put": {OURS: [1.0, 9.0, 80.0], RAW: [2.0, 10.0, 100.0]}}
    assert speed_ratios({"speed": {"rates": rates}})["put"].samples == [0.5, 0.9, 0.8]


def test_arms_share_nothing_in_redis() -> None:
    setting = Setting("redis://127.0.0.1:1/0", "bench:", 2000, 12, 0)
    arms = {name: latency_arm(name, setting).engine for name in ("recompute", "host", "redis", "tiered")}
    assert arms["recompute"].manthan is None
    assert "redis" not in arms["host"].manthan
    assert arms["redis"].manthan["redis"]["prefix"] != arms["tiered"].manthan["redis"]["prefix"]
    assert arms["tiered"].manthan["cold_store"]["host_bytes"] == arms["host"].manthan["cold_store"]["max_bytes"]
    assert len({arm.blocks for arm in arms.values()}) == 1
    assert 2000 < 32 * arms["redis"].blocks < 2 * 2000
