"""What interference.py found, as a table and as a plot."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from manthan.benchmarks.arms import save_plot, where

ENGINES = ("plain", "manthan")
LABELS = {
    ("plain", "alone"): "plain vLLM",
    ("manthan", "alone"): "Manthan",
    ("manthan", "background"): "Manthan, with sessions",
    ("plain", "background"): "plain vLLM, with sessions",
}


@dataclass(frozen=True)
class Row:
    """One engine in one phase. rates: output tokens/s of each window; the rest are sums over the windows."""

    label: str
    rates: Sequence[float]
    evictions: int
    restores: int
    encoded_blocks: int
    restored_blocks: int
    ttfts: Sequence[float]

    @property
    def median(self) -> float:
        return statistics.median(self.rates)


def find_rows(report: dict[str, Any]) -> list[Row]:
    rows = []
    for (engine, phase), label in LABELS.items():
        found = report["arms"].get(engine, {}).get("phases", {}).get(phase)
        if found is not None:
            names = ("evictions", "restores", "encoded_blocks", "restored_blocks")
            sums = [round(sum(window[name] for window in found["windows"])) for name in names]
            ttfts = [back["ttft_s"] for back in found.get("returns", [])]
            rows.append(Row(label, [window["tokens_per_s"] for window in found["windows"]], *sums, ttfts))
    return rows


def shares(rows: Sequence[Row]) -> dict[str, float]:
    """Each row's median over that of plain vLLM alone, if it was measured."""
    alone = next((row.median for row in rows if row.label == LABELS["plain", "alone"]), None)
    return {row.label: row.median / alone for row in rows} if alone else {}


def show(report: dict[str, Any], plot: Path, console: Console) -> None:
    """A table of what was measured, and the plot."""
    console.print(where(report), soft_wrap=True)
    if rows := find_rows(report):
        console.print(make_table(rows, report["arguments"]))
        save_plot(draw, report, plot, console)


def make_table(rows: Sequence[Row], arguments: dict[str, Any]) -> Table:
    share = shares(rows)
    caption = (
        "With sessions: on Manthan they are evicted and restored, on plain vLLM computed again. Counts: in the windows."
    )
    table = Table(title=_title(arguments), caption=caption, box=SIMPLE)
    table.add_column("")
    headers = ("tokens/s,\nmedian", "least", "most", "of plain,\nalone", "evic-\ntions", "re-\nstores")
    for header in (*headers, "blocks\nencoded", "blocks\nrestored", "returns", "their first\ntoken, ms"):
        table.add_column(header, justify="right")
    for row in rows:
        table.add_row(
            row.label,
            *(f"{number:,.0f}" for number in (row.median, min(row.rates), max(row.rates))),
            f"{share[row.label]:.1%}" if share else "",
            *map(str, (row.evictions, row.restores, row.encoded_blocks, row.restored_blocks, len(row.ttfts))),
            f"{statistics.median(row.ttfts) * 1e3:,.0f}" if row.ttfts else "",
        )
    return table


def _title(arguments: dict[str, Any]) -> str:
    return (
        f"Output of {arguments['requests']} requests that always run, beside {arguments['sessions']} sessions of "
        f"{arguments['tokens']:,} tokens, one back every {arguments['every']:g} s"
    )


def draw(report: dict[str, Any]) -> Any:
    """A bar for each row, from the slowest window to the fastest."""
    from matplotlib.figure import Figure

    rows = find_rows(report)
    share, medians = shares(rows), [row.median for row in rows]
    spread = [[row.median - min(row.rates) for row in rows], [max(row.rates) - row.median for row in rows]]
    colors = ["#2f6db5" if row.label.startswith("Manthan") else "#9aa5b1" for row in rows]
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh([row.label for row in rows], medians, xerr=spread, color=colors, ecolor="#444444", capsize=3)
    texts = [f"{row.median:,.0f}" + (f" ({share[row.label]:.1%})" if share else "") for row in rows]
    axes.bar_label(bars, texts, padding=6)
    axes.margins(x=0.16)
    axes.invert_yaxis()
    axes.set_title(_title(report["arguments"]), loc="left", fontsize=10)
    axes.set_xlabel("output tokens/s: median of the windows, slowest to fastest")
    figure.suptitle(where(report), fontsize=9)
    return figure
