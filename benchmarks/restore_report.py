"""Results of restore.py, as tables and as a plot."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from manthan.benchmarks.arms import save_plot, where
from manthan.benchmarks.capacity_report import COLORS, GREYS

OURS = ("host", "device")
LATENCY = ("hot", "recompute", "vllm-offload", *OURS)
REDIS = ("redis", "tiered")
DISK = ("disk", "disk-cached", "host-disk")
NAMED = (*REDIS, *DISK)
"""Arms (measured systems) that run only if `--arms` names them: they need Redis or a disk."""
CAPACITY = ("vllm-offload", "host", "plain", "device")
RATIOS = (
    ("host", "vllm-offload"),
    ("device", "hot"),
    ("recompute", "host"),
    ("tiered", "host"),
    ("disk-cached", "host"),
)
GAINS = (("host", "vllm-offload"), ("device", "plain"))
BUDGET_OF = {
    "vllm-offload": "host memory (besides a small pool)",
    "host": "host memory (besides a small pool)",
    "plain": "GPU memory, all for the pool",
    "device": "GPU memory, for a small pool and the store",
}


def show(report: dict[str, Any], plot: Path, console: Console) -> None:
    """Print tables of the results, and draw the plot."""
    console.print(where(report), soft_wrap=True)
    if latency_rows(report):
        console.print(latency_table(report))
    if kept_sessions(report):
        console.print(capacity_table(report))
    if latency_rows(report) or kept_sessions(report):
        save_plot(draw, report, plot, console)


@dataclass(frozen=True)
class Row:
    """Times to the first token, in ms, of one arm's session returns of one kind.

    cached: least number of prompt tokens that were not computed, over all the returns.
    """

    name: str
    times: Sequence[float]
    cached: int

    @property
    def median(self) -> float:
        return statistics.median(self.times)


def latency_rows(report: dict[str, Any]) -> list[Row]:
    """Return rows in the order of the tables, without each kind's first return, which was a warm-up."""
    rows = []
    named = [name.removeprefix("latency ") for name in report["arms"] if name.startswith("latency ")]
    for name in sorted(named, key=_place):
        found = report["arms"][f"latency {name}"]
        for key, label in (("returns", name), ("hot", f"{name}, hot")):
            if counted := found.get(key, [])[1:]:
                times = [answer["ttft_s"] * 1e3 for answer in counted]
                rows.append(Row(label, times, min(answer["cached_tokens"] for answer in counted)))
    return rows


def _place(name: str) -> int:
    """Return an arm's position in the tables. name: the arm, and its codec if one was chosen."""
    return (*LATENCY, *NAMED).index(name.split()[0])


def latency_ratios(rows: Sequence[Row]) -> dict[str, float]:
    """Return ratios of medians for the pairs of RATIOS, for all codecs, without rows "ARM, hot"."""
    median = {row.name: row.median for row in rows if "," not in row.name}
    return {
        f"{a} / {b}": median[a] / median[b]
        for first, second in RATIOS
        for a in median
        for b in median
        if (a.split()[0], b.split()[0]) == (first, second)
    }


def kept_sessions(report: dict[str, Any]) -> dict[str, int]:
    found = report["arms"]
    return {name: found[f"capacity {name}"]["kept"] for name in CAPACITY if f"capacity {name}" in found}


def capacity_ratios(kept: dict[str, int]) -> dict[str, float]:
    return {f"{a} / {b}": kept[a] / kept[b] for a, b in GAINS if kept.get(b) and a in kept}


def latency_table(report: dict[str, Any]) -> Table:
    rows = latency_rows(report)
    tokens = report["arguments"]["tokens"]
    caption = ",  ".join(f"{name} = {ratio:.2f}" for name, ratio in latency_ratios(rows).items())
    table = Table(title=f"A session of {tokens:,} tokens returns: time to first token", caption=caption, box=SIMPLE)
    table.add_column("")
    for header in ("median, ms", "least, ms", "most, ms", "returns", "tokens not computed, least"):
        table.add_column(header, justify="right")
    for row in rows:
        numbers = (f"{number:.1f}" for number in (row.median, min(row.times), max(row.times)))
        table.add_row(row.name, *numbers, str(len(row.times)), str(row.cached))
    return table


def capacity_table(report: dict[str, Any]) -> Table:
    arguments, kept = report["arguments"], kept_sessions(report)
    title = (
        f"Sessions of {arguments['capacity_tokens']:,} tokens kept in the bytes of "
        f"{arguments['capacity_sessions']} bf16 sessions"
    )
    caption = ",  ".join(f"{name} = {ratio:.2f}" for name, ratio in capacity_ratios(kept).items())
    table = Table(title=title, caption=caption, box=SIMPLE)
    table.add_column("")
    table.add_column("bytes of")
    for header in ("put in", "kept"):
        table.add_column(header, justify="right")
    for name, count in kept.items():
        put = len(report["arms"][f"capacity {name}"]["returns"])
        table.add_row(name, BUDGET_OF[name], str(put), str(count))
    return table


def draw(report: dict[str, Any]) -> Any:
    """Draw bars for the results."""
    from matplotlib.figure import Figure

    rows, kept = latency_rows(report), kept_sessions(report)
    parts = [part for part in (rows, kept) if part]
    figure = Figure(figsize=(11, 3.0 * len(parts) + 0.6), layout="constrained")
    axes = figure.subplots(len(parts), 1, squeeze=False)[:, 0]
    if rows:
        _draw_latency(axes[0], rows, report["arguments"]["tokens"])
    if kept:
        _draw_capacity(axes[-1], kept, report["arguments"])
    figure.suptitle(where(report), fontsize=9)
    return figure


def _draw_latency(axes: Any, rows: Sequence[Row], tokens: int) -> None:
    medians = [row.median for row in rows]
    spread = [[row.median - min(row.times) for row in rows], [max(row.times) - row.median for row in rows]]
    names = [row.name for row in rows]
    bars = axes.barh(names, medians, xerr=spread, color=[_color(name) for name in names], ecolor="#444444", capsize=3)
    axes.bar_label(bars, [f"{median:,.0f} ms" for median in medians], padding=6)
    axes.margins(x=0.12)
    axes.invert_yaxis()
    axes.set_title(f"A session of {tokens:,} tokens returns", loc="left")
    axes.set_xlabel("time to first token, ms: median, least to most")


def _draw_capacity(axes: Any, kept: dict[str, int], arguments: dict[str, Any]) -> None:
    names = [f"{name}\n({BUDGET_OF[name]})" for name in kept]
    bars = axes.barh(names, list(kept.values()), color=[_color(name) for name in kept])
    axes.bar_label(bars, padding=4)
    axes.margins(x=0.12)
    axes.invert_yaxis()
    size = f"{arguments['capacity_tokens']:,} tokens"
    axes.set_title(f"Sessions of {size} kept in the bytes of {arguments['capacity_sessions']} in bf16", loc="left")
    axes.set_xlabel("sessions with at most 5% recomputed")


def _color(name: str) -> str:
    """Return the color of a bar: blue for Manthan, another for each arm on disk, and grey for vLLM. name: row label."""
    arm = name.split()[0].rstrip(",")
    if arm in DISK:
        return COLORS[1 + DISK.index(arm)]
    return COLORS[0] if arm in (*OURS, *REDIS) else GREYS[1]
