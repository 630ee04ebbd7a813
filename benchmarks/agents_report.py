"""Results of the agents' benchmark: a table, each arm's cliff, and a plot.

An arm is a measured system, such as plain vLLM. A return is a request that continues a session. An arm's cliff is the
most agents up to which the p90 of returns' times to the first token is within a bound.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from manthan.benchmarks.arms import merge_reports, save_plot, where
from manthan.benchmarks.capacity_report import COLORS, GREYS, quantile
from manthan.benchmarks.load_report import COMPACT, OTHERS
from manthan.benchmarks.restore import KEPT_SHARE
from manthan.manager.session.blocks import LEVELS

QUANTILES = {"p50": 0.50, "p90": 0.90, "p99": 0.99}
STEEP = 5
"""Goal: twice the cliff's number of agents has at most this many times the cliff's median time to first token."""
UNFAIR = 3
"""Goal at the cliff: the slowest agent's mean wait is at most this many times the median agent's."""
GIB = 1 << 30


@dataclass(frozen=True)
class Point:
    """Results of an arm with a number of agents. Only returns sent after all agents have begun count.

    Args:
        returns: number of answered requests that continued a session.
        first_s: the returns' seconds to the first token, by quantile.
        spread: by quantile, least and most of the repeats' own quantiles; empty for a single repeat.
        found: share of the returns' prompt tokens that were not computed.
        possible: share of the returns' prompt tokens known from an earlier request of the session.
        kept: number of returns that found at least KEPT_SHARE of their possible tokens.
        divergence: mean KL divergence in nats for the levels of restored blocks; see `divergence` below.
        unfair: the slowest agent's mean time to the first token, divided by the median of all agents' means.
        alive_nbytes: bf16 bytes of all agents' last prompts together, the mean of the repeats.
        errors: number of unanswered requests, of all requests and not of returns only.
        stopped_s: seconds that the measurement lasted, if it was stopped before its end; else None.
    """

    arm: str
    agents: int
    returns: int
    first_s: dict[str, float]
    spread: dict[str, tuple[float, float]]
    found: float
    possible: float
    kept: int
    divergence: float
    unfair: float
    alive_nbytes: float
    errors: int
    stopped_s: float | None = None


def points_of(report: dict[str, Any]) -> list[Point]:
    """Return a point for each arm and number of agents with returns, the fewest agents first.

    Repeats are joined. A measurement that was stopped is a point of its own, if all agents had begun by then.
    """
    found: dict[tuple[str, int, float | None], list[dict[str, Any]]] = {}
    for run in report["runs"]:
        for agents, point in run["points"].items():
            stopped_s = point.get("stopped_s")
            if stopped_s is None or stopped_s > point["ramp_s"]:
                found.setdefault((run["arm"], int(agents), stopped_s), []).append(point)
    made = [_point(report, *name, repeats) for name, repeats in found.items()]
    return sorted((point for point in made if point), key=lambda point: point.agents)


def divergence(counters: Sequence[dict[str, float]]) -> float:
    """Return the mean KL divergence in nats for restored blocks, by repeats' metrics; NaN if no block has a level.

    A calibrated codec's block has a level, the number of refinements left. LEVELS has each level's divergence.
    """
    counts = [
        sum(each.get(f"manthan_restored_levels_total{{{n}}}", 0) for each in counters) for n in range(len(LEVELS))
    ]
    nats = sum(count * level.divergence for count, level in zip(counts, LEVELS, strict=True))
    return nats / sum(counts) if any(counts) else math.nan


def _point(
    report: dict[str, Any], arm: str, agents: int, stopped_s: float | None, points: Sequence[dict[str, Any]]
) -> Point | None:
    repeats: list[list[dict[str, Any]]] = [point["requests"] for point in points]
    returns = [
        [one for one in point["requests"] if one["turn"] > 1 and not one["error"] and one["sent_s"] >= point["ramp_s"]]
        for point in points
    ]
    returns = [each for each in returns if each]
    together = [one for each in returns for one in each]
    if not together:
        return None
    times = [[one["ttft_s"] for one in each] for each in returns]
    prompts = sum(one["prompt_tokens"] for one in together)
    means = [
        statistics.fmean(one["ttft_s"] for one in each if one["chat"] == agent)
        for each in returns
        for agent in {one["chat"] for one in each}
    ]
    last = {(n, one["chat"]): one["prompt_tokens"] for n, asked in enumerate(repeats) for one in asked}
    return Point(
        arm,
        agents,
        len(together),
        {name: quantile([one for each in times for one in each], share) for name, share in QUANTILES.items()},
        {
            name: (min(quantile(each, share) for each in times), max(quantile(each, share) for each in times))
            for name, share in QUANTILES.items()
            if len(times) > 1
        },
        sum(one["cached_tokens"] for one in together) / prompts,
        sum(one["known_tokens"] for one in together) / prompts,
        sum(one["cached_tokens"] >= KEPT_SHARE * one["known_tokens"] for one in together),
        divergence([point["counters"] for point in points]),
        max(means) / statistics.median(means),
        sum(last.values()) / len(repeats) * report["token_nbytes"],
        sum(bool(one["error"]) for asked in repeats for one in asked),
        stopped_s,
    )


def cliffs(points: Sequence[Point], bound_s: float) -> dict[str, int]:
    """Return, by arm, the most agents up to which every measured p90 is within the bound; 0 if the first is above.

    Measurements that were stopped do not count.
    """
    found: dict[str, int] = {}
    over = set[str]()
    for point in finished(points):
        found.setdefault(point.arm, 0)
        if point.first_s["p90"] > bound_s:
            over.add(point.arm)
        elif point.arm not in over:
            found[point.arm] = point.agents
    return found


def finished(points: Sequence[Point]) -> list[Point]:
    """Return the points whose measurement was not stopped."""
    return [point for point in points if point.stopped_s is None]


def merged(files: Sequence[Path]) -> dict[str, Any]:
    """Return one report of several, which may differ in arms, numbers of agents, durations and seeds."""
    alike = ("trace", "model", "memory", "scale", "half", "bound_s", "token_nbytes")
    return merge_reports(files, "agents", alike, lambda run: (run["arm"], run["seed"], *run["points"]))


# -- shown ----------------------------------------------------------------------------------------------


def show(report: dict[str, Any], plot: Path, console: Console) -> None:
    """Print the table and the cliffs, and draw the plot."""
    console.print(where(report), soft_wrap=True)
    points = points_of(report)
    if points:
        console.print(make_table(report, points))
    else:
        console.print("  No request continued a session after all agents had begun: raise --seconds.")
    for line in said(report, points) + stopped(report):
        console.print(f"  {line}", soft_wrap=True)
    if measured := finished(points):
        save_plot(lambda _: draw(report, measured), report, plot, console)


def make_table(report: dict[str, Any], points: Sequence[Point]) -> Table:
    memory = report["memory"]
    sizes = f"pool {memory['pool_nbytes'] / GIB:.3g} GiB, {memory['store_nbytes'] / GIB:.3g} GiB outside"
    table = Table(title=f"{report['trace']}, {report['model']}, {sizes}: returns' first tokens, s", **COMPACT)
    for header in ("agents", "arm"):
        table.add_column(header, no_wrap=True)
    said = "found", "possible", "slowest agent\nover median", "returns", "of these\nfound", "alive,\nGiB", "errors"
    for header in (*QUANTILES, *said):
        table.add_column(header, justify="right", no_wrap=True)
    for point in points:
        table.add_row(
            f"{point.agents}{'' if point.stopped_s is None else '*'}",
            point.arm,
            *(_with_spread(point, name) for name in QUANTILES),
            f"{point.found:.1%}",
            f"{point.possible:.1%}",
            f"{point.unfair:.1f}",
            str(point.returns),
            str(point.kept),
            f"{point.alive_nbytes / GIB:.3g}",
            str(point.errors),
        )
    return table


def _with_spread(point: Point, name: str) -> str:
    text = f"{point.first_s[name]:.3g}"
    if name in point.spread:
        least, most = point.spread[name]
        text += f" ({least:.3g}-{most:.3g})"
    return text


def said(report: dict[str, Any], points: Sequence[Point]) -> list[str]:
    """Return lines: each arm's cliff, with fairness there and the median at twice as many agents; then divergences."""
    lines = []
    for arm, cliff in cliffs(points, report["bound_s"]).items():
        own = {point.agents: point for point in finished(points) if point.arm == arm}
        line = f"{arm}: p90 within {report['bound_s']:g} s up to {cliff} agents"
        line += " (the most measured)" if cliff == max(own) else ""
        if cliff:
            bound = "at most" if own[cliff].unfair <= UNFAIR else "more than"
            line += (
                f"; the slowest agent's mean wait is {own[cliff].unfair:.2f} times the median agent's, {bound} {UNFAIR}"
            )
        if cliff and 2 * cliff in own:
            times = own[2 * cliff].first_s["p50"] / own[cliff].first_s["p50"]
            line += f"; with {2 * cliff}, p50 is {times:.1f} times as long (wanted: at most {STEEP})"
        lines.append(line)
    return lines + [
        f"{point.arm}, {point.agents} agents: restored blocks diverge by {point.divergence:.4f} nats on average"
        for point in points
        if not math.isnan(point.divergence)
    ]


def stopped(report: dict[str, Any]) -> list[str]:
    """Return a line for each measurement that was stopped before its end."""
    return [
        f"* {run['arm']}, {agents} agents: stopped after {point['stopped_s']:.1f} of {point['seconds']:g} s, "
        f"{'not counted in a cliff' if point['stopped_s'] > point['ramp_s'] else 'before all agents had begun: no row'}"
        for run in report["runs"]
        for agents, point in run["points"].items()
        if point.get("stopped_s") is not None
    ]


def draw(report: dict[str, Any], points: Sequence[Point]) -> Any:
    """Draw times to the first token, and shares of found tokens, against the number of agents."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.5), layout="constrained")
    first, found = figure.subplots(1, 2)
    arms = list(dict.fromkeys(point.arm for point in points))
    ours = [arm for arm in arms if arm not in OTHERS]
    colors = dict(zip(ours, COLORS * len(arms), strict=False))
    colors |= dict(zip((arm for arm in arms if arm in OTHERS), GREYS * len(arms), strict=False))
    for arm in arms:
        own = [point for point in points if point.arm == arm]
        counts = [point.agents for point in own]
        for name, style in (("p50", ":"), ("p90", "-")):
            times = [point.first_s[name] for point in own]
            first.plot(counts, times, style, color=colors[arm], marker="o", ms=4, label=f"{arm}, {name}")
        found.plot(counts, [point.found for point in own], "-", color=colors[arm], marker="o", ms=4, label=arm)
    counts = sorted({point.agents for point in points})
    possible = [max(point.possible for point in points if point.agents == count) for count in counts]
    found.plot(counts, possible, "--", color="#c9ced3", label="possible")
    first.axhline(report["bound_s"], color="#c9ced3", lw=1)
    first.set(yscale="log", xlabel="agents", ylabel="time to first token, s")
    first.set_title("Returns: first token", loc="left")
    found.set(ylim=(0, 1.02), xlabel="agents", ylabel="share of the prompts' tokens")
    found.set_title("Returns: found, not computed", loc="left")
    for axes in (first, found):
        axes.set_xticks(counts)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
    figure.suptitle(f"{report['trace']}, {report['model']}; {where(report)}", fontsize=9)
    return figure
