"""The `manthan bench` command, run in this process."""

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from manthan.benchmarks.cli import bench


def run(*arguments: object) -> Result:
    """Errors that are no mistake of the caller's are raised."""
    wide = {"COLUMNS": "300"}
    return CliRunner().invoke(bench, [str(argument) for argument in arguments], catch_exceptions=False, env=wide)


def report(folder: Path, *arguments: object) -> dict[str, Any]:
    """What this benchmark has written into the folder, after a run that succeeded."""
    result = run(*arguments, "--out", folder)
    assert result.exit_code == 0, result.output
    return dict(json.loads((folder / f"{arguments[0]}.json").read_text()))


def refusal(*arguments: object) -> str:
    """What is said about arguments that are refused, in one line."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    lines = [line.strip("│ \n") for line in result.output.splitlines() if line.startswith("│")]
    return " ".join(lines)


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000
