"""Number of sessions whose KV is kept in a budget of memory, with plain vLLM, vLLM's offload, and Manthan.

An arm is one of these systems, run as `vllm serve`. Or one running server is measured. Sessions come to the server one
by one, then each returns, newest first, with the same full blocks. A session is kept if at most 5% of these blocks are
computed again. Rounds have more and more sessions, until clearly more come than are kept. The budget is all the memory
for KV. Plain vLLM's KV pool has all of the budget. The other arms' pool has a tenth, or room for 1.3 sessions if that
is more; compressed blocks or offload have the rest.

    manthan bench capacity [--arms plain,host] [--budgets 64MiB,128MiB] [--codecs wht-5x,k3v3] [--out FOLDER]
    manthan bench capacity --base-url http://HOST:PORT --tokens 4000
    manthan bench capacity --plot-only FOLDER/capacity.json OTHER/capacity.json

See docs/benchmarks.md.
"""

import shlex
from argparse import Namespace
from pathlib import Path
from typing import Annotated

import typer

from manthan.codec import DEFAULT


def capacity(
    context: typer.Context,
    arms: Annotated[
        str,
        typer.Option(
            help="Some of plain, offload, host, whole (host that shortens no block), device, redis, tiered; default: "
            "plain, host; on a GPU offload and device too.",
        ),
    ] = "",
    budgets: Annotated[str, typer.Option(help="Sizes of all memory for KV, such as 64MiB,128MiB.")] = "",
    codecs: Annotated[str, typer.Option(help="Of Manthan's arms, with commas; auto: a server's default.")] = DEFAULT,
    profile: Annotated[
        Path | None, typer.Option(help="Model's profile, for codecs that need one, or `made-up`; turns the guard off.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Length of a session's prompt; 0: 2000, on a GPU 8192.")] = 0,
    model: Annotated[
        Path | None, typer.Option(help="A model's folder; without weights in it they are made up.")
    ] = None,
    block_size: Annotated[int, typer.Option(help="Tokens of a block; 0: 32, on a GPU 16.")] = 0,
    base_url: Annotated[str, typer.Option(help="A vLLM server that runs already; measured alone.")] = "",
    most: Annotated[int, typer.Option(min=1, help="Most sessions of a round.")] = 2000,
    growth: Annotated[float, typer.Option(min=1.1, help="Factor from one round's sessions to the next's.")] = 2.5,
    flags: Annotated[str, typer.Option(help="Further flags of `vllm serve`, in one string.")] = "",
    redis_url: Annotated[str, typer.Option(help="A running server for the arms in Redis; else one is started.")] = "",
    seed: Annotated[int, typer.Option(help="Seed of the sessions' prompts.")] = 0,
    start_timeout: Annotated[float, typer.Option(help="Seconds that a server may take to start.")] = 300,
    timeout: Annotated[float, typer.Option(help="Seconds after which an arm begins no further round.")] = 300,
    out: Annotated[Path, typer.Option(help="Folder for JSON, plot, logs.")] = Path("build", "benchmarks"),
    plot_only: Annotated[bool, typer.Option("--plot-only", help="Show and plot FILES of earlier runs again.")] = False,
    files: Annotated[list[Path] | None, typer.Argument(help="JSON of earlier runs; several are merged.")] = None,
) -> None:
    """Count the sessions whose KV is kept until they return, in the same memory."""
    options = Namespace(**locals() | {"flags": shlex.split(flags)})
    from manthan.benchmarks.capacity_run import run

    if plot_only != bool(files):
        raise typer.BadParameter("--plot-only needs one or more JSON files, and files need --plot-only")
    if tokens and tokens < 512:
        raise typer.BadParameter(f"--tokens must be 512 or more, not {tokens}")
    run(options, files or [], context.params)


if __name__ == "__main__":
    typer.run(capacity)
