"""docs/simulate.md against the commands, the formats and the defaults that it is about."""

import re
from dataclasses import asdict
from pathlib import Path

import pytest
from typer.main import get_command

from manthan.manager.cli import app
from manthan.manager.simulator.cost_model import CostModel

DOCS = Path(__file__).parents[1] / "docs"
TEXT = (DOCS / "simulate.md").read_text(encoding="utf-8")


def options() -> set[str]:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    return {option for param in commands["simulate"].params for option in param.opts if option.startswith("--")}


def test_all_options_are_named_and_no_others() -> None:
    of_the_command = TEXT.split("## Traces")[0]
    assert set(re.findall(r"--[a-z][a-z-]+", of_the_command)) == options() - {"--help"}


def test_the_cost_model_has_these_defaults() -> None:
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)?) \| ([^|]+) \|", TEXT.split("## The cost model")[1], re.MULTILINE)
    documented = {
        name: float(value)
        for names, values in rows
        for name, value in zip(re.findall(r"\w+", names), values.split(","), strict=True)
    }
    assert documented == pytest.approx(asdict(CostModel()), rel=0.003)


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", TEXT):
        assert (DOCS / target).exists(), target
    headings = {title.lower().replace(" ", "-") for title in re.findall(r"^#+ (.+)$", TEXT, re.MULTILINE)}
    assert set(re.findall(r"\]\(#([^)]+)\)", TEXT)) <= headings
