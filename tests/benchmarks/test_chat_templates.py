"""What of a conversation is found again, by its chat template: the figures of docs/hints.md."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from manthan.benchmarks.chat_templates import BEHAVIOURS, Lengths, conversation, main

MODEL = str(Path(__file__).parents[1] / "data" / "tiny-llama")
DOCUMENT = (Path(__file__).parents[2] / "docs" / "hints.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def measured() -> dict[str, dict[str, Any]]:
    app = typer.Typer()
    app.command()(main)
    done = CliRunner().invoke(app, [MODEL, "--json"])
    assert done.exit_code == 0, done.output
    return {each["name"]: each for each in json.loads(done.stdout)}


def test_the_document_has_these_figures(measured: dict[str, dict[str, Any]]) -> None:
    rows = re.findall(r"^\| (.+?) \| ([\d.]+%) \| ([\d.]+%) \| (\d+) \|$", DOCUMENT, re.MULTILINE)
    assert rows == [
        (name, f"{each['kept']:.1%}", f"{each['last']:.1%}", f"{each['computed']:.0f}")
        for name, each in measured.items()
    ]


def test_every_turn_says_something_else() -> None:
    turns = list(conversation(Lengths(), 8, has_calls=True))
    said = [message["content"] for turn in turns for message in turn if message["content"]]
    assert len(set(said)) == len(said)
    assert len({each.name for each in BEHAVIOURS}) == len(BEHAVIOURS)
