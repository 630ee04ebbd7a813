"""The `manthan inspect` command, run in this process."""

import json
import re
from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from manthan.manager.cli import app

PASSWORD = "not-for-the-log"


def run(*args: object) -> Result:
    return CliRunner().invoke(app, ["inspect", *map(str, args)])


def shown(*args: object) -> list[list[str]]:
    """The rows, cut where two spaces or more stand."""
    result = run(*args)
    assert (result.exit_code, result.stderr) == (0, "")
    return [re.split(r"\s{2,}", line.strip()) for line in result.stdout.splitlines()]


def parsed(*args: object) -> Any:
    result = run(*args, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    return json.loads(result.stdout)


def refusal(*args: object) -> str:
    """The sentence, with nothing beside it."""
    result = run(*args)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.count("\n") == 1
    assert PASSWORD not in result.stderr
    return result.stderr.strip()


def session_ids(*args: object) -> list[str]:
    return [session["id"] for space in parsed(*args)["namespaces"] for session in space["sessions"]]
