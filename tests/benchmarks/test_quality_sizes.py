"""The plot of several results: which points there are."""

import json
from pathlib import Path
from typing import Any

import typer
from typer.testing import CliRunner

from manthan.benchmarks import quality_sizes

EXACT = {"kl": None, "ratio_long": 1}


def result(file: Path, model: str, **kl: float) -> Path:
    settings: dict[str, Any] = {
        name: {"ratio_long": 5.0, "kl": {"mean": mean, "error": 0.001}} for name, mean in kl.items()
    }
    report = {"arguments": {"model": f"folder/{model}"}, "summary": {"transformers": {"exact": EXACT, **settings}}}
    file.write_text(json.dumps(report))
    return file


def test_a_panel_for_each_model_and_a_point_for_each_codec(tmp_path: Path) -> None:
    files = [
        result(tmp_path / "a.json", "plain", recomputed=0.0, one=0.02, two=0.01),
        result(tmp_path / "b.json", "plain", two=0.005),
        result(tmp_path / "c.json", "biased", two=0.03),
    ]
    command = typer.Typer()
    command.command()(quality_sizes.main)
    out = tmp_path / "plots" / "sizes.png"
    result_of = CliRunner().invoke(command, [*map(str, files), "--out", str(out)])
    assert result_of.exit_code == 0, result_of.output
    assert out.read_bytes().startswith(b"\x89PNG")
