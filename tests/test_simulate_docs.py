"""docs/simulate.md against the commands, the formats and the defaults that it is about."""

import re
from pathlib import Path

import pytest
from typer.main import get_command

from manthan.manager.cli import app
from manthan.manager.simulator.cost_model import CostModel
from manthan.manager.simulator.traces import read_trace
from manthan.manager.simulator.workload import AGENT, CHAT, READER, SINGLE

DOCS = Path(__file__).parents[1] / "docs"
TEXT = (DOCS / "simulate.md").read_text(encoding="utf-8")


def options() -> set[str]:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    params = [*commands["simulate"].params, *commands["workload"].params]
    return {option for param in params for option in param.opts if option.startswith("--")}


def test_all_options_are_named_and_no_others() -> None:
    of_the_commands = TEXT.split("## Speed")[0]
    assert set(re.findall(r"--[a-z][a-z-]+", of_the_commands)) == options() - {"--help"}


def test_the_csv_reads_as_the_text_says(tmp_path: Path) -> None:
    (example,) = re.findall(r"^```csv\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    path = tmp_path / "example.csv"
    path.write_text(example)
    alice, bob, again, alone = read_trace(path).requests
    assert again.keys[: 2299 // 16] == alice.keys
    assert again.input_tokens == 2300 + 400
    assert alice.keys[:75] == bob.keys[:75]
    assert alice.keys[75] != bob.keys[75]
    assert alone.session is None


def test_the_cost_model_has_these_defaults() -> None:
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)?) \| ([^|]+) \|", TEXT.split("## The cost model")[1], re.MULTILINE)
    documented = {
        name: float(value)
        for names, values in rows
        for name, value in zip(re.findall(r"\w+", names), values.split(","), strict=True)
    }
    assert documented == pytest.approx(CostModel().model_dump(), rel=0.003)


def test_the_kinds_of_sessions_are_these() -> None:
    table = TEXT.split("| | chat | agent | single | reader |")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    said = {row[0]: row[1:] for row in rows}
    kinds = (CHAT, AGENT, SINGLE, READER)

    def spreads(name: str) -> list[str]:
        return [f"{getattr(kind, name).median} ({getattr(kind, name).sigma})" for kind in kinds]

    assert said["requests of a session, geometric, mean"] == [f"{kind.turns}" for kind in kinds]
    pauses = [text for kind, text in zip(kinds, spreads("pause"), strict=True) if kind is not SINGLE]
    away = [text for kind, text in zip(kinds, spreads("away"), strict=True) if kind is not SINGLE]
    assert [*filter(None, said["pause after an answer, s"])] == pauses
    assert [*filter(None, said["… of which 10%, of a reader's 30%, are instead"])] == away
    assert [kind.away_share for kind in kinds] == [0.1, 0.1, 0, 0.3]
    assert said["shared system prompts"] == [f"{kind.systems}" for kind in kinds]
    assert said["their tokens"] == spreads("system")
    assert said["sessions that begin with a document"] == [f"{kind.document_share:.0%}" for kind in kinds]
    assert said["its tokens"] == spreads("document")
    assert said["tokens that a request adds"] == spreads("said")
    assert said["tokens of an answer"] == spreads("answer")
    assert said["requests that replace the last one"] == [f"{kind.edit_share:.0%}" for kind in kinds]


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", TEXT):
        assert (DOCS / target).exists(), target
    headings = {title.lower().replace(" ", "-") for title in re.findall(r"^#+ (.+)$", TEXT, re.MULTILINE)}
    assert set(re.findall(r"\]\(#([^)]+)\)", TEXT)) <= headings
