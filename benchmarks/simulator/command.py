"""`manthan simulate`: replay a trace for each policy, KV pool size and cold store size (store of compressed blocks)."""

import gc
import json
import re
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import numpy as np
import typer
import yaml
from rich.console import Console
from rich.progress import track
from rich.table import Table

from manthan.benchmarks.simulator.engine import Setup, replay
from manthan.benchmarks.simulator.one_cache import clairvoyant, one_cache
from manthan.benchmarks.simulator.traces import MOONCAKE_BLOCK_TOKENS, Trace, TracedRequest, TraceError, read_trace
from manthan.manager.commands import make_console
from manthan.manager.config.model import PolicyConfig
from manthan.manager.config.resolve import ChosenPolicy, ConfigError, choose_policy, resolve_config
from manthan.policies import BadPolicyError, EvictionPolicy, PolicyOptions, UnknownPolicyError

_UNITS = {"": 1, "k": 1_000, "M": 1_000_000, "G": 1_000_000_000}


Row: TypeAlias = dict[str, Any]
"""Figures of a replay, as in JSON. Names ending in _share are shares of the measured prompts' blocks.

evictions: how often a session went cold (was stored whole). found_share: share found with the policy. best_share: share
found by a cache of the same size that knows the future. gap_closed: (found_share - lru's) / (best_share - lru's); None
if `lru` was not replayed or is best. divergence_mean: mean KL, nats, of restored blocks; None without `--level`.
"""

_POOL_COLUMNS: dict[str, Callable[[Row], str]] = {
    "hot tokens": lambda row: f"{row['hot_tokens']:,}",
    "cold tokens": lambda row: f"{row['cold_tokens']:,}",
    "hot": lambda row: _percent(row["hot_share"]),
    "restored": lambda row: _percent(row["restored_share"]),
    "found": lambda row: _percent(row["hot_share"] + row["restored_share"]),
    "first token": lambda row: f"{1000 * row['first_token_mean_s']:,.0f} ms",
    "p99": lambda row: f"{1000 * row['first_token_p99_s']:,.0f} ms",
    "evictions": lambda row: f"{row['evictions']:,}",
    "encoded": lambda row: f"{row['encoded_blocks']:,}",
    "restored blocks": lambda row: f"{row['restored_blocks']:,}",
    "dropped": lambda row: f"{row['dropped_blocks']:,}",
}
_LEVEL_COLUMNS: dict[str, Callable[[Row], str]] = {"divergence": lambda row: f"{row['divergence_mean']:.5f}"}
_CACHE_COLUMNS: dict[str, Callable[[Row], str]] = {
    "tokens": lambda row: f"{row['tokens']:,}",
    "found": lambda row: _percent(row["found_share"]),
    "best possible": lambda row: _percent(row["best_share"]),
    "gap closed": lambda row: "" if row["gap_closed"] is None else _percent(row["gap_closed"]),
}


app = typer.Typer(add_completion=False)


@app.command()
def simulate(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="JSON lines in Mooncake's format.")],
    policy: Annotated[
        str,
        typer.Option(help="Names, with options as NAME:OPTION=VALUE, separated by commas."),
    ] = "lru,returns",
    hot: Annotated[str, typer.Option(help="KV pool: tokens (4M) or a share of the trace (5%); 0: no pool.")] = "5%",
    cold: Annotated[str, typer.Option(help="Cold store: tokens of its blocks, or a share of the trace.")] = "10%",
    level: Annotated[
        int | None, typer.Option(min=0, max=4, help="Level of a calibrated codec's new blocks; 0 is the coarsest.")
    ] = None,
    shrink: Annotated[bool, typer.Option(help="Cut stored blocks to coarser levels for room.")] = True,
    idle_after: Annotated[float | None, typer.Option(help="Seconds, as idle.after_s.")] = None,
    measure_from: Annotated[float, typer.Option(min=0, max=0.99, help="Count only requests after this share.")] = 0,
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a block.")] = MOONCAKE_BLOCK_TOKENS,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures into this file.")] = None,
) -> None:
    """Replay a request trace for each policy and each pair of pool and cold store sizes."""
    try:
        config = resolve_config(env={}, flags={"idle.after_s": idle_after}).config
        policies = [(label, *_policy(label)) for label in policy.split(",")]
        read = read_trace(trace, block_tokens)
        is_one = hot.strip() == "0"
        sizes = _capacities("--cold", cold, read)
        pools = [] if is_one else _capacities("--hot", hot, read)
        _check_pools(hot, pools, read)
    except (ConfigError, TraceError, UnknownPolicyError, BadPolicyError) as error:
        typer.echo(str(error).replace("argument: idle.after_s", "--idle-after"), err=True)
        raise typer.Exit(1) from None
    same: dict[str, Any] = {
        "idle_after_s": config.idle.after_s,
        "level": level,
        "shrinks": shrink,
        "first_measured": int(measure_from * len(read.requests)),
    }
    gc.freeze()  # a replay makes many long-lived objects without cycles
    gc.set_threshold(50_000, 20, 20)
    progress = Console(stderr=True)
    if is_one:
        each = track(sizes, "sizes", len(sizes), console=progress, transient=True)
        rows = [row for size in each for row in one_cache_rows(policies, size, read, same["first_measured"])]
    else:
        runs = [
            (label, Setup(kind, hot_blocks, options, cold_blocks, block_tokens, **same))
            for (label, kind, options), hot_blocks, cold_blocks in product(policies, pools, sizes)
        ]
        bar = track(runs, "replays", len(runs), console=progress, transient=True)
        rows = [_run(label, setup, read.requests) for label, setup in bar]
    columns = _CACHE_COLUMNS if is_one else _POOL_COLUMNS if level is None else _POOL_COLUMNS | _LEVEL_COLUMNS
    table = Table("policy", box=None)
    for name in columns:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(row["policy"], *(show(row) for show in columns.values()))
    make_console().print(table)
    if json_file is not None:
        about = {"name": read.name, "requests": len(read.requests), "distinct_blocks": read.distinct_blocks}
        json_file.write_text(json.dumps({"trace": about, "results": rows}, indent=1) + "\n", encoding="utf-8")


def one_cache_rows(
    policies: Sequence[tuple[str, type[EvictionPolicy], PolicyOptions]], blocks: int, trace: Trace, first: int = 0
) -> list[Row]:
    """Return a row for each policy with a single cache of `blocks` blocks, over the requests from `first` on."""
    requests, block_tokens = trace.requests, trace.block_tokens
    asked = sum(request.asked_blocks(block_tokens) for request in requests[first:])
    best = sum(clairvoyant(requests, blocks, block_tokens)[first:]) / asked
    found = {
        label: sum(one_cache(requests, kind, options, blocks, block_tokens)[first:]) / asked
        for label, kind, options in policies
    }
    lru = found.get("lru", best)
    return [
        {
            "policy": label,
            "tokens": blocks * block_tokens,
            "found_share": share,
            "best_share": best,
            "gap_closed": (share - lru) / (best - lru) if best > lru else None,
        }
        for label, share in found.items()
    ]


def _run(label: str, setup: Setup, requests: Sequence[TracedRequest]) -> Row:
    tally = replay(requests, setup)
    served = [one for one in tally.served[setup.first_measured :] if one is not None]
    asked = sum(one.asked for one in served)
    seconds = np.array([one.first_token_s for one in served])
    return {
        "policy": label,
        "hot_tokens": setup.pool_blocks * setup.block_tokens,
        "cold_tokens": setup.cold_blocks * setup.block_tokens,
        "hot_share": sum(one.resident for one in served) / asked,
        "restored_share": sum(one.restored for one in served) / asked,
        "first_token_mean_s": float(seconds.mean()),
        "first_token_p99_s": float(np.percentile(seconds, 99)),
        "evictions": tally.evictions,
        "encoded_blocks": tally.stored,
        "restored_blocks": tally.restored,
        "dropped_blocks": tally.dropped,
        "divergence_mean": None if setup.level is None else tally.divergence / max(1, tally.restored),
    }


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"


# -- arguments --------------------------------------------------------------------------------------------


def _policy(label: str) -> ChosenPolicy:
    """Return the policy that `NAME` or `NAME:OPTION=VALUE:…` chooses. Values are YAML."""
    name, *given = label.split(":")
    values = {key: yaml.safe_load(value) for key, _, value in (option.partition("=") for option in given)}
    sources = {f"policy.{key}": f"--policy {label}" for key in ("name", *values)}
    return choose_policy(PolicyConfig(name=name, **values), sources)


def _capacities(option: str, texts: str, trace: Trace) -> list[int]:
    """Return capacities in blocks. Each in `texts` is a number of tokens, or a share of a trace's distinct blocks."""
    found = []
    for text in map(str.strip, texts.split(",")):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([kMG%]?)", text)
        if not match:
            raise ConfigError(f"{option} must be tokens, such as 64000 or 4M, or a share, such as 5%, not {text!r}")
        number, unit = float(match[1]), match[2]
        blocks = number / 100 * trace.distinct_blocks if unit == "%" else number * _UNITS[unit] / trace.block_tokens
        found.append(int(blocks))
        if not found[-1]:
            raise ConfigError(f"{option} {text} is less than a block of {trace.block_tokens} tokens: give it more")
    return found


def _check_pools(text: str, hot: list[int], trace: Trace) -> None:
    largest = max(request.total_blocks(trace.block_tokens) for request in trace.requests)
    if hot and min(hot) < largest:
        raise ConfigError(
            f"--hot {text} is too small for the largest request of {trace.name}, which takes {largest} blocks: give it "
            f"{largest * trace.block_tokens} tokens or more"
        )
