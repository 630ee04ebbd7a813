"""What very many sessions cost the scheduler's thread: microseconds of its time a request, milliseconds a list, bytes a
session.

The real session memory manager and its driver serve requests over a simulated KV pool; no model computes, and vLLM is
not needed. All sessions are known before the first request, as if an earlier process had left them; so many of them
have one session_id, the others one of their own or none. Some are hot and idle soon, the cold store is full, and each
eviction has to make room. Each figure is of a process of its own.

    manthan bench scale [--sessions 10000,100000] [--blocks 32,128] [--policy lru,returns] [--out FOLDER]
    manthan bench scale --plot-only FOLDER/scale.json

See docs/benchmarks.md.
"""

from pathlib import Path
from typing import Annotated

import typer


def scale(
    context: typer.Context,
    policy: Annotated[str, typer.Option(help="Names, with commas between; `all` for all of them.")] = "lru",
    sessions: Annotated[str, typer.Option(help="That are known, with commas between.")] = "10000,100000",
    blocks: Annotated[str, typer.Option(help="Of a session on average, with commas between.")] = "32",
    named: Annotated[float, typer.Option(min=0, max=1, help="Share of them that have one session_id.")] = 0.1,
    pool: Annotated[int, typer.Option(min=64, help="Blocks of the KV pool, for sessions of 32 blocks.")] = 65_536,
    events: Annotated[float, typer.Option(min=1, help="A second: about six are a request.")] = 1000,
    requests: Annotated[int, typer.Option(min=1, help="Measured.")] = 6000,
    warm_up: Annotated[int, typer.Option(min=0, help="Requests before.")] = 3000,
    rounds: Annotated[int, typer.Option(min=1, help="Of each; the least of them counts, request by request.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the requests.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for JSON and plot.")] = Path("build", "benchmarks"),
    plot_only: Annotated[
        list[Path] | None, typer.Option(help="Show and plot this JSON of an earlier run again; several side by side.")
    ] = None,
) -> None:
    """What very many sessions cost the scheduler's thread."""
    from manthan.benchmarks.scale_report import run
    from manthan.benchmarks.scale_world import Scale
    from manthan.policies import policy_names

    names = policy_names() if policy == "all" else policy.split(",")
    scales = [
        Scale(name, known, named, each, max(64, pool * each // 32), events, requests, warm_up, seed)
        for name in names
        for each in numbers("blocks", blocks)
        for known in numbers("sessions", sessions)
    ]
    run(scales, rounds, out, plot_only or [], context.params)


def numbers(option: str, text: str) -> list[int]:
    """`1,2,4`; raises BadParameter."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) >= 4 for part in parts):
        raise typer.BadParameter(f"--{option} must be whole numbers, 4 or more, with commas between, not {text!r}")
    return [int(part) for part in parts]


if __name__ == "__main__":
    typer.run(scale)
