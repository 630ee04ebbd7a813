"""Measure what a step, a request, a KV block and a garbage collection cost with a thousand sessions or a million.

The heart (Manthan's session manager and its driver, called by vLLM's scheduler) is real. The engine is simulated,
without model, KV or GPU. Each number of sessions is measured in a separate process: all sessions go cold (count as
stored compressed), and then some are asked again, a few at a time.

    manthan bench scale [--sessions 1000,10000,100000,1000000] [--policy lru] [--out FOLDER]
    manthan bench scale --plot-only FOLDER/scale.json

See docs/scale.md.
"""

import gc
import time
from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import typer

from manthan.benchmarks import scale_report
from manthan.benchmarks.arms import make_console, new_report, read_report, write_report
from manthan.benchmarks.scale_engine import Heart

MOST_LONG = 100_000
"""Most sessions with --tokens each. If there are more, each has at most SHORT_TOKENS, to save memory."""
SHORT_TOKENS = 512
FIRST = 100
"""Sessions made before memory and objects are counted for the first time."""
PAGE_NBYTES = 4096


def scale(
    context: typer.Context,
    files: Annotated[list[Path] | None, typer.Argument(help="With --plot-only: a report.")] = None,
    sessions: Annotated[str, typer.Option(help="Comma-separated numbers of sessions.")] = "1000,10000,100000,1000000",
    tokens: Annotated[
        int, typer.Option(min=512, help=f"Tokens of a session; at most {SHORT_TOKENS} for more than {MOST_LONG:,}.")
    ] = 8192,
    policy: Annotated[str, typer.Option(help="Policy, such as lru or returns.")] = "lru",
    running: Annotated[int, typer.Option(min=1, help="Requests that run at a time.")] = 8,
    steps: Annotated[int, typer.Option(min=300, help="Steps of a measurement.")] = 3000,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements; the best must meet the goals.")] = 5,
    seed: Annotated[int, typer.Option(help="Seed of the order of sessions.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for JSON and plot.")] = Path("build", "benchmarks"),
    plot_only: Annotated[bool, typer.Option("--plot-only", help="Show and plot a report again.")] = False,
) -> None:
    """Measure the time of a step, a request and a garbage collection, and memory, for each number of sessions."""
    options, console = Namespace(**locals()), make_console()
    if bool(files) != plot_only or len(files or ()) > 1:
        raise typer.BadParameter("--plot-only takes one report; without --plot-only, give no report")
    if files:
        return scale_report.show(read_report(files[0], "scale"), files[0].with_suffix(".png"), console)
    runs: list[dict[str, Any]] = []
    report = new_report("scale", context.params, [], {}, {}) | {"runs": runs}
    out.mkdir(parents=True, exist_ok=True)
    for number in read_numbers(sessions):
        of_each = tokens if number <= MOST_LONG else min(tokens, SHORT_TOKENS)
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            runs.append(process.submit(measure, number, of_each, policy, running, steps, repeats, seed).result())
        console.print(f"  {number:,} sessions: done after {runs[-1]['took_s']:.0f} s")
        path = write_report(report, options.out)
    console.print(f"  {path}", soft_wrap=True)
    scale_report.show(report, path.with_suffix(".png"), console)


def read_numbers(text: str) -> list[int]:
    """Return `1000,4000` as numbers, ascending. Raises BadParameter."""
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = [0]
    if found[0] < 2 * FIRST:
        raise typer.BadParameter(f"--sessions must be whole numbers from {2 * FIRST} on, not {text!r}")
    return found


def measure(
    sessions: int, tokens: int, policy: str, running: int, steps: int, repeats: int, seed: int
) -> dict[str, Any]:
    """Return memory and times with `sessions` sessions. "repeats" has the times of each of `repeats` measurements."""
    began = time.monotonic()
    gc.collect()
    gc.freeze()  # as vLLM does when an engine has started
    heart = Heart(tokens, policy, seed)
    heart.fill(FIRST)
    before = _memory(heart)
    heart.fill(sessions)
    filled_s = time.monotonic() - began
    after = _memory(heart)
    more, blocks = sessions - FIRST, after["blocks"] - before["blocks"]
    objects = after["objects"] - before["objects"]
    repeated = []
    for _ in range(repeats):
        times = heart.serve(steps, running)
        began_ns = time.thread_time_ns()
        gc.collect()
        repeated.append(
            {
                "collection_ms": (time.thread_time_ns() - began_ns) / 1e6,
                "step_us": {name: scale_report.quantile(times.steps, name) / 1e3 for name in ("p50", "p99", "max")},
                "request_us": {name: scale_report.quantile(times.requests, name) / 1e3 for name in ("p50", "p99")},
                "requests_a_second": 1e9 * len(times.requests) / sum(times.requests),
            }
        )
    columns = [each for each in vars(heart.manager.blocks).values() if hasattr(each, "nbytes")]
    return {
        "sessions": sessions,
        "tokens": tokens,
        "blocks": after["blocks"],
        "block_nbytes": (after["nbytes"] - before["nbytes"]) / blocks,
        "table_nbytes": sum(each.nbytes for each in columns) / after["blocks"],
        "objects_a_session": objects / more,
        "objects_a_block": objects / blocks,
        "longest_ms": heart.longest_ns / 1e6,
        "repeats": repeated,
        "filled_s": filled_s,
        "took_s": time.monotonic() - began,
    }


def _memory(heart: Heart) -> dict[str, int]:
    """Return the counts of blocks and of objects tracked by the garbage collector, and the process's resident bytes."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_NBYTES
    return {"blocks": len(heart.manager.blocks), "objects": len(gc.get_objects()), "nbytes": resident}


if __name__ == "__main__":
    typer.run(scale)
