"""What deploy/compose.yaml starts, without containers: vLLM with its flags, redis-server, Prometheus with its rules.

Every query of the board, and every alert, is asked of data.
"""

import json
import math
import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from deployment import DEPLOY, alerts, load, served_with
from prometheus_server import PrometheusServer
from redis_server import RedisServer
from typer.testing import CliRunner

from manthan.benchmarks.server import VllmServer
from manthan.manager.cli import app

MODEL = str(Path(__file__).parents[1] / "data" / "tiny-llama")
SMALL = {"--manthan-cold-bytes": "64MiB"}
ON_A_CPU = ["--block-size", "32", "--num-gpu-blocks-override", "131", "--max-model-len", "2048", "--enforce-eager"]
ON_A_CPU += ["--manthan-idle-after", "1"]
BOARD = json.loads((DEPLOY / "grafana" / "manthan.json").read_text(encoding="utf-8"))
TARGETS = [(panel["title"], target["expr"]) for panel in BOARD["panels"] for target in panel.get("targets", ())]
pytestmark = pytest.mark.slow
CHOSEN = {"$model_name": ".*", "$instance": ".*", "$__rate_interval": "5m"}


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def composed(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """A server with the flags of compose.yaml, but for its sizes."""
    values = SMALL | {"--manthan-redis-url": redis_server.url}
    flags = dict(flag.split("=", 1) for flag in served_with()["compose"])
    assert values.keys() <= flags.keys()
    given = [f"{name}={value}" for name, value in (flags | values).items()]
    with VllmServer(MODEL, [*ON_A_CPU, *given], tmp_path_factory.mktemp("vllm") / "log") as server:
        server.wait_until_ready(600)
        yield server
        server.kill()


@pytest.fixture(scope="module", params=["manthan_server", "composed"])
def server(request: pytest.FixtureRequest) -> VllmServer:
    """The one that other tests use too, with its tier in RAM; or one as in the compose file."""
    found: VllmServer = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module")
def prometheus(server: VllmServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrometheusServer]:
    """It has seen sessions go cold and come back, asked for and before they were asked for."""
    config = load("prometheus/prometheus.yaml")
    config["rule_files"] = [str(DEPLOY / "prometheus" / name) for name in config["rule_files"]]
    assert config["scrape_configs"][0]["static_configs"][0]["targets"] == ["vllm:8000"]
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [server.url.removeprefix("http://")]
    with PrometheusServer(config, tmp_path_factory.mktemp("prometheus")) as prometheus:
        before = {counter: seen(prometheus, counter) for counter in ("evictions", "prefetches", "restores")}
        for name in ("seen-1", "seen-2", "seen-3"):
            ask(server, name)
        prometheus.wait_for(lambda: seen(prometheus, "evictions") >= before["evictions"] + 3, "see sessions go cold")
        ask(server, "seen-1", {"prefetch": ["seen-2"]})
        prometheus.wait_for(lambda: seen(prometheus, "prefetches") > before["prefetches"], "see a prefetch")
        for number in range(8):  # more than the pool holds besides
            ask(server, f"later-{number}")
        ask(server, "seen-1")
        prometheus.wait_for(lambda: seen(prometheus, "restores") > before["restores"], "see a session come back")
        more = count(1)

        def is_judged() -> bool:
            ask(server, f"judged-{next(more)}")  # a step's few blocks are measured, and a verdict is of 64
            return bool(prometheus.query("vllm:manthan_codec_noise"))

        prometheus.wait_for(is_judged, "see a verdict on the codec")
        yield prometheus


def ask(server: VllmServer, name: str, hints: dict[str, object] | None = None) -> None:
    body = {"model": MODEL, "prompt": f"def {name}():\n" * 100, "max_tokens": 4, "session_id": name}
    if hints:
        body["kv_transfer_params"] = {"manthan": hints}
    httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status()


def seen(prometheus: PrometheusServer, counter: str) -> float:
    return sum(prometheus.query(f"vllm:manthan_{counter}_total"))


@pytest.mark.parametrize(("title", "expression"), TARGETS)
def test_a_panel_has_data(title: str, expression: str, prometheus: PrometheusServer) -> None:
    for variable, value in CHOSEN.items():
        expression = expression.replace(variable, value)
    values = prometheus.query(expression)
    assert values, f"{title}: no data"
    if "recheck" in expression and all(map(math.isnan, values)):  # of one restore in 1,000, and so far of none
        total, number = expression.split(" / ")
        values = prometheus.query(total) + prometheus.query(number)
        assert values == [0.0, 0.0], f"{title}: {values}"
    assert all(map(math.isfinite, values)), f"{title}: {values}"


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert["alert"])
def test_what_an_alert_looks_at_has_data(alert: dict[str, Any], prometheus: PrometheusServer) -> None:
    for condition in alert["expr"].split(" and "):
        value = re.sub(r" [<>=!]+ [\d.e-]+$", "", condition)
        assert value != condition, "it ends with no comparison"
        values = prometheus.query(value)
        assert values
        if "recheck" in value and all(map(math.isnan, values)):
            values = [number for part in value.split(" / ") for number in prometheus.query(part)]
            assert values == [0.0, 0.0]
        assert all(map(math.isfinite, values))
    assert rule(prometheus, alert["alert"])[0] == "ok"


def rule(prometheus: PrometheusServer, name: str) -> tuple[str, str]:
    """Whether it could be evaluated, and what came of it."""
    [group] = prometheus.ask("rules")["groups"]
    [found] = [rule for rule in group["rules"] if rule["name"] == name]
    return found["health"], found["state"]


def test_engines_can_be_scaled_by_it(prometheus: PrometheusServer) -> None:
    [trigger] = load("kubernetes/keda.yaml")["spec"]["triggers"]
    assert prometheus.query(trigger["metadata"]["query"]) == [0]  # nobody is being answered


@pytest.mark.parametrize("server", ["composed"], indirect=True)
def test_a_redis_that_dies_is_an_alert(
    server: VllmServer, redis_server: RedisServer, prometheus: PrometheusServer
) -> None:
    assert rule(prometheus, "ManthanStoreDown") == ("ok", "inactive")
    redis_server.kill()
    ask(server, "seen-4")
    prometheus.wait_for(lambda: rule(prometheus, "ManthanStoreDown") == ("ok", "pending"), "raise the alert")
    listed = CliRunner().invoke(app, ["sessions", "list", "--url", server.url])
    assert "The cold store, redis, does not answer: returns are computed again." in listed.output
    found = json.loads(CliRunner().invoke(app, ["doctor", "--url", server.url, "--json"]).output)
    [said] = [each["said"] for each in found["findings"] if each["check"] == "tiers"]
    assert said.endswith(f"redis at {redis_server.url} does not answer: sessions are computed again until it does.")
