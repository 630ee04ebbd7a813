"""Compare users' waits for the first token in vLLM, offloads and Manthan, with more chats than the KV pool holds.

An arm is one of these systems, run as `vllm serve`. Or one running server is measured. All arms but `wide` have equal
KV pools. All stores of KV outside the pool are equally large. All arms get the same chats, many at a time: a user
thinks after an answer, and continues. Or a trace's requests are sent at its times. The client measures the waits.

    manthan bench load [--arms plain,offload,host] [--codecs wht-5x,k3v3] [--chats 64] [--tokens 8192] [--out FOLDER]
    manthan bench load --trace FILE --shrink 16 --speed 4
    manthan bench load --fairness --chats 20 --think 6 --repeats 2
    manthan bench load --base-url http://HOST:PORT --tokens 4000
    manthan bench load --plot-only FOLDER/load.json OTHER/load.json

See docs/benchmarks.md.
"""

import shlex
from argparse import Namespace
from enum import StrEnum
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from pydantic import ByteSize, TypeAdapter, ValidationError

from manthan.benchmarks.shapes import DEFAULT as DEFAULT_SHAPE
from manthan.benchmarks.shapes import PUBLIC
from manthan.codec import DEFAULT
from manthan.manager.config import resolve
from manthan.manager.config.resolve import ConfigError, resolve_config

ModelOption = Annotated[
    Path | None,
    typer.Option(
        help="A model's folder, where missing weights are made up, or the name of a shape: "
        f"{', '.join(PUBLIC)}; default: the tests' model, on a GPU {DEFAULT_SHAPE}."
    ),
]
ModelProfile = Annotated[Path | None, typer.Option(help="Statistics of KV (profile) for klt codecs, or `made-up`.")]
BlockTokens = Annotated[int, typer.Option(min=0, help="Tokens of a block; 0: 32, on a GPU 16.")]


class Thinking(StrEnum):
    """Distribution of a user's thinking time: constant, or exponential."""

    fixed = "fixed"
    exponential = "exponential"


def load(
    context: typer.Context,
    arms: Annotated[
        str,
        typer.Option(
            help="Some of plain, plain-ordered, wide, offload, lmcache, host-arrival, host, whole (host that shortens "
            "no block), device, disk, redis, tiered; default: plain, wide, host; on a GPU plain, offload, host.",
        ),
    ] = "",
    codecs: Annotated[str, typer.Option(help="Of Manthan's arms, with commas; auto: a server's default.")] = DEFAULT,
    chats: Annotated[int, typer.Option(min=0, help="Number of chats; 0: 20, on a GPU 64.")] = 0,
    tokens: Annotated[int, typer.Option(min=0, help="Length of a chat's first prompt; 0: 512, on a GPU 8192.")] = 0,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each chat.")] = 3,
    said: Annotated[int, typer.Option(min=1, help="Tokens that a later turn adds.")] = 128,
    answer: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 64,
    think: Annotated[float, typer.Option(min=0, help="Mean seconds between an answer and the next turn.")] = 15,
    thinking: Annotated[Thinking, typer.Option(help="Distribution of the thinking times.")] = Thinking.fixed,
    arrive: Annotated[
        float | None, typer.Option(min=0, help="Seconds within which all chats begin; default: twice --think.")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Trace to replay instead of chats, as for `simulate`.")] = None,
    speed: Annotated[float, typer.Option(min=0.001, help="Divisor of the trace's times.")] = 1,
    shrink: Annotated[float, typer.Option(min=1, help="Divisor of the trace's tokens.")] = 1,
    requests: Annotated[int, typer.Option(min=0, help="Number of the trace's first requests; 0: all.")] = 0,
    pool: Annotated[int, typer.Option(min=0, help="Tokens of the KV pool; 0: 8 first prompts, on a GPU 10.")] = 0,
    memory: Annotated[
        str, typer.Option(help="Bytes outside the pool, such as 20GiB; default: as the pool, on a GPU 20GiB.")
    ] = "",
    idle_after: Annotated[float, typer.Option(min=0.1, help="Idle seconds after which Manthan compresses a chat.")] = 1,
    manthan: Annotated[
        str, typer.Option(help="Further configuration of Manthan, as YAML: '{tiers: {pinned_share: 0.5}}'.")
    ] = "",
    model: ModelOption = None,
    profile: ModelProfile = None,
    block_size: BlockTokens = 0,
    fairness: Annotated[
        bool,
        typer.Option("--fairness", help="Compare arms, by default plain, host-arrival and host, in three loads."),
    ] = False,
    repeats: Annotated[int, typer.Option(min=1, help="With --fairness: runs of all arms, each with new prompts.")] = 1,
    base_url: Annotated[str, typer.Option(help="A vLLM server that runs already; measured alone.")] = "",
    flags: Annotated[str, typer.Option(help="Further flags of `vllm serve`, in one string.")] = "",
    redis_url: Annotated[str, typer.Option(help="A running server for the arms in Redis; else one is started.")] = "",
    seed: Annotated[int, typer.Option(help="Seed of the chats.")] = 0,
    start_timeout: Annotated[float, typer.Option(help="Seconds that a server may take to start.")] = 300,
    timeout: Annotated[float, typer.Option(help="Seconds of a load, after which no request is sent.")] = 900,
    cold: Annotated[
        bool,
        typer.Option("--cold", help="Start each server with empty caches of compiled kernels, and do not warm it up."),
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for JSON, plot, logs.")] = Path("build", "benchmarks"),
    plot_only: Annotated[bool, typer.Option("--plot-only", help="Show and plot FILES of earlier runs again.")] = False,
    files: Annotated[list[Path] | None, typer.Argument(help="JSON of earlier runs; several are merged.")] = None,
) -> None:
    """Measure users' waits for the first token, with more chats than the KV pool holds."""
    options = Namespace(**locals())
    from manthan.benchmarks import load_fairness
    from manthan.benchmarks.load_chats import Replay
    from manthan.benchmarks.load_run import run

    if plot_only != bool(files):
        raise typer.BadParameter("--plot-only needs one or more JSON files, and files need --plot-only")
    if repeats > 1 and not fairness:
        raise typer.BadParameter("--repeats needs --fairness")
    if fairness:
        options.arms = arms or load_fairness.ARMS
        if base_url or trace or "plain" not in options.arms.split(","):
            raise typer.BadParameter("--fairness has chats and servers of its own, plain among them")
    options.replay = None if trace is None else Replay(trace, speed, shrink, requests)
    options.memory, options.manthan, options.flags = read_size(memory), read_manthan(manthan), shlex.split(flags)
    run(options, files or [], context.params)


def read_size(text: str, flag: str = "--memory") -> int:
    """Return the bytes of a size such as `20GiB`; 0 for an empty text. Raises BadParameter that names `flag`."""
    if not text:
        return 0
    try:
        found = int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        found = 0
    if found <= 0:
        raise typer.BadParameter(f"{flag} must be a size such as 20GiB, not {text!r}")
    return found


def read_manthan(text: str) -> dict[str, Any]:
    """Return values of Manthan's configuration by dotted key, as given in a YAML text. Raises BadParameter."""
    try:
        config, sources = resolve_config(env={}, flags=(yaml.safe_load(text) if text else {}))
    except (yaml.YAMLError, AttributeError, ConfigError):
        raise typer.BadParameter(
            f"--manthan must be keys as in docs/configuration.md and their values, not {text!r}"
        ) from None
    values = config.model_dump(mode="json")
    return {key: reduce(getitem, key.split("."), values) for key in sources if sources[key] != resolve.DEFAULT}


if __name__ == "__main__":
    typer.run(load)
