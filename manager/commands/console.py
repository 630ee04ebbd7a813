"""Console of the `manthan` command."""

from rich.console import Console


def make_console() -> Console:
    """Return standard output. Where it is no terminal, a row stays one line, so that grep finds it."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 1_000_000
    return console
