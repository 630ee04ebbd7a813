"""The `manthan` command."""

from importlib.metadata import version

import typer
from pydantic.fields import FieldInfo
from rich.table import Table
from rich.text import Text

from manthan.manager.commands.calibrate import calibrate
from manthan.manager.commands.config import check
from manthan.manager.commands.console import make_console
from manthan.manager.commands.others import Commands
from manthan.manager.commands.sessions import app as sessions_app
from manthan.manager.commands.simulate import simulate
from manthan.policies import BadPolicyError, get_policy, policy_names

app = typer.Typer(name="manthan", cls=Commands, no_args_is_help=True, help="Session memory manager for vLLM.")
config_app = typer.Typer(no_args_is_help=True, help="Look at configurations.")
app.add_typer(config_app, name="config")
config_app.command("check")(check)
app.add_typer(sessions_app, name="sessions")
app.command("calibrate")(calibrate)
app.command("simulate")(simulate)


@app.command("version")
def show_version() -> None:
    """Print Manthan's version."""
    typer.echo(version("manthan-kv"))


@app.command("policies")
def policies() -> None:
    """List the eviction policies there are, with their options and defaults."""
    table = Table("policy", "who goes first", "options", box=None)
    for name in policy_names():
        try:
            policy = get_policy(name)
        except BadPolicyError as error:
            table.add_row(Text(name), Text(str(error), style="red"), "")
            continue
        lines = (policy.__doc__ or "").strip().splitlines() or [""]
        options = " ".join(f"{option}={_default(field)}" for option, field in policy.Options.model_fields.items())
        table.add_row(*map(Text, (name, lines[0], options)))
    make_console().print(table)


def _default(field: FieldInfo) -> str:
    return "(required)" if field.is_required() else str(field.get_default(call_default_factory=True))
