"""`manthan config check`: the resolved configuration."""

from typing import Annotated

import typer
from pydantic import ByteSize
from rich.table import Table
from rich.text import Text

from manthan.codec.registry import needs_profile
from manthan.manager.commands.console import make_console
from manthan.manager.config.model import FIELDS
from manthan.manager.config.registered import check_registered, choose_policy
from manthan.manager.config.resolve import DEFAULT, ConfigError, ManthanConfig, Resolved, resolve_config


def check(file: Annotated[str, typer.Argument(metavar="FILE", help="A YAML file, see configs/.")]) -> None:
    """Print the configuration from FILE and the environment, or the first mistake."""
    try:
        resolved = resolve_config(file)
        check_registered(resolved)
    except ConfigError as error:
        typer.echo(error, err=True)
        raise typer.Exit(1) from None
    make_console().print(_table(resolved))
    codec = resolved.config.codec
    if needs_profile(codec.name) and not codec.profile:
        typer.echo(
            f"codec.name is {codec.name}, which needs a profile of the model that is served: `manthan calibrate MODEL` "
            "makes one, in minutes.",
            err=True,
        )


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
    for name in key.split("."):
        value = getattr(value, name)
    return value.human_readable() if isinstance(value, ByteSize) else str(value)
