"""Number of concurrent agents that a server can serve, with plain vLLM, vLLM's offload and Manthan.

An arm is one of these systems, run as `vllm serve`. All arms but `wide` have equal KV pools. All stores of KV outside
the pool are equally large. An agent goes through sessions of a trace. After each answer it pauses as long as the trace
between two requests, divided by --faster. Beyond a number of agents, called the cliff, their sessions outgrow the arm's
memory. Whole prompts are then computed again, and waits for the first token get long.

    manthan bench agents TRACE [--agents 16,32,48] [--arms plain,offload,host] [--codecs wht-5x] [--out FOLDER]
    manthan bench agents made-up --model qwen3-8b
    manthan bench agents --plot-only FOLDER/agents.json OTHER/agents.json

See docs/agents.md.
"""

import shlex
from argparse import Namespace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from manthan.benchmarks.load import BlockTokens, ModelOption, ModelProfile, read_manthan, read_size
from manthan.codec import DEFAULT


class Half(StrEnum):
    """Sessions of the trace that take part: every second session from the first (even) or second (odd) on, or all."""

    even = "even"
    odd = "odd"
    all = "all"


def agents(
    context: typer.Context,
    trace: Annotated[
        str, typer.Argument(help="File as for `simulate`, .xz too, or `made-up`; with --plot-only a report.")
    ],
    files: Annotated[list[Path] | None, typer.Argument(help="With --plot-only: further reports.")] = None,
    agents: Annotated[str, typer.Option(help="Numbers of agents; default: 4,8,16, on a GPU 8,16,32,48.")] = "",
    arms: Annotated[str, typer.Option(help="As for `load`; default: plain, host; on a GPU plain, offload, host.")] = "",
    codecs: Annotated[str, typer.Option(help="Of Manthan's arms, with commas; auto: a server's default.")] = DEFAULT,
    shrink: Annotated[float, typer.Option(min=0, help="Divisor of the tokens; 0: 64, on a GPU 4.")] = 0,
    faster: Annotated[float, typer.Option(min=0, help="Divisor of the pauses; 0: 10, on a GPU 1.5.")] = 0,
    copies: Annotated[int, typer.Option(min=1, help="Copies of each session, for more agents than sessions.")] = 1,
    half: Annotated[Half, typer.Option(help="Sessions of the trace that take part.")] = Half.all,
    seconds: Annotated[float, typer.Option(min=0, help="Length of each measurement; 0: 30, on a GPU 150.")] = 0,
    ramp: Annotated[
        float, typer.Option(min=0, help="First seconds, in which all agents begin and no return counts; 0: a third.")
    ] = 0,
    bound: Annotated[float, typer.Option(min=0, help="The cliff begins where p90 is above these seconds.")] = 2.0,
    pool: Annotated[str, typer.Option(help="KV pool, such as 24GiB; default: 36MiB, on a GPU 24GiB.")] = "",
    memory: Annotated[str, typer.Option(help="Bytes outside the pool, such as 24GiB; default: as the pool.")] = "",
    idle_after: Annotated[float, typer.Option(min=0, help="Manthan's idle.after_s.")] = 2,
    manthan: Annotated[str, typer.Option(help="Further configuration of Manthan, as YAML.")] = "",
    model: ModelOption = None,
    profile: ModelProfile = None,
    block_size: BlockTokens = 0,
    flags: Annotated[str, typer.Option(help="Further flags of `vllm serve`, in one string.")] = "",
    redis_url: Annotated[str, typer.Option(help="A running server for the arms in Redis; else one is started.")] = "",
    seed: Annotated[int, typer.Option(help="Seed of the choice of the agents' sessions.")] = 0,
    weka: Annotated[
        Path | None, typer.Option(help="Write agents' first sessions for AIPerf into this folder, and ask no server.")
    ] = None,
    start_timeout: Annotated[float, typer.Option(help="Seconds that a server may take to start.")] = 300,
    out: Annotated[Path, typer.Option(help="Folder for JSON, plot, logs.")] = Path("build", "benchmarks"),
    plot_only: Annotated[
        bool, typer.Option("--plot-only", help="Show and plot reports of earlier runs again.")
    ] = False,
) -> None:
    """Measure the time to the first token by number of agents, and find each arm's cliff."""
    options = Namespace(**locals())
    from manthan.benchmarks import agents_report
    from manthan.benchmarks.agents_run import run
    from manthan.benchmarks.arms import make_console

    if files and not plot_only:
        raise typer.BadParameter("only --plot-only takes several files")
    if plot_only:
        paths = [Path(trace), *(files or [])]
        return agents_report.show(agents_report.merged(paths), paths[0].with_suffix(".png"), make_console())
    options.pool, options.memory = read_size(pool, "--pool"), read_size(memory)
    options.manthan, options.flags, options.cold = read_manthan(manthan), shlex.split(flags), False
    run(options, context.params)


if __name__ == "__main__":
    typer.run(agents)
