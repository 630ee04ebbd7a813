"""What the concurrency benchmark found, as a table and as a plot."""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from manthan.benchmarks.arms import save_plot, where

COLORS = {"plain": "#6b7580", "Manthan": "#2f6db5"}


class Spread(NamedTuple):
    """Median, least and most of the repeats."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, numbers: Sequence[float]) -> "Spread":
        return cls(statistics.median(numbers), min(numbers), max(numbers))

    def __str__(self) -> str:
        return f"{self.median:,.1f} ({self.least:,.1f} to {self.most:,.1f})"


def all_rate(turn: dict[str, Any]) -> float:
    return float(turn["tokens"] / turn["wall_s"])


def user_rate(turn: dict[str, Any]) -> float:
    return statistics.median(turn["user_rates"])


def wall(turn: dict[str, Any]) -> float:
    return float(turn["wall_s"])


def ratio(level: dict[str, Any]) -> float | None:
    """Manthan's tokens a second over plain vLLM's, median of the pairs of turns; None without a pair."""
    plain, ours = (level["turns"].get(name, []) for name in ("plain", "Manthan"))
    pairs = [all_rate(b) / all_rate(a) for a, b in zip(plain, ours, strict=False) if all_rate(a)]
    return statistics.median(pairs) if pairs else None


def show(report: dict[str, Any], plot: Path, console: Console) -> None:
    """The table and the plot."""
    console.print(where(report), soft_wrap=True)
    console.print(make_table(report))
    save_plot(draw, report, plot, console)


def make_table(report: dict[str, Any]) -> Table:
    arguments = report["arguments"]
    title = (
        f"{arguments['tokens']} tokens for each of {arguments['requests']} prompts of {arguments['prompt']} a user: "
        f"{report['model']}"
    )
    caption = f"median of {arguments['repeats']} repeats (least to most); ratio: Manthan over plain, pair by pair"
    table = Table(title=title, caption=caption, box=SIMPLE)
    table.add_column("users", justify="right")
    table.add_column("")
    for header in ("tokens/s, all", "tokens/s, a user", "wall, s", "errors", "evictions", "ratio"):
        table.add_column(header, justify="right")
    for level in report["levels"]:
        for name, turns in level["turns"].items():
            spreads = (str(Spread.of([measure(turn) for turn in turns])) for measure in (all_rate, user_rate, wall))
            errors, evictions = (str(round(sum(turn[what] for turn in turns))) for what in ("errors", "evictions"))
            found = ratio(level) if name == "Manthan" else None
            shown = f"{found:.3f}" if found else ""
            table.add_row(str(level["users"]), name, *spreads, errors, evictions if name == "Manthan" else "", shown)
    return table


def draw(report: dict[str, Any]) -> Any:
    """Tokens a second against users at a time: of all, and of one user."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.5), layout="constrained")
    for axes, title, measure in zip(
        figure.subplots(1, 2), ("All users together", "Each user"), (all_rate, user_rate), strict=True
    ):
        _draw(axes, report, measure)
        axes.set_title(title, loc="left")
    figure.suptitle(f"{report['model']}; {where(report)}", fontsize=9)
    return figure


def _draw(axes: Any, report: dict[str, Any], measure: Callable[[dict[str, Any]], float]) -> None:
    users = [level["users"] for level in report["levels"]]
    for name in report["levels"][0]["turns"]:
        spreads = [Spread.of([measure(turn) for turn in level["turns"][name]]) for level in report["levels"]]
        medians = [spread.median for spread in spreads]
        bars = [[s.median - s.least for s in spreads], [s.most - s.median for s in spreads]]
        axes.errorbar(users, medians, bars, fmt="o-", capsize=3, color=COLORS.get(name, COLORS["Manthan"]), label=name)
    axes.set(xlim=(0, None), ylim=(0, None), xlabel="users at a time", ylabel="tokens a second: median, least to most")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
