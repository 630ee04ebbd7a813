"""Where the `manthan` command prints."""

from rich.console import Console


def make_console() -> Console:
    """Standard output; where that is no terminal, a row stays one line for grep, whatever its length."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 1_000_000
    return console
