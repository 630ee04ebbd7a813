"""Comparison of Manthan's request times with plain vLLM's, in three loads: is any request slower?

An arm is a measured system, such as plain vLLM. A load is a set of chats. A return is a later turn of a chat.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from manthan.benchmarks.arms import merge_reports, save_plot, where
from manthan.benchmarks.capacity_report import COLORS, GREYS, quantile
from manthan.benchmarks.load_arms import PLAIN
from manthan.benchmarks.load_chats import Made
from manthan.benchmarks.load_report import COMPACT
from manthan.manager.config.model import ManthanConfig

FITS, ONE_TURN, OUTGROWS = "fits", "one-turn", "outgrows"
ARMS = "plain,host-arrival,host"
FIRST, BETWEEN = "first token", "between tokens"
QUANTILES = {"p50": 0.50, "p99": 0.99}
MOST = 1.05
TOGETHER_MS = 0.5


def three_loads(made: Made, pool_blocks: int, block_size: int, positions: int) -> dict[str, Made]:
    """Return three loads with about as many requests as `made`, in the same time, by name.

    FITS: chats that fit the pool together, with the number of turns that makes most requests. ONE_TURN: chats of one
    turn. OUTGROWS: the chats of `made`, which do not fit the pool together.

    Args:
        positions: Most tokens of a prompt with the answer.

    Raises:
        BadParameter: if the chats of `made` fit the pool, or have one turn.
    """
    requests, span_s = made.chats * made.turns, made.arrive_s + (made.turns - 1) * made.think_s

    def fitting(turns: int) -> int:
        longest = replace(made, turns=turns).longest
        return pool_blocks // (longest // block_size + 2) if longest <= positions else 0

    if made.turns < 2:
        raise typer.BadParameter(f"--fairness needs chats of two turns or more, but --turns is {made.turns}")
    if (room := fitting(made.turns)) >= made.chats:
        raise typer.BadParameter(
            f"--fairness needs more chats than fit the pool, but {room} fit, and --chats is {made.chats}: raise "
            "--chats or lower --pool"
        )
    turns = max(range(2, requests + 1), key=lambda turns: (min(requests, turns * fitting(turns)), -turns))
    pause_s = (span_s - made.arrive_s) / (turns - 1)
    return {
        FITS: replace(made, chats=fitting(turns), turns=turns, think_s=pause_s),
        ONE_TURN: replace(made, chats=requests, turns=1, arrive_s=span_s),
        OUTGROWS: made,
    }


@dataclass(frozen=True)
class Row:
    """Times of an arm in a load, and plain vLLM's, in ms by quantile over all repeats. what: FIRST or BETWEEN.

    spread: by quantile, least and most ratio to plain vLLM in a repeat. bound_s: most seconds by which the arm's order
    delays a request; 0 if the arm does not reorder requests.
    """

    load: str
    what: str
    arm: str
    plain: dict[str, float]
    ours: dict[str, float]
    spread: dict[str, tuple[float, float]]
    bound_s: float

    @property
    def ratios(self) -> dict[str, float]:
        return {name: self.ours[name] / self.plain[name] for name in QUANTILES}

    @property
    def above(self) -> list[str]:
        """Return texts of the ratios above MOST. Mark a ratio if `bound_s` allows it."""
        found = []
        for name, ratio in self.ratios.items():
            if ratio > MOST:
                over_ms = self.ours[name] - MOST * self.plain[name]
                is_within = self.what == FIRST and over_ms <= self.bound_s * 1e3
                found.append(f"{name} {ratio:.2f}{f' (within {self.bound_s:g} s)' if is_within else ''}")
        return found


def times(run: dict[str, Any], load: str, what: str) -> list[float]:
    """Return milliseconds of a run's answered requests in a load. what: FIRST, or BETWEEN for gaps between pieces.

    A gap up to TOGETHER_MS does not count, because the client read both pieces at once.
    """
    answered = [one for one in run["loads"][load]["requests"] if not one["error"]]
    if what == FIRST:
        return [one["ttft_s"] * 1e3 for one in answered]
    return [gap for one in answered for gap in one["gaps_ms"] if gap > TOGETHER_MS]


def rows(report: dict[str, Any]) -> Iterator[Row]:
    """Yield a row for each load, kind of time and arm but plain vLLM. Only repeats whose seed plain vLLM has count."""
    plain = {run["seed"]: run for run in report["runs"] if run["arm"] == PLAIN}
    arms = dict.fromkeys(run["arm"] for run in report["runs"] if run["arm"] != PLAIN)
    for load in (FITS, ONE_TURN, OUTGROWS):
        for what in (FIRST, BETWEEN):
            for arm in arms:
                runs = [run for run in report["runs"] if run["arm"] == arm and run["seed"] in plain]
                pairs = [(times(plain[run["seed"]], load, what), times(run, load, what)) for run in runs]
                pairs = [(theirs, ours) for theirs, ours in pairs if theirs and ours]
                if pairs:
                    yield _row(load, what, arm, pairs, _bound_s(runs[0]["manthan"] or {}))


def _bound_s(manthan: dict[str, Any]) -> float:
    """Return the most seconds by which an arm's order delays a request; see `vllm_hooks.ordering.ReturnsFirstQueue`."""
    config = ManthanConfig.model_validate({key: manthan[key] for key in ("ordering", "admission_s") if key in manthan})
    return 2 * config.admission_s if config.ordering == "returns" else 0.0


def _row(load: str, what: str, arm: str, pairs: Sequence[tuple[list[float], list[float]]], bound_s: float) -> Row:
    sides = [list(chain.from_iterable(side)) for side in zip(*pairs, strict=True)]
    theirs, ours = ({name: quantile(side, share) for name, share in QUANTILES.items()} for side in sides)
    spread = {}
    for name, share in QUANTILES.items():
        ratios = [quantile(one, share) / quantile(other, share) for other, one in pairs]
        spread[name] = min(ratios), max(ratios)
    return Row(load, what, arm, theirs, ours, spread, bound_s)


def merged(files: Sequence[Path]) -> dict[str, Any]:
    """Return one report with the arms and seeds of several; see merge_reports."""
    return merge_reports(files, "fairness", ("model", "loads", "memory"), lambda run: (run["arm"], run["seed"]))


# -- shown ----------------------------------------------------------------------------------------------


def show(report: dict[str, Any], plot: Path, console: Console) -> None:
    """Print the table of the results, and draw the plot."""
    console.print(where(report), soft_wrap=True)
    found = list(rows(report))
    if not found:
        return
    for name, made in report["loads"].items():
        chats = f"{made['chats']} chats of {made['tokens']:,} tokens within {made['arrive_s']:g} s"
        pauses = f", {made['turns']} turns, {made['think_s']:.3g} s of thought" if made["turns"] > 1 else ""
        console.print(f"  {name}: {chats}{pauses}; {reused(report, name)}", soft_wrap=True)
    console.print(make_table(report, found))
    slower = [f"{row.load}, {row.what}, {row.arm}: {', '.join(row.above)}" for row in found if row.above]
    for line in slower or ["nothing"]:
        console.print(f"  Above {MOST} of plain: {line}", soft_wrap=True)
    lost = sum(load["planned"] for run in report["runs"] for load in run["loads"].values()) - sum(
        not one["error"] for run in report["runs"] for load in run["loads"].values() for one in load["requests"]
    )
    if lost:
        console.print(f"  {lost} requests were not answered: see `error` in the JSON.", style="red")
    save_plot(lambda _: draw(report), report, plot, console)


def reused(report: dict[str, Any], load: str) -> str:
    """Return a text: by arm, the cached share of returns' prompt tokens. Plain vLLM's tells if a load fits the pool."""
    parts = []
    for arm in dict.fromkeys(run["arm"] for run in report["runs"]):
        requests = [one for run in report["runs"] if run["arm"] == arm for one in run["loads"][load]["requests"]]
        returns = [one for one in requests if one["turn"] > 1 and not one["error"]]
        if returns:
            share = sum(one["cached_tokens"] for one in returns) / sum(one["prompt_tokens"] for one in returns)
            parts.append(f"{arm} {share:.0%}")
    return f"returns' tokens not computed: {', '.join(parts)}" if parts else "no chat returns"


def make_table(report: dict[str, Any], found: Sequence[Row]) -> Table:
    repeats = len({run["seed"] for run in report["runs"]})
    table = Table(title=f"{report['model']}: against plain vLLM, ms; repeats: {repeats}", **COMPACT)
    for header in ("load", "", "arm"):
        table.add_column(header, no_wrap=True)
    for name in QUANTILES:
        for header in (f"{name}\nplain", f"{name}", "ratio"):
            table.add_column(header, justify="right", no_wrap=True)
    for row in found:
        cells = []
        for name in QUANTILES:
            least, most = row.spread[name]
            spread = f" ({least:.2f}-{most:.2f})" if repeats > 1 else ""
            cells += [f"{row.plain[name]:,.1f}", f"{row.ours[name]:,.1f}", f"{row.ratios[name]:.2f}{spread}"]
        table.add_row(row.load, row.what, row.arm, *cells)
    return table


def draw(report: dict[str, Any]) -> Any:
    """Draw a column for each load: distributions of times to the first token, and of times between tokens."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 9), layout="constrained")
    axes = figure.subplots(2, 3)
    arms = list(dict.fromkeys(run["arm"] for run in report["runs"]))
    colors = {arm: GREYS[0] if arm == PLAIN else COLORS[at % len(COLORS)] for at, arm in enumerate(arms, -1)}
    for line, what in zip(axes, (FIRST, BETWEEN), strict=True):
        for axis, load in zip(line, (FITS, ONE_TURN, OUTGROWS), strict=True):
            for arm in arms:
                found = np.sort([one for run in report["runs"] if run["arm"] == arm for one in times(run, load, what)])
                if len(found):
                    shares = np.arange(1, len(found) + 1) / len(found)
                    axis.step(found, shares, where="post", color=colors[arm], label=arm)
            axis.set(xscale="log", ylim=(0, 1.02), xlabel=f"{what}, ms", ylabel="share")
            axis.set_title(f"{load}: {what}", loc="left")
            axis.grid(alpha=0.3, which="both")
    axes[0][0].legend(frameon=False)
    figure.suptitle(f"{report['model']}; {where(report)}", fontsize=9)
    return figure
