"""Results of the load benchmark, as tables and as a plot.

An arm is a measured system, such as plain vLLM. A return is a request after the first turn of its chat.
"""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from manthan.benchmarks.arms import merge_reports, save_plot, where
from manthan.benchmarks.capacity_report import COLORS, GREYS, quantile

QUANTILES = (0.50, 0.90, 0.99)
SLOW_FROM = 0.90
MOST_TURNS = 4
"""Turn from which on all turns are shown together."""
LONG_MS = 10_000
"""A table is in seconds if an arm's p99 of the returns is this or more."""
COMPACT: dict[str, Any] = {"box": SIMPLE, "pad_edge": False, "collapse_padding": True}
PARTS = {
    "queue": "queue",
    "restore": "restore",
    "after": "queue\nagain",
    "compute": "computing",
    "rest": "API,\nclient",
}
PART_COLORS = dict(zip(PARTS, ("#a3acb5", "#2f6db5", "#c9ced3", "#d1663b", "#444444"), strict=True))
OTHERS = ("plain", "plain-ordered", "wide", "offload", "lmcache")


@dataclass(frozen=True)
class Slow:
    """Slowest tenth of an arm's returns. count: number of them. mean_ms: mean time to the first token.

    parts: mean milliseconds of each measured part, by key of PARTS. found: number of returns by `Wait.found`.
    ahead: mean of `Wait.ahead`.
    """

    count: int
    mean_ms: float
    parts: dict[str, float]
    found: Counter[str]
    ahead: float


@dataclass(frozen=True)
class Found:
    """Results of an arm. turns: ms to the first token by turn, from MOST_TURNS on together. returns: of all returns.

    rate: generated tokens a second. not_computed: cached share of the returns' prompt tokens. right: number of right
    answers among the `checked`. errors: number of unanswered requests. failures: number of failed block transfers.
    """

    arm: str
    turns: dict[int, list[float]]
    returns: list[float]
    rate: float
    not_computed: float
    right: int
    checked: int
    errors: int
    failures: float
    slow: Slow | None
    start_s: float

    @classmethod
    def of(cls, run: dict[str, Any]) -> "Found":
        answered = [one for one in run["requests"] if not one["error"]]
        returned = [one for one in answered if one["turn"] > 1]
        checked = [one["right"] for one in answered if one["right"] is not None]
        turns: dict[int, list[float]] = {}
        for one in answered:
            turns.setdefault(min(one["turn"], MOST_TURNS), []).append(one["ttft_s"] * 1e3)
        prompts = sum(one["prompt_tokens"] for one in returned)
        return cls(
            run["arm"],
            dict(sorted(turns.items())),
            [one["ttft_s"] * 1e3 for one in returned],
            sum(one["generated_tokens"] for one in answered) / run["wall_s"],
            sum(one["cached_tokens"] for one in returned) / prompts if prompts else 0.0,
            sum(checked),
            len(checked),
            run["planned"] - len(answered),
            sum(value for name, value in run["counters"].items() if name.startswith("manthan_failures_total")),
            _slow([one["wait"] for one in returned]),
            run.get("start_s", 0.0),
        )


def _slow(waits: Sequence[dict[str, Any]]) -> Slow | None:
    if not waits:
        return None
    bar = quantile([wait["ttft"] for wait in waits], SLOW_FROM)
    slow = [wait for wait in waits if wait["ttft"] >= bar]
    means = {
        part: statistics.fmean(known)
        for part in PARTS
        if (known := [wait[part] for wait in slow if wait.get(part) is not None])
    }
    return Slow(
        len(slow),
        statistics.fmean(wait["ttft"] for wait in slow),
        means,
        Counter(wait["found"] for wait in slow),
        statistics.fmean(wait["ahead"] for wait in slow),
    )


def merged(files: Sequence[Path]) -> dict[str, Any]:
    """Return one report with the arms of several; see merge_reports."""
    return merge_reports(files, "load", ("model", "made", "trace", "memory"), lambda run: run["arm"])


# -- shown ----------------------------------------------------------------------------------------------


def show(report: dict[str, Any], plot: Path, console: Console) -> None:
    """Print the tables of the results, and draw the plot."""
    console.print(where(report), soft_wrap=True)
    found = [Found.of(run) for run in report["runs"]]
    if report["left_out"]:
        console.print(f"  {report['left_out']} requests of the trace are too long for the model, and left out.")
    if not found:
        return
    console.print(waits_table(report, found))
    console.print(f"  {starts(found)}", soft_wrap=True)
    if any(one.slow and one.slow.parts for one in found):
        console.print(slow_table(found))
    for reason in report["left_out_arms"].values():
        console.print(f"  {reason}", soft_wrap=True)
    if any(one.failures for one in found):
        console.print("  Some blocks could not be stored or restored: see `counters` in the JSON.", style="red")
    save_plot(lambda _: draw(report, found), report, plot, console)


def title(report: dict[str, Any]) -> str:
    if made := report.get("made"):
        return (
            f"{made['chats']} chats of {made['tokens']:,} tokens of {report['model']}, {made['turns']} turns, "
            f"{made['think_s']:g} s of thought"
        )
    return f"{report['trace']}, {report['model']}"


def waits_table(report: dict[str, Any], found: Sequence[Found]) -> Table:
    scale, unit = (1e3, "s") if max(quantile(one.returns, 0.99) for one in found) >= LONG_MS else (1.0, "ms")
    table = Table(title=f"{title(report)}: first token, p50/p90/p99, {unit}", **COMPACT)
    table.add_column("", no_wrap=True)
    turns = sorted({turn for one in found for turn in one.turns})
    for turn in turns:
        table.add_column(_turn_name(turn), justify="right", no_wrap=True)
    table.add_column("returns", justify="right", no_wrap=True)
    for header in ("not\ncomputed", "tokens/s", "right\nanswers", "errors"):
        table.add_column(header, justify="right")
    for one in found:
        table.add_row(
            one.arm,
            *(_spread(one.turns.get(turn, []), scale) for turn in turns),
            _spread(one.returns, scale),
            f"{one.not_computed:.1%}",
            f"{one.rate:.0f}",
            f"{one.right}/{one.checked}" if one.checked else "",
            f"{one.errors}",
        )
    return table


def starts(found: Sequence[Found]) -> str:
    """Return a line: each arm's time to start and median wait of first prompts, both compared with plain vLLM's."""
    plain = next((one for one in found if one.arm == "plain"), None)
    parts = []
    for one in found:
        first = quantile(one.turns[1], 0.5) if one.turns.get(1) else 0.0
        text = f"{one.arm} ready after {one.start_s:.1f} s"
        if plain is not None and one is not plain:
            text += f" ({one.start_s - plain.start_s:+.1f})"
        text += f", first prompts p50 {first:.0f} ms"
        if plain is not None and one is not plain and plain.turns.get(1):
            text += f" ({first / quantile(plain.turns[1], 0.5):.2f} of plain's)"
        parts.append(text)
    return "Start-up and first prompts: " + "; ".join(parts)


def _turn_name(turn: int) -> str:
    return f"turn {turn}{' and later' if turn == MOST_TURNS else ''}"


def _spread(times: Sequence[float], scale: float) -> str:
    values = [quantile(times, share) / scale for share in QUANTILES] if times else []
    return "/".join(f"{value:.{2 if scale > 1 and value < 10 else 1 if scale > 1 else 0}f}" for value in values)


def slow_table(found: Sequence[Found]) -> Table:
    table = Table(title="Waits of the slowest tenth of the returns, mean ms", **COMPACT)
    table.add_column("", no_wrap=True)
    for header in ("returns", "first token", *PARTS.values(), "further tokens\ncomputed meanwhile"):
        table.add_column(header, justify="right")
    table.add_column("found")
    for one in found:
        if one.slow is None:
            continue
        parts = (one.slow.parts.get(part) for part in PARTS)
        table.add_row(
            one.arm,
            str(one.slow.count),
            f"{one.slow.mean_ms:,.0f}",
            *("" if part is None else f"{part:,.0f}" for part in parts),
            f"{one.slow.ahead:,.0f}",
            ", ".join(f"{count} {what}" for what, count in one.slow.found.most_common()),
        )
    return table


# -- the plot -------------------------------------------------------------------------------------------


def draw(report: dict[str, Any], found: Sequence[Found]) -> Any:
    """Draw distributions of the returns' waits, quantiles by turn, and parts of the slowest tenth's waits."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(16, 5), layout="constrained")
    returns, turns, slow = figure.subplots(1, 3)
    ours = [one.arm for one in found if one.arm not in OTHERS]
    colors = dict(zip(ours, COLORS * len(ours), strict=False))
    colors |= dict(
        zip((one.arm for one in found if one.arm in OTHERS), (*GREYS, "#3f474f", "#c9ced3", "#1d2329"), strict=False)
    )
    _draw_returns(returns, found, colors)
    _draw_turns(turns, found, colors)
    _draw_slow(slow, found)
    handles = [Line2D([], [], color=colors[one.arm], lw=2, label=_label(one)) for one in found]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(f"{title(report)}; {where(report)}", fontsize=9)
    return figure


def _label(one: Found) -> str:
    return f"{one.arm}: {one.not_computed:.0%} of returns' tokens not computed"


def _draw_returns(axes: Any, found: Sequence[Found], colors: dict[str, str]) -> None:
    for one in found:
        times = np.sort(one.returns)
        if len(times):
            axes.step(times, np.arange(1, len(times) + 1) / len(times), where="post", color=colors[one.arm])
    axes.set(xscale="log", ylim=(0, 1.02), xlabel="time to first token, ms", ylabel="share of returns")
    axes.set_title("Returns that have their first token by then", loc="left")
    axes.grid(alpha=0.3, which="both")


def _draw_turns(axes: Any, found: Sequence[Found], colors: dict[str, str]) -> None:
    """Draw p50, p90 and p99 of each arm's waits, by turn."""
    turns = sorted({turn for one in found for turn in one.turns})
    width = 0.8 / len(found)
    for place, one in enumerate(found):
        for turn, times in one.turns.items():
            spread = [quantile(times, share) for share in QUANTILES]
            at = turns.index(turn) - 0.4 + width * (place + 0.5)
            axes.plot([at, at], [spread[0], spread[-1]], color=colors[one.arm], lw=2)
            for value, marker, share in zip(spread, "o_D", QUANTILES, strict=True):
                label = f"p{share * 100:.0f}" if (place, turn) == (0, turns[0]) else None
                axes.plot(at, value, marker, color=colors[one.arm], ms=9 if marker == "_" else 5, mew=2, label=label)
    axes.set_xticks(range(len(turns)), [_turn_name(turn) for turn in turns])
    axes.set(yscale="log", ylabel="time to first token, ms")
    axes.set_title("By turn: p50, p90, p99", loc="left")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3, axis="y", which="both")


def _draw_slow(axes: Any, found: Sequence[Found]) -> None:
    shown = [(one.arm, one.slow) for one in found if one.slow is not None]
    left = np.zeros(len(shown))
    for part, name in PARTS.items():
        widths = np.array([slow.parts.get(part, 0.0) for _, slow in shown])
        axes.barh(range(len(shown)), widths, left=left, color=PART_COLORS[part], label=name.replace("\n", " "))
        left += widths
    axes.set_yticks(range(len(shown)), [arm for arm, _ in shown])
    axes.invert_yaxis()
    axes.set(xlabel="mean, ms")
    axes.set_title("Waits of the slowest tenth of the returns", loc="left")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3, axis="x")
