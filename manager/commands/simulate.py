"""`manthan simulate`: what policies and capacities would find of a request trace."""

import gc
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
import yaml
from rich.console import Console
from rich.progress import track
from rich.table import Table

from manthan.manager.commands.console import make_console
from manthan.manager.config.model import PolicyConfig
from manthan.manager.config.registered import ChosenPolicy, choose_policy
from manthan.manager.config.resolve import ConfigError, resolve_config
from manthan.manager.config.sentences import nearest
from manthan.manager.simulator.engine import replay, total_blocks
from manthan.manager.simulator.replay import Setup
from manthan.manager.simulator.traces import MOONCAKE_BLOCK_TOKENS, Trace, TracedRequest, TraceError, read_trace
from manthan.policies import BadPolicyError, UnknownPolicyError, get_policy

_UNITS = {"": 1, "k": 1_000, "M": 1_000_000, "G": 1_000_000_000}


@dataclass(frozen=True)
class Result:
    """Figures of a replay. Shares are of the asked blocks, partial ones included; times in seconds.

    evictions: sessions gone cold.
    """

    policy: str
    hot_tokens: int
    cold_tokens: int
    hot_share: float
    restored_share: float
    first_token_mean_s: float
    first_token_p99_s: float
    evictions: int
    encoded_blocks: int
    restored_blocks: int
    dropped_blocks: int


def simulate(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="JSON lines as Mooncake's.")],
    policy: Annotated[
        str,
        typer.Option(help="Names, with options as NAME:OPTION=VALUE, separated by commas."),
    ] = "lru,returns",
    hot: Annotated[str, typer.Option(help="The KV pool: tokens (64000, 4M) or a share (5%).")] = "5%",
    cold: Annotated[str, typer.Option(help="The cold store: tokens that its blocks stand for, or a share.")] = "10%",
    idle_after: Annotated[float | None, typer.Option(help="As idle.after_s.")] = None,
    measure_from: Annotated[float, typer.Option(min=0, max=0.99, help="Count only what follows this share.")] = 0,
    block_tokens: Annotated[int, typer.Option(min=1, help="Of a block.")] = MOONCAKE_BLOCK_TOKENS,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures into this file.")] = None,
) -> None:
    """Replay a request trace for each policy and each pair of capacities."""
    try:
        config = resolve_config(env={}, flags={"idle.after_s": idle_after}).config
        policies = [(label, *_policy(label)) for label in policy.split(",")]
        read = read_trace(trace, block_tokens)
        pairs = list(product(_capacities("--hot", hot, read), _capacities("--cold", cold, read)))
        _check_pools(hot, [hot_blocks for hot_blocks, _ in pairs], read)
    except (ConfigError, TraceError, UnknownPolicyError, BadPolicyError) as error:
        typer.echo(str(error).replace("argument: idle.after_s", "--idle-after"), err=True)
        raise typer.Exit(1) from None
    same: dict[str, Any] = {
        "idle_after_s": config.idle.after_s,
        "first_measured": int(measure_from * len(read.requests)),
    }
    runs = [
        (label, Setup(kind, hot_blocks, options, cold_blocks, block_tokens, **same))
        for (label, kind, options), (hot_blocks, cold_blocks) in product(policies, pairs)
    ]
    gc.freeze()  # a replay makes many objects that live long and are in no cycles
    gc.set_threshold(50_000, 20, 20)
    bar = track(runs, "replays", len(runs), console=Console(stderr=True), transient=True)
    results = [_run(label, setup, read.requests) for label, setup in bar]
    make_console().print(_table(results))
    if json_file is not None:
        about = {"name": read.name, "requests": len(read.requests), "distinct_blocks": read.distinct_blocks}
        rows = [asdict(result) for result in results]
        json_file.write_text(json.dumps({"trace": about, "results": rows}, indent=1) + "\n", encoding="utf-8")


def _run(label: str, setup: Setup, requests: Sequence[TracedRequest]) -> Result:
    tally = replay(requests, setup)
    served = [one for one in tally.served[setup.first_measured :] if one is not None]
    asked = sum(one.asked for one in served)
    seconds = np.array([one.first_token_s for one in served])
    return Result(
        label,
        setup.pool_blocks * setup.block_tokens,
        setup.cold_blocks * setup.block_tokens,
        sum(one.resident for one in served) / asked,
        sum(one.restored for one in served) / asked,
        float(seconds.mean()),
        float(np.percentile(seconds, 99)),
        tally.evictions,
        tally.stored,
        tally.restored,
        tally.dropped,
    )


def _table(results: Sequence[Result]) -> Table:
    """Return a row for each replay. Shares are of the asked blocks, in percent."""
    table = Table("policy", box=None)
    for name in (
        *("hot tokens", "cold tokens", "hot", "restored", "found", "first token", "p99"),
        *("evictions", "encoded", "restored blocks", "dropped"),
    ):
        table.add_column(name, justify="right")
    for row in results:
        shares = (row.hot_share, row.restored_share, row.hot_share + row.restored_share)
        table.add_row(
            row.policy,
            *(f"{tokens:,}" for tokens in (row.hot_tokens, row.cold_tokens)),
            *(f"{100 * share:.1f}%" for share in shares),
            *(f"{1000 * value:,.0f} ms" for value in (row.first_token_mean_s, row.first_token_p99_s)),
            *(f"{n:,}" for n in (row.evictions, row.encoded_blocks, row.restored_blocks, row.dropped_blocks)),
        )
    return table


# -- arguments --------------------------------------------------------------------------------------------


def _policy(label: str) -> ChosenPolicy:
    """Return the policy of `NAME` or `NAME:OPTION=VALUE:…`. Values are YAML."""
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


def _capacities(option: str, texts: str, trace: Trace) -> list[int]:
    """Return blocks, from a list of tokens and shares of the distinct blocks of a trace."""
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
    largest = max(total_blocks(request, trace.block_tokens) for request in trace.requests)
    if min(hot) < largest:
        raise ConfigError(
            f"--hot {text} is too small for the largest request of {trace.name}, which takes {largest} blocks: give it "
            f"{largest * trace.block_tokens} tokens or more"
        )
