"""The `manthan` command."""

from importlib.metadata import version
from typing import Annotated

import typer
from pydantic import ByteSize
from rich.table import Table

from manthan.manager.config import ConfigError, ManthanConfig, Resolved, resolve_config
from manthan.manager.console import make_console
from manthan.manager.inspect import inspect
from manthan.manager.registries import check_registered
from manthan.manager.simulate import simulate
from manthan.manager.workload import workload

app = typer.Typer(name="manthan", no_args_is_help=True, help="Session memory manager for vLLM.")
config_app = typer.Typer(no_args_is_help=True, help="Look at configurations.")
app.add_typer(config_app, name="config")
app.command("inspect")(inspect)
app.command("simulate")(simulate)
app.command("workload")(workload)


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


def _table(resolved: Resolved) -> Table:
    table = Table("key", "value", "source", box=None)
    for key, source in resolved.sources.items():
        table.add_row(key, _value(resolved.config, key), source)
    return table


def _value(config: ManthanConfig, key: str) -> str:
    value: object = config
    for name in key.split(".", 1):
        value = getattr(value, name)
    return value.human_readable() if isinstance(value, ByteSize) else str(value)
