"""How fast `manthan simulate` replays a trace: requests a second on one core, and where the time goes.

Time is the process's own CPU time, so that what else the machine does matters less. Reading the trace does not count.

    python benchmarks/simulator.py TRACE [--policy NAME,NAME] [--rounds N] [--out FOLDER] [--profile]
"""

import cProfile
import gc
import pstats
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from manthan.benchmarks.arms import OUT, make_console, new_report, write_report
from manthan.manager.simulator.replay import Setup
from manthan.manager.simulator.run import replay
from manthan.manager.simulator.traces import Trace, read_trace
from manthan.policies import get_policy

SHARES = ((0.0, 0.02), (0.0, 0.1), (0.0, 0.2), (0.02, 0.08), (0.05, 0.15))
"""Of the distinct blocks: the KV pool's and the cold store's."""
SLOWEST = 20


def setups(trace: Trace, policy: str) -> dict[str, Setup]:
    blocks = trace.distinct_blocks
    return {
        f"{policy}, pool {hot:.0%}, cold {cold:.0%}": Setup(
            get_policy(policy),
            hot_blocks=int(hot * blocks),
            cold_blocks=int(cold * blocks),
            block_tokens=trace.block_tokens,
        )
        for hot, cold in SHARES
    }


def requests_a_second(trace: Trace, setup: Setup) -> float:
    gc.collect()
    began = time.process_time()
    replay(trace.requests, setup)
    return len(trace.requests) / (time.process_time() - began)


def blocks_a_request(trace: Trace) -> float:
    """Blocks that a prompt asks for, the last one perhaps not full."""
    return sum(-(-request.input_tokens // trace.block_tokens) for request in trace.requests) / len(trace.requests)


def show(console: Console, trace: Trace, rows: dict[str, list[float]]) -> None:
    blocks = blocks_a_request(trace)
    caption = f"{trace.name}: {len(trace.requests):,} requests, which ask for {blocks:.1f} blocks each"
    table = Table("requests a second", "median", "least", "most", "blocks a second", box=SIMPLE, caption=caption)
    for name, rounds in rows.items():
        median = statistics.median(rounds)
        table.add_row(name, *(f"{value:,.0f}" for value in (median, min(rounds), max(rounds), median * blocks)))
    console.print(table)


def profile(console: Console, trace: Trace, name: str, setup: Setup) -> None:
    """The functions that take longest, without those they call."""
    profiler = cProfile.Profile()
    profiler.runcall(replay, trace.requests, setup)
    console.print(name)
    pstats.Stats(profiler, stream=console.file).sort_stats("tottime").print_stats(SLOWEST)


def main(
    path: Annotated[Path, typer.Argument(metavar="TRACE")],
    policy: Annotated[str, typer.Option(help="Names, separated by commas.")] = "lru",
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    out: Path = OUT,
    with_profile: Annotated[bool, typer.Option("--profile", help="Show what takes longest.")] = False,
) -> None:
    console = make_console()
    out.mkdir(parents=True, exist_ok=True)
    trace = read_trace(path)
    gc.freeze()  # as `manthan simulate` does
    worlds = {key: setup for name in policy.split(",") for key, setup in setups(trace, name).items()}
    rows: dict[str, list[float]] = {name: [] for name in worlds}
    with console.status("") as status:
        for number in range(rounds):
            for name, setup in worlds.items():
                status.update(f"{name}: round {number + 1} of {rounds}")
                rows[name].append(requests_a_second(trace, setup))
    show(console, trace, rows)
    arguments: dict[str, Any] = {"trace": trace.name, "requests": len(trace.requests), "rounds": rounds}
    arguments["blocks_a_request"] = blocks_a_request(trace)
    report = new_report("simulator", arguments, [], rows, {})
    console.print(
        f"  {report['machine']['cpu']}, Python {report['machine']['python']}, load {report['machine']['load']}"
    )
    console.print(f"  {write_report(report, out)}", soft_wrap=True)
    if with_profile:
        for name, setup in worlds.items():
            profile(console, trace, name, setup)


if __name__ == "__main__":
    typer.run(main)
