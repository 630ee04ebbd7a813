"""Results of the capacity benchmark, as tables and as a plot; several reports can be merged.

An arm is a measured system, such as plain vLLM. A run is an arm with a budget of memory. The `levels` of a run are
rounds with more and more sessions: all come, then each returns. On return, at most 5% of a kept session is computed.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ByteSize
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from manthan.benchmarks.arms import merge_reports, save_plot, where

PLAIN = "plain"
RECOMPUTED_SHARE = 0.01
QUANTILES = (0.50, 0.95, 0.99)
COLORS = ("#2f6db5", "#d1663b", "#4a9a5b", "#8a5fb0", "#b8892b", "#3aa3a8")
GREYS = ("#6b7580", "#a3acb5")


@dataclass(frozen=True)
class Found:
    """Results of a run. budget: 0 for a server started by the user. split: bytes of the pool, and outside the pool.

    came, kept: numbers of sessions in the round that kept most. nbytes: of a kept session, compressed or bf16. kept_ms,
    recomputed_ms: times to first token of kept sessions' returns, and of returns that found at most RECOMPUTED_SHARE of
    their tokens. right: number of right answers, of `asked` checked answers. failures: number of blocks that could not
    be stored or restored while sessions returned. divergence: upper bound of the mean KL divergence in nats for kept
    sessions' blocks outside the pool, or NaN.
    """

    arm: str
    budget: int
    split: tuple[int, int]
    came: int
    kept: int
    nbytes: float
    kept_ms: Sequence[float]
    recomputed_ms: Sequence[float]
    right: int
    asked: int
    failures: float
    divergence: float = math.nan

    @classmethod
    def of(cls, run: dict[str, Any]) -> "Found":
        """Return the results of a run: returns and failures of all rounds, the rest from the round that kept most."""
        best = max(run["levels"], key=lambda level: level["kept"])
        returns = [found for level in run["levels"] for found in level["returns"]]
        answered = [found["is_right"] for found in returns if found["is_right"] is not None]
        again = [found for found in returns if found["cached_tokens"] <= RECOMPUTED_SHARE * found["prompt_tokens"]]
        return cls(
            run["arm"],
            run["budget"] or 0,
            (run.get("pool_bytes", 0), run.get("store_bytes", 0)),
            best["came"],
            best["kept"],
            _session_nbytes(run, best),
            [found["ttft_s"] * 1e3 for found in returns if found["kept"]],
            [found["ttft_s"] * 1e3 for found in again],
            sum(answered),
            len(answered),
            sum(level["failures"] for level in run["levels"]),
            math.nan if (told := best.get("held", {}).get("divergence")) is None else told,
        )


def _session_nbytes(run: dict[str, Any], level: dict[str, Any]) -> float:
    """Return a kept session's bytes: in Manthan's store, or else of its full blocks as bf16; NaN if unknown."""
    if level["cold_bytes"]:
        return float(level["cold_bytes"] / max(1, level["kept"]))
    if not run["budget"]:
        return math.nan
    blocks = statistics.median(found["prompt_tokens"] // run["block_size"] for found in level["returns"])
    return float(blocks * run["pool_bytes"] / run["pool_blocks"])


def quantile(times: Sequence[float], share: float) -> float:
    return float(np.quantile(times, share)) if times else math.nan


def found_in(report: dict[str, Any]) -> list[Found]:
    return sorted(map(Found.of, report["runs"]), key=lambda found: found.budget)


def gains(found: Sequence[Found]) -> dict[tuple[str, int], float]:
    """Return the number of kept sessions divided by plain vLLM's with the same budget, by arm and budget."""
    plain = {one.budget: one.kept for one in found if one.arm == PLAIN}
    return {(one.arm, one.budget): one.kept / plain[one.budget] for one in found if plain.get(one.budget)}


def merged(files: Sequence[Path]) -> dict[str, Any]:
    """Return one report of several; see merge_reports."""
    return merge_reports(files, "capacity", ("model", "tokens"), lambda run: (run["arm"], run["budget"]))


# -- shown ----------------------------------------------------------------------------------------------


def show(report: dict[str, Any], plot: Path, console: Console) -> None:
    """Print the table of the results, and draw the plot."""
    console.print(where(report), soft_wrap=True)
    found = found_in(report)
    if not found:
        return
    console.print(make_table(report, found))
    if any(run.get("held") for run in report["runs"]):
        console.print(where_table(report))
    if any(one.failures for one in found):
        console.print("  Some blocks could not be stored or restored: see `failures` in the JSON.", style="red")
    save_plot(lambda _: draw(report, found), report, plot, console)


def make_table(report: dict[str, Any], found: Sequence[Found]) -> Table:
    table = Table(title=f"Sessions of {report['tokens']:,} tokens of {report['model']} that return", box=SIMPLE)
    table.add_column("memory", justify="right")
    table.add_column("")
    table.add_column("pool + store", justify="right")
    for header in ("came", "kept", "× plain", "MiB\na session", "first token, kept\np50 / p95 / p99, ms"):
        table.add_column(header, justify="right")
    diverges = not all(math.isnan(one.divergence) for one in found)
    for header in ("recomputed\np50, ms", "right\nanswers", *["diverges\nat most, nats"] * diverges):
        table.add_column(header, justify="right")
    ratio = gains(found)
    for one in found:
        gain = ratio.get((one.arm, one.budget))
        table.add_row(
            _size(one.budget),
            one.arm,
            " + ".join(_size(nbytes) for nbytes in one.split if nbytes),
            str(one.came),
            str(one.kept),
            f"{gain:.2f}" if gain else "",
            _number(one.nbytes / 2**20, 2),
            " / ".join(_number(quantile(one.kept_ms, share), 0) for share in QUANTILES),
            _number(quantile(one.recomputed_ms, 0.5), 0),
            f"{one.right} of {one.asked}" if one.asked else "",
            *[_number(one.divergence, 4)] * diverges,
        )
    return table


def where_table(report: dict[str, Any]) -> Table:
    """Return a table of where KV is, with up to three lines for each run of an arm with Manthan.

    The first line is the last round, before any session returned. The other lines are of a further round, with as many
    sessions as that KV is enough for: before any session returned, and after each returned once.
    """
    table = Table(title="Where KV is, MiB of bf16 (sessions)", box=SIMPLE, pad_edge=False, collapse_padding=True)
    table.caption = "An arm's first line is its last round; the others are of a further round, with as many sessions "
    table.caption += "as that KV is enough for: before any returned, and after each returned once."
    for header in ("memory", "", "came", "returned"):
        table.add_column(header, justify="right" if header in ("memory", "came") else "left")
    for header in (
        "computed,\nin the pool",
        "compressed,\nin the tier",
        "in both",
        "in either",
        "found at\nnext return",
    ):
        table.add_column(header, justify="right")
    table.add_column("decoded,\nin the pool", justify="right")
    for run in sorted(report["runs"], key=lambda run: run["budget"] or 0):
        for returned, moment in zip(("none", "none", "each once"), run.get("held", ()), strict=False):
            mib = run["pool_bytes"] / run["pool_blocks"] / 2**20
            held = moment | {"all": moment["computed"] + moment["saved"] - moment["both"]}
            computed, saved, both, every, decoded = (
                f"{held[what] * mib:,.1f} ({held[what] / held['session_blocks']:.1f})"
                for what in ("computed", "saved", "both", "all", "decoded")
            )
            came, kept = str(moment["came"]), str(moment["kept"])
            table.add_row(_size(run["budget"]), run["arm"], came, returned, computed, saved, both, every, kept, decoded)
    return table


def _number(value: float, digits: int) -> str:
    return "" if math.isnan(value) else f"{value:,.{digits}f}"


def _size(nbytes: int) -> str:
    return ByteSize(nbytes).human_readable() if nbytes else ""


# -- plotted --------------------------------------------------------------------------------------------


def draw(report: dict[str, Any], found: Sequence[Found]) -> Any:
    """Draw kept sessions by budget, or if no budget is known by sessions that came. Draw the returns' times too."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5), layout="constrained")
    kept, latency = figure.subplots(1, 2)
    arms = list(dict.fromkeys(one.arm for one in found))
    colors = dict(zip((arm for arm in arms if not _is_vllm(arm)), COLORS * len(arms), strict=False))
    colors |= dict(zip((arm for arm in arms if _is_vllm(arm)), GREYS * len(arms), strict=False))
    if any(one.budget for one in found):
        _draw_budgets(kept, found, colors)
    else:
        _draw_levels(kept, report["runs"])
    _draw_latency(latency, found, colors)
    figure.suptitle(f"{report['tokens']:,} tokens of {report['model']} a session; {where(report)}", fontsize=9)
    return figure


def _is_vllm(arm: str) -> bool:
    return arm in (PLAIN, "offload")


def _draw_budgets(axes: Any, found: Sequence[Found], colors: dict[str, str]) -> None:
    unit, name = (2**30, "GiB") if max(one.budget for one in found) >= 2**32 else (2**20, "MiB")
    ratio = gains(found)
    for arm, color in colors.items():
        points = [one for one in found if one.arm == arm]
        axes.plot([one.budget / unit for one in points], [one.kept for one in points], "o-", color=color, label=arm)
        for one in points:
            gain = ratio.get((arm, one.budget))
            text = f"{one.kept}" + (f" ({gain:.1f}×)" if gain and arm != PLAIN else "")
            axes.annotate(
                text, (one.budget / unit, one.kept), (0, 6), textcoords="offset points", ha="right", fontsize=8
            )
    top, right = max(one.kept for one in found), max(one.budget for one in found) / unit
    axes.set(xlim=(0, 1.06 * right), ylim=(0, 1.12 * top + 1))
    axes.set_xlabel(f"memory for KV: pool, and compressed blocks or offload, {name}")
    axes.set_ylabel("sessions that return with at least 95% not recomputed")
    axes.set_title("Sessions kept", loc="left")
    axes.legend(frameon=False, loc="upper left")
    axes.grid(alpha=0.3)


def _draw_levels(axes: Any, runs: Sequence[dict[str, Any]]) -> None:
    for run in runs:
        came, kept = ([level[what] for level in run["levels"]] for what in ("came", "kept"))
        axes.plot(came, kept, "o-", color=COLORS[0], label=run["arm"])
        axes.plot([0, max(came)], [0, max(came)], ":", color=GREYS[0], label="all that came")
    axes.set(xlim=(0, None), ylim=(0, None), xlabel="sessions that came")
    axes.set_ylabel("sessions that return with at least 95% not recomputed")
    axes.set_title("Sessions kept", loc="left")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)


def _draw_latency(axes: Any, found: Sequence[Found], colors: dict[str, str]) -> None:
    """Draw p50, p95 and p99 of each arm's kept returns, and of recomputed returns of plain vLLM or of the only arm."""
    rows = {arm: [ms for one in found if one.arm == arm for ms in one.kept_ms] for arm in colors}
    again = [ms for one in found if one.arm == PLAIN or len(rows) == 1 for ms in one.recomputed_ms]
    rows |= {"recomputed": again}
    names = [name for name, times in rows.items() if times]
    for height, name in enumerate(names):
        spread = [quantile(rows[name], share) for share in QUANTILES]
        color = colors.get(name, "#444444")
        axes.plot([spread[0], spread[-1]], [height, height], color=color, lw=2)
        for value, marker, share in zip(spread, "o|D", QUANTILES, strict=True):
            label = f"p{share * 100:.0f}" if height == 0 else None
            axes.plot(value, height, marker, color=color, ms=9 if marker == "|" else 6, mew=2, label=label)
        axes.annotate(f"{spread[0]:,.0f} ms", (spread[0], height), (0, 8), textcoords="offset points", fontsize=8)
    axes.set_yticks(range(len(names)), [f"{name}\n({len(rows[name])} returns)" for name in names])
    axes.set(xlim=(0, None), ylim=(len(names) - 0.5, -0.7), xlabel="time to first token on return, ms")
    axes.set_title("Returns: p50, p95, p99", loc="left")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3, axis="x")
