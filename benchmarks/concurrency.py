"""Tokens a second with 1 to 25 users at a time, with Manthan and without.

Each user sends some requests one after the other, each a conversation of its own, so that with Manthan earlier ones go
cold while later ones are answered; what it encodes meanwhile counts. One server after the other is started and runs all
levels, never two at a time; each repeat starts both again, in the reversed order, for machines whose pace changes.

    manthan bench concurrency [--users 1,2,4,8] [--tokens 128] [--repeats 3] [--out FOLDER]
    manthan bench concurrency --base-url http://HOST:PORT
    manthan bench concurrency --plot-only FOLDER/concurrency.json

See docs/capacity.md.
"""

import shlex
from pathlib import Path
from typing import Annotated

import typer

USERS = "1,2,4,6,8,10,15,20,25"


def concurrency(
    context: typer.Context,
    users: Annotated[str, typer.Option(help="At a time, with commas between.")] = USERS,
    tokens: Annotated[int, typer.Option(min=2, help="Generated for each request.")] = 128,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 512,
    requests: Annotated[int, typer.Option(min=1, help="Of each user, one after the other.")] = 2,
    repeats: Annotated[int, typer.Option(min=1, help="Starts of both servers, with all levels each.")] = 3,
    idle_after: Annotated[float, typer.Option(min=0.1, help="Seconds after which Manthan compresses a session.")] = 1,
    model: Annotated[
        Path | None, typer.Option(help="A model's folder; without weights in it they are made up.")
    ] = None,
    block_size: Annotated[int, typer.Option(help="Tokens of a block; 0: 32, on a GPU 16.")] = 0,
    base_url: Annotated[str, typer.Option(help="A vLLM server that runs already; measured alone.")] = "",
    flags: Annotated[str, typer.Option(help="Further flags of `vllm serve`, in one string.")] = "",
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 0,
    start_timeout: Annotated[float, typer.Option(help="Seconds that a server may take to start.")] = 300,
    out: Annotated[Path, typer.Option(help="Folder for JSON, plot, logs.")] = Path("build", "benchmarks"),
    plot_only: Annotated[Path | None, typer.Option(help="Show and plot this JSON of an earlier run again.")] = None,
) -> None:
    """Tokens a second with several users at a time, with Manthan and without."""
    from manthan.benchmarks.concurrency_run import ConcurrencyOptions, run

    options = ConcurrencyOptions(
        read_users(users), tokens, prompt, requests, repeats, idle_after, model, block_size, base_url,
        shlex.split(flags), seed, start_timeout, out,
    )  # fmt: skip
    run(options, plot_only, context.params)


def read_users(text: str) -> list[int]:
    """`1,2,4`; raises BadParameter."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 0 < int(part) <= 1000 for part in parts):
        raise typer.BadParameter(f"--users must be whole numbers from 1 to 1000 with commas between, not {text!r}")
    return sorted({*map(int, parts)})


if __name__ == "__main__":
    typer.run(concurrency)
