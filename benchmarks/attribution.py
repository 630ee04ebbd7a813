"""What it takes to tell whose request a prompt is, where many conversations have one name: microseconds on one core.

Each conversation has a system prompt of `--shared` blocks that all have, and `--own` of its own. Asked are prompts that
were asked before, next turns, and new conversations, 200 of each; a look is the time from `request_started` to its end,
which is on the scheduler's thread.

    python benchmarks/attribution.py [--conversations N,N] [--shared BLOCKS] [--own BLOCKS]
"""

import random
import statistics
import time
from typing import Annotated

import typer
from rich.table import Table

from manthan.benchmarks.arms import make_console
from manthan.manager.sessions.manager import SessionMemoryManager
from manthan.manager.sessions.session import MemoryShape
from manthan.policies import get_policy

NAME = "app"
LOOKS = 200
SHAPE = MemoryShape(block_tokens=16, hot_nbytes=1, bounds={0: 1})


def key(*parts: object) -> bytes:
    return "/".join(map(str, parts)).encode().ljust(32)


def conversation(number: object, shared: int, own: int) -> list[bytes]:
    """The block keys of a conversation."""
    return [key("system", n) for n in range(shared)] + [key(number, n) for n in range(own)]


def looks_us(conversations: int, shared: int, own: int) -> dict[str, list[float]]:
    """Microseconds of each look, by what was asked."""
    manager = SessionMemoryManager(get_policy("lru"), SHAPE, 1 << 40, idle_after_s=300.0)
    for number in range(conversations):
        manager.request_started(f"{number}", keys := conversation(number, shared, own), NAME, 0.0)
        manager.request_finished(f"{number}", keys, 0.0)
    rng = random.Random(1)
    taken: dict[str, list[float]] = {}
    for look in range(LOOKS):
        one = rng.randrange(conversations)
        asked = {
            "asked again": conversation(one, shared, own)[:-1],
            "next turn": [*conversation(one, shared, own), key(one, "next")],
            "new": conversation(f"new {look}", shared, own),
        }
        for what, keys in asked.items():
            began = time.perf_counter()
            manager.request_started(f"{what} {look}", keys, NAME, 0.0)
            taken.setdefault(what, []).append((time.perf_counter() - began) * 1e6)
            manager.request_finished(f"{what} {look}", keys[: shared + 1], 0.0)
    return taken


def main(
    conversations: Annotated[str, typer.Option(help="How many have one name.")] = "10,500,2000,8000",
    shared: Annotated[int, typer.Option(help="Blocks of the system prompt.")] = 20,
    own: Annotated[int, typer.Option(help="Blocks of a conversation's own.")] = 60,
) -> None:
    """Median and 99th percentile of a look."""
    table = Table("conversations", "asked again", "next turn", "new", title="µs, p50 / p99", box=None)
    for number in map(int, conversations.split(",")):
        taken = looks_us(number, shared, own)
        cells = [f"{statistics.median(t):.0f} / {sorted(t)[len(t) * 99 // 100]:.0f}" for t in taken.values()]
        table.add_row(f"{number:,}", *cells)
    make_console().print(table)


if __name__ == "__main__":
    typer.run(main)
