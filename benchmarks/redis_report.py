"""What redis_store.py found, as tables and as a plot."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from manthan.benchmarks.arms import save_plot, where

OURS, RAW = "Manthan", "redis-py"
RECOMPUTE = "recompute"
LATENCY = (RECOMPUTE, "host", "redis", "tiered")
RATIOS = (("redis", RECOMPUTE), ("redis", "host"), ("tiered", "host"))


@dataclass(frozen=True)
class Row:
    """Samples of one arm, in MB/s or ms, or ratios of two."""

    name: str
    samples: Sequence[float]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def quartiles(self) -> tuple[float, float]:
        if len(self.samples) < 2:
            return self.samples[0], self.samples[0]
        first, _, third = statistics.quantiles(self.samples, method="inclusive")
        return first, third


def show(report: dict[str, Any], plot: Path, console: Console) -> None:
    """Tables of what was measured, and the plot."""
    console.print(where(report), soft_wrap=True)
    if report["speed"]:
        console.print(speed_table(report))
    if latency_rows(report):
        console.print(latency_table(report))
    if report["speed"] or report["arms"]:
        save_plot(draw, report, plot, console)


def speed_rows(report: dict[str, Any]) -> list[Row]:
    rates = report["speed"].get("rates", {})
    return [Row(f"{operation}, {arm}", samples) for operation in rates for arm, samples in rates[operation].items()]


def speed_ratios(report: dict[str, Any]) -> dict[str, Row]:
    """Ours to redis-py's, by operation, round by round: what else the machine does weighs on both of a round."""
    rates = report["speed"].get("rates", {})
    return {
        operation: Row(operation, [ours / raw for ours, raw in zip(arms[OURS], arms[RAW], strict=True)])
        for operation, arms in rates.items()
    }


def latency_rows(report: dict[str, Any]) -> list[Row]:
    """The first return of each arm warmed up and does not count."""
    found = {name: report["arms"].get(f"latency {name}", {}).get("returns", [])[1:] for name in LATENCY}
    return [Row(name, [answer["ttft_s"] * 1e3 for answer in counted]) for name, counted in found.items() if counted]


def latency_ratios(rows: Sequence[Row]) -> dict[str, float]:
    median = {row.name: row.median for row in rows}
    return {f"{a} / {b}": median[a] / median[b] for a, b in RATIOS if a in median and b in median}


def speed_table(report: dict[str, Any]) -> Table:
    speed, arguments = report["speed"], report["arguments"]
    title = f"{arguments['blocks']} blocks of {arguments['block_bytes']:,} bytes, {speed['batch']} in a pipeline"
    ratios = "\n".join(map(_ratio_line, speed_ratios(report).values()))
    versions = f"Redis {speed['redis']}, redis-py {speed['redis-py']}, {speed['parser']} {speed['hiredis']}"
    return spread_table(title, f"{ratios}\n{versions}", "MB/s", speed_rows(report))


def _ratio_line(ratio: Row) -> str:
    low, high = ratio.quartiles
    return f"{ratio.name}, round by round: {OURS} / {RAW} = {ratio.median:.2f} ({low:.2f} to {high:.2f})"


def latency_table(report: dict[str, Any]) -> Table:
    rows = latency_rows(report)
    title = f"A session of {report['arguments']['tokens']:,} tokens returns: time to first token"
    caption = ",  ".join(f"{name} = {ratio:.2f}" for name, ratio in latency_ratios(rows).items())
    extra: dict[str, list[str]] = {"tokens not computed": [], "right answers": []}
    for row in rows:
        counted = report["arms"][f"latency {row.name}"]["returns"][1:]
        extra["tokens not computed"].append(str(min(answer["cached_tokens"] for answer in counted)))
        extra["right answers"].append(f"{sum(answer['right'] for answer in counted)} of {len(counted)}")
    return spread_table(title, caption, "ms", rows, extra)


def spread_table(
    title: str, caption: str, unit: str, rows: Sequence[Row], extra: dict[str, list[str]] | None = None
) -> Table:
    """Median and spread of each row, and further columns."""
    extra = extra or {}
    table = Table(title=title, caption=caption, box=SIMPLE)
    table.add_column("")
    for header in (f"median, {unit}", "quartiles", "least", "most", "samples", *extra):
        table.add_column(header, justify="right")
    for index, row in enumerate(rows):
        low, high = row.quartiles
        table.add_row(
            row.name,
            f"{row.median:.1f}",
            f"{low:.1f} to {high:.1f}",
            f"{min(row.samples):.1f}",
            f"{max(row.samples):.1f}",
            str(len(row.samples)),
            *(column[index] for column in extra.values()),
        )
    return table


def draw(report: dict[str, Any]) -> Any:
    """Bars for what was measured."""
    from matplotlib.figure import Figure

    arguments = report["arguments"]
    parts = [
        (speed_rows(report), "MB/s", f"Blocks of {arguments['block_bytes']:,} bytes"),
        (latency_rows(report), "ms", f"A session of {arguments['tokens']:,} tokens returns: time to first token"),
    ]
    parts = [part for part in parts if part[0]]
    figure = Figure(figsize=(11, 3.0 * len(parts) + 0.6), layout="constrained")
    for axes, part in zip(figure.subplots(len(parts), 1, squeeze=False)[:, 0], parts, strict=True):
        draw_bars(axes, *part)
    figure.suptitle(where(report), fontsize=9)
    return figure


def draw_bars(axes: Any, rows: Sequence[Row], unit: str, title: str) -> None:
    """Medians, with quartiles as whiskers."""
    medians = [row.median for row in rows]
    spread = [
        [row.median - row.quartiles[0] for row in rows],
        [row.quartiles[1] - row.median for row in rows],
    ]
    names = [row.name for row in rows]
    bars = axes.barh(names, medians, xerr=spread, color=[_color(name) for name in names], ecolor="#444444", capsize=3)
    axes.bar_label(bars, [f"{median:,.0f} {unit}" for median in medians], padding=6)
    axes.margins(x=0.12)
    axes.invert_yaxis()
    axes.set_title(title, loc="left")
    axes.set_xlabel(f"{unit}: median, and quartiles")


def _color(name: str) -> str:
    return "#9aa5b1" if name == RECOMPUTE or name.endswith(RAW) else "#2f6db5"
