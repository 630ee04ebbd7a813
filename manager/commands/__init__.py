"""Parts of the `manthan` command, and its console."""

from rich.console import Console


def make_console() -> Console:
    """Return a console on standard output. If it is no terminal, no row is wrapped, so that grep works."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 1_000_000
    return console
