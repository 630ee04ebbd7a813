"""Console of the `manthan` command."""

from rich.console import Console


def make_console() -> Console:
    """Return standard output. Without a terminal a row stays on one line, for grep."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 1_000_000
    return console
