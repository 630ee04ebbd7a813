"""`manthan simulate`: what policies and capacities would find of a request trace."""

import os
import re
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from manthan.manager.commands.completion import complete_policies
from manthan.manager.commands.console import make_console
from manthan.manager.config.model import PolicyConfig
from manthan.manager.config.registered import ChosenPolicy, choose_policy
from manthan.manager.config.resolve import ConfigError, ManthanConfig, resolve_config
from manthan.manager.config.sentences import nearest
from manthan.manager.integrity import IntegrityError
from manthan.manager.simulator.cost_model import CostModel
from manthan.manager.simulator.engine import total_blocks
from manthan.manager.simulator.replay import PROGRESS_EVERY, Setup
from manthan.manager.simulator.report import check_matplotlib, results_table, save_plot, write_json
from manthan.manager.simulator.runs import Result, Run, run_all
from manthan.manager.simulator.traces import Trace, TraceError, read_trace
from manthan.policies import BadPolicyError, UnknownPolicyError, get_policy

_UNITS = {"": 1, "k": 1_000, "M": 1_000_000, "G": 1_000_000_000}

_Path = Path | None


def simulate(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="JSON lines as Mooncake's, or CSV.")],
    policy: Annotated[
        str,
        typer.Option(
            help="Names, with options as NAME:OPTION=VALUE, separated by commas.", autocompletion=complete_policies
        ),
    ] = "lru",
    hot: Annotated[str, typer.Option(help="The KV pool: tokens (64000, 4M) or a share (5%); 0 for none.")] = "0",
    cold: Annotated[str, typer.Option(help="The cold store: tokens that its codes stand for, or a share.")] = "10%",
    idle_after: Annotated[float | None, typer.Option(help="As idle_after_s.")] = None,
    min_tokens: Annotated[int | None, typer.Option(help="As min_tokens.")] = None,
    low_watermark: Annotated[float | None, typer.Option(help="As hot_pool.low_watermark.")] = None,
    high_watermark: Annotated[float | None, typer.Option(help="As hot_pool.high_watermark.")] = None,
    cost: Annotated[_Path, typer.Option(help="A YAML file with some values of the cost model.")] = None,
    prefill_slots: Annotated[int, typer.Option(min=0, help="Prompts computed at a time; 0 for any number.")] = 0,
    measure_from: Annotated[float, typer.Option(min=0, max=0.99, help="Count only what follows this share.")] = 0,
    block_tokens: Annotated[int | None, typer.Option(min=1, help="Of a block, if not 512 (JSON) or 16 (CSV).")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes side by side.")] = os.cpu_count() or 1,
    json_file: Annotated[_Path, typer.Option("--json", help="Write all figures into this file.")] = None,
    plot_file: Annotated[_Path, typer.Option("--plot", help="Draw found shares into this PNG.")] = None,
    check: Annotated[bool, typer.Option("--check", help="See now and then if the manager's books agree.")] = False,
) -> None:
    """Replay a request trace for each policy and each pair of capacities."""
    flags = {
        "idle_after_s": idle_after,
        "min_tokens": min_tokens,
        "hot_pool.low_watermark": low_watermark,
        "hot_pool.high_watermark": high_watermark,
    }
    try:
        if plot_file is not None:
            check_matplotlib()
        config = resolve_config(env={}, flags=flags).config
        costs = CostModel.read(cost) if cost else CostModel()
        policies = [(label, *_policy(label)) for label in policy.split(",")]
        read = read_trace(trace, block_tokens)
        pairs = list(product(_capacities("--hot", hot, read), _capacities("--cold", cold, read)))
        _check_pools(hot, [hot_blocks for hot_blocks, _ in pairs], read)
    except (ConfigError, TraceError, UnknownPolicyError, BadPolicyError) as error:
        typer.echo(_in_options(error), err=True)
        raise typer.Exit(1) from None
    first = int(measure_from * len(read.requests))
    common = _common(config, costs, prefill_slots, first, read.block_tokens)
    runs = [
        Run(label, Setup(kind, options, hot_blocks, cold_blocks, **common))
        for (label, kind, options), (hot_blocks, cold_blocks) in product(policies, pairs)
    ]
    try:
        results = _run(trace, read, runs, jobs, check)
    except IntegrityError as error:
        typer.echo(f"--check: the books do not agree, which is a bug of Manthan: {error}", err=True)
        raise typer.Exit(1) from None
    make_console().print(results_table(results))
    if check:
        typer.echo(f"--check: the books of {len(runs)} replays agreed, each {PROGRESS_EVERY} requests and in the end.")
    if json_file is not None:
        write_json(json_file, read, results)
    if plot_file is not None:
        save_plot(plot_file, read, results)


def _common(config: ManthanConfig, cost: CostModel, slots: int, first: int, block_tokens: int) -> dict[str, Any]:
    return {
        "block_tokens": block_tokens,
        "cost": cost,
        "idle_after_s": config.idle_after_s,
        "min_tokens": config.min_tokens,
        "low_watermark": config.hot_pool.low_watermark,
        "high_watermark": config.hot_pool.high_watermark,
        "prefill_slots": slots,
        "first_measured": first,
    }


def _run(path: Path, trace: Trace, runs: list[Run], jobs: int, check: bool) -> list[Result]:
    total = len(runs) * len(trace.requests)
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        return run_all(path, trace, runs, jobs, lambda count: bar.update(task, completed=count), check)


# -- what was asked for -----------------------------------------------------------------------------------


def _policy(label: str) -> ChosenPolicy:
    """`NAME` or `NAME:OPTION=VALUE:…`, values as in YAML."""
    name, *given = label.split(":")
    fields = get_policy(name).Options.model_fields
    values = {}
    for option in given:
        key, equals, value = option.partition("=")
        if not equals or key not in fields:
            raise ConfigError(f"--policy {label}: unknown {name} option '{key}'{nearest(key, fields)}")
        values[key] = yaml.safe_load(value)
    sources = {f"policy.{key}": f"--policy {label}" for key in ("name", *values)}
    return choose_policy(PolicyConfig(name=name, **values), sources)


def _capacities(option: str, text: str, trace: Trace) -> list[int]:
    """Blocks, from a list of tokens and shares of the distinct blocks of a trace."""
    return [_capacity(option, one.strip(), trace) for one in text.split(",")]


def _capacity(option: str, text: str, trace: Trace) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kMG%]?)", text)
    if not match:
        raise ConfigError(f"{option} must be tokens, such as 64000 or 4M, or a share, such as 5%, not {text!r}")
    number, unit = float(match[1]), match[2]
    blocks = int(number / 100 * trace.distinct_blocks if unit == "%" else number * _UNITS[unit] / trace.block_tokens)
    if blocks == 0 and (number or option == "--cold"):
        raise ConfigError(f"{option} {text} is less than a block of {trace.block_tokens} tokens: give it more")
    return blocks


def _check_pools(text: str, hot: list[int], trace: Trace) -> None:
    largest = max(total_blocks(request, trace.block_tokens) for request in trace.requests)
    if any(0 < blocks < largest for blocks in hot):
        raise ConfigError(
            f"--hot {text} is too small for the largest request of {trace.name}, which takes {largest} blocks: give it "
            f"{largest * trace.block_tokens} tokens or more, or 0 for no pool"
        )


def _in_options(error: Exception) -> str:
    """A sentence about the configuration's keys, in terms of the command line."""
    options = {"idle_after_s": "--idle-after", "min_tokens": "--min-tokens"}
    sentence = re.sub(r"\b(idle_after_s|min_tokens)\b", lambda key: options[key[1]], str(error))
    sentence = re.sub(r"\bhot_pool\.(low|high)_watermark\b", r"--\1-watermark", sentence)
    return sentence.removeprefix("argument: ")
