"""docs/configuration.md, docs/metrics.md and deploy/: current, complete, and about nothing that there is not."""

import re
from pathlib import Path
from types import ModuleType

import pytest
from deployment import DEPLOY, alerts, script
from documents import rows

from manthan.manager.config.model import FIELDS, REDIS_PASSWORD
from manthan.manager.config.resolve import ENV_PREFIX, FLAG_KEYS
from manthan.manager.events import DropCause
from manthan.manager.session.hints import Hints
from manthan.manager.session.table import SessionState
from manthan.policies import BUILTIN
from manthan.vllm_hooks.telemetry.metrics import METRICS

DOCS = Path(__file__).parents[1] / "docs"
CONFIGURATION = (DOCS / "configuration.md").read_text(encoding="utf-8")
METRICS_MD = (DOCS / "metrics.md").read_text(encoding="utf-8")
SERIES = {
    f"vllm:manthan_{name}{suffix}"
    for name, metric in METRICS.items()
    for suffix in {"Gauge": [""], "Counter": ["_total"], "Histogram": ["", "_bucket", "_sum", "_count"]}[
        metric.kind.__name__
    ]
}


DEPLOYED = [path for path in sorted(DEPLOY.rglob("*")) if path.is_file() and "__pycache__" not in path.parts]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    return script(DOCS / "generate.py")


@pytest.mark.parametrize("name", ["configuration.md", "metrics.md"])
def test_what_is_generated_is_current(name: str, generator: ModuleType) -> None:
    text = (DOCS / name).read_text(encoding="utf-8")
    assert text == generator.with_generated(text, generator.DOCUMENTS[name]), f"docs/{name} is old: run `make docs`"


def test_every_key_is_there_with_an_explanation(generator: ModuleType) -> None:
    rows = dict(re.findall(r"^\| `([\w.]+)` \| .* \| (.+) \|$", CONFIGURATION, re.MULTILINE))
    assert set(FIELDS) <= set(rows)
    assert all(rows[key] for key in FIELDS)
    assert set(re.findall(r"`(--manthan-[a-z-]+)`", CONFIGURATION)) == {*FLAG_KEYS, "--manthan-config"}


def test_every_option_of_every_policy_is_there() -> None:
    options = re.findall(r"^\| `policy\.(?!name)(\w+)` \| `(\w+)` \|", CONFIGURATION, re.MULTILINE)
    assert options == [(name, policy.name) for policy in BUILTIN.values() for name in policy.Options.model_fields]


def test_queries_name_metrics_that_there_are() -> None:
    blocks = re.findall(r"^```promql\n(.*?)^```", METRICS_MD, re.MULTILINE | re.DOTALL)
    expressions = [line for block in blocks for line in block.splitlines() if not line.startswith("#")]
    rules = alerts()
    named = set(re.findall(r"vllm:manthan_\w+", "\n".join([*expressions, *(rule["expr"] for rule in rules)])))
    assert len(expressions) > 5
    assert named
    assert named <= SERIES
    assert all(rule["annotations"]["summary"] for rule in rules)


def test_every_alert_is_explained() -> None:
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    assert sorted(row[0].strip("`") for row in rows(text, "alert")) == sorted(rule["alert"] for rule in alerts())


def test_labels_in_queries_are_those_of_the_metrics() -> None:
    named = re.findall(r"vllm:manthan_(\w+?)(?:_total)?\{(\w+)=", METRICS_MD)
    assert named
    assert [METRICS[name].label for name, _ in named] == [label for _, label in named]


def test_values_of_labels_are_those_of_the_code() -> None:
    lines = dict(
        re.findall(r"^- `(\w+)`(?: of dropped blocks)?: (.*?)(?=\n- |\n\n)", METRICS_MD, re.MULTILINE | re.DOTALL)
    )
    assert set(re.findall(r"`(\w+)` ?(?:\(|,|\.)", lines["state"])) == set(SessionState)
    causes = set(re.findall(r"`(\w+)`", lines["cause"])) - set(Hints.model_fields)
    assert causes == set(DropCause) - set(Hints.model_fields)
    dropped = set(re.findall(r'dropped_blocks_total\{cause="(\w+)"', METRICS_MD))
    assert dropped <= set(DropCause)


@pytest.mark.parametrize("path", DEPLOYED, ids=lambda path: path.relative_to(DEPLOY).as_posix())
def test_what_is_deployed_names_what_there_is(path: Path) -> None:
    """Flags, variables and metrics of Manthan's."""
    text = path.read_text(encoding="utf-8")
    assert set(re.findall(r"--manthan-[a-z-]+", text)) <= {*FLAG_KEYS, "--manthan-config"}
    variables = {ENV_PREFIX + key.replace(".", "__").upper() for key in FIELDS} | {REDIS_PASSWORD}
    assert set(re.findall(rf"\b{ENV_PREFIX}\w+", text)) <= variables
    assert set(re.findall(r"vllm:manthan_\w+", text)) <= SERIES
