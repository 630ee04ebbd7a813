"""The `manthan` command."""

from importlib.metadata import entry_points, version
from typing import Annotated

import typer
from pydantic import ByteSize
from pydantic.fields import FieldInfo
from rich.table import Table
from rich.text import Text

from manthan.manager.config import DEFAULT, ConfigError, ManthanConfig, Resolved, resolve_config
from manthan.manager.config_model import FIELDS
from manthan.manager.console import make_console
from manthan.manager.inspect import inspect
from manthan.manager.registries import check_registered, choose_policy
from manthan.manager.simulate import simulate
from manthan.manager.workload import workload
from manthan.policies import BadPolicyError, get_policy, policy_names

app = typer.Typer(name="manthan", no_args_is_help=True, help="Session memory manager for vLLM.")
config_app = typer.Typer(no_args_is_help=True, help="Look at configurations.")
app.add_typer(config_app, name="config")
app.command("inspect")(inspect)
app.command("simulate")(simulate)
app.command("workload")(workload)
for group in entry_points(group="manthan.commands"):
    app.add_typer(group.load(), name=group.name)


@app.command("version")
def show_version() -> None:
    """Print Manthan's version."""
    typer.echo(version("manthan-kv"))


@config_app.command("check")
def check(file: Annotated[str, typer.Argument(metavar="FILE", help="A YAML file, see configs/.")]) -> None:
    """Print what FILE and the environment amount to, or what is wrong with them."""
    try:
        resolved = resolve_config(file)
        check_registered(resolved)
    except ConfigError as error:
        typer.echo(error, err=True)
        raise typer.Exit(1) from None
    make_console().print(_table(resolved))


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


def _table(resolved: Resolved) -> Table:
    table = Table("key", "value", "source", box=None)
    for key in FIELDS:
        table.add_row(key, Text(_value(resolved.config, key)), Text(resolved.sources[key]))
        if key == "policy.name":
            for option, value in choose_policy(resolved.config.policy).options:
                source = resolved.sources.get(f"policy.{option}", DEFAULT)
                table.add_row(f"policy.{option}", Text(str(value)), Text(source))
    return table


def _value(config: ManthanConfig, key: str) -> str:
    value: object = config
    for name in key.split(".", 1):
        value = getattr(value, name)
    return value.human_readable() if isinstance(value, ByteSize) else str(value)
