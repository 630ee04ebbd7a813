"""The `manthan` command."""

from importlib.metadata import version
from operator import attrgetter
from pkgutil import resolve_name
from typing import Annotated, Any

import typer
from pydantic import ByteSize
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from manthan.codec.registry import needs_profile
from manthan.manager.commands import make_console
from manthan.manager.commands.calibrate import calibrate
from manthan.manager.commands.sessions import app as sessions_app
from manthan.manager.config.model import FIELDS, ConfigError, ManthanConfig
from manthan.manager.config.resolve import DEFAULT, check_registered, choose_policy, resolve_config
from manthan.policies import BadPolicyError, get_policy, policy_names

LATE = {
    "bench": "manthan.benchmarks.cli:bench",
    "eval": "manthan.benchmarks.cli:evaluate",
    "doctor": "manthan.vllm_hooks.doctor.command:doctor",
    "simulate": "manthan.benchmarks.simulator.command:app",
}
"""Commands imported late, because some need packages that Manthan does not install."""


class Commands(TyperGroup):
    """Group of all commands. A command that cannot be imported says why when called. All others work."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *LATE]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in LATE:
            return super().get_command(ctx, cmd_name)
        try:
            group = resolve_name(LATE[cmd_name])
        except ModuleNotFoundError as error:
            extra = "vllm" if error.name in ("torch", "vllm") else "bench"
            how = f"pip install '.[{extra}]' in a clone of the repository"
            group = _refusing(f"manthan {cmd_name} needs {error.name}, which is not installed: {how}")
        except ImportError as error:
            group = _refusing(f"manthan {cmd_name} cannot be imported: {error}")
        command = typer.main.get_command(group)
        command.name = cmd_name
        return command


def _refusing(sentence: str) -> typer.Typer:
    """Return a command that takes any arguments, prints `sentence` as an error, and does nothing else."""
    refusing = typer.Typer(add_completion=False)
    anything = {"ignore_unknown_options": True, "allow_extra_args": True}

    @refusing.command(add_help_option=False, context_settings=anything, help=sentence.replace("[", r"\["))
    def refuse() -> None:
        typer.echo(sentence, err=True)
        raise typer.Exit(1)

    return refusing


app = typer.Typer(name="manthan", cls=Commands, no_args_is_help=True, help="Session memory manager for vLLM.")
config_app = typer.Typer(no_args_is_help=True, help="Look at configurations.")
app.add_typer(config_app, name="config")
app.add_typer(sessions_app, name="sessions")
app.command("calibrate")(calibrate)


@app.command("version")
def show_version() -> None:
    """Print Manthan's version."""
    typer.echo(version("manthan-kv"))


@app.command("policies")
def policies() -> None:
    """List the eviction policies, with their options and defaults."""
    table = Table("policy", "who goes first", "options", box=None)
    for name in policy_names():
        try:
            policy = get_policy(name)
        except BadPolicyError as error:
            table.add_row(Text(name), Text(str(error), style="red"), "")
            continue
        options = " ".join(
            f"{option}={'(required)' if field.is_required() else field.get_default(call_default_factory=True)}"
            for option, field in policy.Options.model_fields.items()
        )
        table.add_row(name, Text((policy.__doc__ or "").strip().partition("\n")[0]), Text(options))
    make_console().print(table)


@config_app.command("check")
def check_config(file: Annotated[str, typer.Argument(metavar="FILE", help="A YAML file, see configs/.")]) -> None:
    """Print the configuration from FILE and the environment, or the first mistake."""
    try:
        resolved = resolve_config(file)
        check_registered(resolved)
    except ConfigError as error:
        typer.echo(error, err=True)
        raise typer.Exit(1) from None
    table = Table("key", "value", "source", box=None)
    for key in FIELDS:
        table.add_row(key, Text(_value(resolved.config, key)), Text(resolved.sources[key]))
        if key == "policy.name":
            for option, value in choose_policy(resolved.config.policy).options:
                source = resolved.sources.get(f"policy.{option}", DEFAULT)
                table.add_row(f"policy.{option}", Text(str(value)), Text(source))
    make_console().print(table)
    codec = resolved.config.codec
    if needs_profile(codec.name) and not codec.profile:
        typer.echo(
            f"codec.name is {codec.name}, which needs a profile of the model that is served: `manthan calibrate MODEL` "
            "makes one, in minutes.",
            err=True,
        )


def _value(config: ManthanConfig, key: str) -> str:
    value = attrgetter(key)(config)
    return value.human_readable() if isinstance(value, ByteSize) else str(value)
