"""What `manthan simulate` shows: a table, JSON, a plot."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

from pydantic import ByteSize
from rich.table import Table

from manthan.manager.config.model import ConfigError
from manthan.manager.simulator.runs import Result
from manthan.manager.simulator.traces import Trace


def results_table(results: Sequence[Result]) -> Table:
    """A row a replay; shares of the asked blocks, in percent."""
    table = Table(
        *("policy", "hot tokens", "cold tokens", "hot", "restored", "recomputed", "found", "best possible"),
        *("first token", "p99", "evictions", "moved out", "moved in", "dropped blocks"),
        box=None,
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for row in results:
        shares = (row.hot_share, row.restored_share, row.recomputed_share, row.found_share, row.best_share)
        seconds = (row.first_token_mean_s, row.first_token_p99_s)
        table.add_row(
            row.policy,
            f"{row.hot_tokens:,}",
            f"{row.cold_tokens:,}",
            *(f"{100 * share:.1f}%" for share in shares),
            *(f"{1000 * value:,.0f} ms" for value in seconds),
            f"{row.evictions:,}",
            ByteSize(row.bytes_out).human_readable(),
            ByteSize(row.bytes_in).human_readable(),
            f"{row.dropped_blocks:,}",
        )
    return table


def write_json(path: Path, trace: Trace, results: Sequence[Result]) -> None:
    """All figures, and what they are of."""
    about = {"name": trace.name, "requests": len(trace.requests), "distinct_blocks": trace.distinct_blocks}
    about |= {"block_tokens": trace.block_tokens}
    rows = [asdict(result) | {"found_share": result.found_share} for result in results]
    _write(path, json.dumps({"trace": about, "results": rows}, indent=1) + "\n")


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def check_matplotlib() -> None:
    """Raise ConfigError if there is nothing to draw with."""
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed: pip install 'manthan-kv[bench]'")


def save_plot(path: Path, trace: Trace, results: Sequence[Result]) -> None:
    """Capacity of both places together against the found share: a line a policy and hot capacity, and the optimum."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    best = sorted({(_capacity(row), row.best_share) for row in results})
    axes.plot(*_columns(best), "k--", marker="o", label="best possible (Belady)")
    several = len({row.hot_tokens for row in results}) > 1
    for (policy, hot), rows in groupby(sorted(results, key=_line), key=_line):
        points = [(_capacity(row), row.found_share) for row in rows]
        axes.plot(*_columns(sorted(points)), marker="o", label=f"{policy}, {hot:,} hot" if several else policy)
    axes.set_xlabel("tokens in the KV pool and the cold store")
    axes.set_ylabel("share of the prompts' blocks that is found")
    axes.set_title(f"{trace.name}: {len(trace.requests):,} requests")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1e6:g} M")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def _line(row: Result) -> tuple[str, int]:
    return row.policy, row.hot_tokens


def _capacity(row: Result) -> int:
    return row.hot_tokens + row.cold_tokens


def _columns(points: Sequence[tuple[int, float]]) -> Any:
    return list(zip(*points, strict=True))
