"""Commands of packages: entry points of the group `manthan.commands`, each a name and a typer.Typer.

A Typer of one command, and no callback, is that command; any other is a group of them.
"""

from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer
from rich.markup import escape
from typer.core import TyperGroup

GROUP = "manthan.commands"


class Commands(TyperGroup):
    """Our commands and those of packages, which are loaded when they are asked for.

    One that cannot be loaded says why in one sentence; the others work.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *(point.name for point in entry_points(group=GROUP))]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        own = super().get_command(ctx, cmd_name)
        if own is None:
            for point in entry_points(group=GROUP, name=cmd_name):
                return _load(point)
        return own


def _load(point: EntryPoint) -> Any:
    try:
        group = point.load()
        if not isinstance(group, typer.Typer):
            raise TypeError(f"it must be a typer.Typer, not {group!r}")
        group._add_completion = False
        command = typer.main.get_command(group)
    except Exception as error:  # whatever another's module does when it is imported
        command = _refusal(_why(point, error))
    command.name = point.name
    return command


def _why(point: EntryPoint, error: Exception) -> str:
    package = point.dist.name if point.dist else ""
    if isinstance(error, ModuleNotFoundError) and error.name and point.extras:
        missing, extras = error.name.partition(".")[0], ",".join(point.extras)
        return f"manthan {point.name} needs {missing}, which is not installed: pip install '{package}[{extras}]'"
    of = f" of the package {package}" if package else ""
    said = " ".join(str(error).split())
    return f"manthan {point.name}{of} cannot be loaded: {type(error).__name__}{f': {said}' if said else ''}"


def _refusal(sentence: str) -> Any:
    """A command that takes any arguments, and only says that."""
    refusing = typer.Typer(add_completion=False)
    anything = {"ignore_unknown_options": True, "allow_extra_args": True}

    @refusing.command(add_help_option=False, context_settings=anything, help=escape(sentence))
    def refuse() -> None:
        typer.echo(sentence, err=True)
        raise typer.Exit(1)

    return typer.main.get_command(refusing)
