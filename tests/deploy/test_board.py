"""The Grafana board and the alert rules: whole, and understood by those who read them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from deployment import DEPLOY, alerts, load
from prometheus_server import promtool

from manthan.vllm_hooks.telemetry.metrics import METRICS

BOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "manthan.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]


def test_every_metric_is_on_the_board() -> None:
    named = set(re.findall(r"vllm:manthan_\w+", " ".join(EXPRESSIONS)))
    shown = {re.sub("_(total|bucket|sum|count)$", "", name).removeprefix("vllm:manthan_") for name in named}
    assert shown == set(METRICS)
    assert all(panel["title"] and panel["description"] for panel in PANELS)


def test_every_series_is_of_what_was_chosen() -> None:
    """Models and servers, by the variables above the panels; all panels ask the data source that was chosen there."""
    names = [variable["name"] for variable in BOARD["templating"]["list"]]
    assert names == ["datasource", "model_name", "instance"]
    for expression in EXPRESSIONS:
        assert expression.count('{model_name=~"$model_name",instance=~"$instance"') == expression.count("vllm:")
    for panel in PANELS:
        for one in [panel, *panel["targets"]]:
            assert one["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_every_query_is_promql(tmp_path: Path) -> None:
    """As rules, which promtool can check without a server."""
    chosen = [expression.replace("$__rate_interval", "5m") for expression in EXPRESSIONS]
    rules = [{"record": f"panel:{n}", "expr": expression} for n, expression in enumerate(chosen)]
    (tmp_path / "rules.yaml").write_text(json.dumps({"groups": [{"name": "board", "rules": rules}]}))
    promtool("check", "rules", tmp_path / "rules.yaml")


def test_prometheus_takes_configuration_and_rules() -> None:
    promtool("check", "config", DEPLOY / "prometheus" / "prometheus.yaml")


def test_alerts_fire_when_they_should() -> None:
    promtool("test", "rules", Path(__file__).with_name("alerts.yaml"))


@pytest.mark.parametrize("name", [alert["alert"] for alert in alerts()])
def test_it_is_tested_that_an_alert_fires_and_that_it_does_not(name: str) -> None:
    text = Path(__file__).with_name("alerts.yaml").read_text(encoding="utf-8")
    assert re.search(rf"alertname: {name}, exp_alerts: \[\]", text)
    assert re.search(rf"alertname: {name}\n +exp_alerts:\n +- exp_labels", text)


def test_grafana_is_given_the_board_and_where_its_data_is() -> None:
    [source] = load("grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    services = load("compose.yaml")["services"]
    assert source["url"] == "http://prometheus:9090"
    assert source["jsonData"]["timeInterval"] == load("prometheus/prometheus.yaml")["global"]["scrape_interval"]
    [provider] = load("grafana/provisioning/dashboards/manthan.yaml")["providers"]
    mounted = dict(volume.split(":")[:2] for volume in services["grafana"]["volumes"])
    assert mounted["./grafana/manthan.json"] == f"{provider['options']['path']}/manthan.json"
    assert mounted["./grafana/provisioning"] == "/etc/grafana/provisioning"
