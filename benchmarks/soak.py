"""Rounds of mixed requests on a small pool for as long as wanted: errors, wrong answers, leaks, memory.

A round is 67 requests of four users at a time: short and long ones, chats of several turns, tools, streams, streams
that the client leaves. Between the four legs of a round nobody asks, so that all sessions go idle and cold; the chats
return in each. The pool holds a few sessions and the cold store less than a round makes, so that blocks are dropped as
well. At the end nothing may be left: no block in use, no session but cold ones, no more bytes than the budget.

    python benchmarks/soak.py [--minutes 30] [--out FOLDER]
    python benchmarks/soak.py --plot-only FOLDER/soak.json

Exit status 1 if a request failed, an answer was wrong or something was left. See docs/capacity.md.
"""

import shlex
from pathlib import Path
from typing import Annotated

import typer

import manthan.benchmarks


def soak(
    context: typer.Context,
    minutes: Annotated[float, typer.Option(min=0, help="Rounds are begun for so long; 0: one round.")] = 0,
    scale: Annotated[float, typer.Option(min=0.01, max=1, help="Of the length of long answers.")] = 1,
    users: Annotated[int, typer.Option(min=1, help="At a time.")] = 4,
    warm_up: Annotated[float, typer.Option(min=0, help="Seconds until memory counts for the slope.")] = 60,
    without: Annotated[bool, typer.Option("--without-manthan", help="On plain vLLM, to compare memory.")] = False,
    model: Annotated[Path | None, typer.Option(help="Folder of a model that can chat, with weights.")] = None,
    block_size: Annotated[int, typer.Option(help="Tokens of a block; 0: 32, on a GPU 16.")] = 0,
    flags: Annotated[str, typer.Option(help="Further flags of `vllm serve`, in one string.")] = "",
    seed: Annotated[int, typer.Option(help="Of the requests.")] = 0,
    start_timeout: Annotated[float, typer.Option(help="Seconds that the server may take to start.")] = 300,
    out: Annotated[Path, typer.Option(help="Folder for JSON, plot, log.")] = Path("build", "benchmarks"),
    plot_only: Annotated[Path | None, typer.Option(help="Show and plot this JSON of an earlier run again.")] = None,
) -> None:
    """Rounds of mixed requests: errors, wrong answers, leaks, memory."""
    manthan.benchmarks.__path__.append(str(Path(__file__).parent))  # the soak's other parts are not in the wheel
    from manthan.benchmarks.soak_run import SoakOptions, run

    options = SoakOptions(
        minutes, scale, users, warm_up, not without, model, block_size, shlex.split(flags), seed, start_timeout, out
    )
    run(options, plot_only, context.params)


if __name__ == "__main__":
    typer.run(soak)
