"""What prefetch.py found, as a table and as a plot."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from manthan.benchmarks.arms import save_plot, where
from manthan.benchmarks.redis_report import Row, draw_bars, spread_table

RECOMPUTE = "recompute"
KINDS = (RECOMPUTE, "restore", "prefetch", "hot")
RATIOS = (("restore", RECOMPUTE), ("prefetch", "restore"), ("prefetch", "hot"))


def show(report: dict[str, Any], plot: Path, console: Console) -> None:
    """The table of what was measured, and the plot."""
    console.print(where(report), soft_wrap=True)
    if rows(report):
        console.print(table(report))
        save_plot(draw, report, plot, console)


def counted(report: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Returns by kind; the first of each warmed up and does not count."""
    found = {kind: returns for arm in report["arms"].values() for kind, returns in arm.items() if kind in KINDS}
    return {kind: found[kind][1:] for kind in KINDS if kind in found}


def rows(report: dict[str, Any]) -> list[Row]:
    return [Row(kind, [answer["ttft_s"] * 1e3 for answer in returns]) for kind, returns in counted(report).items()]


def ratios(found: Sequence[Row]) -> dict[str, float]:
    median = {row.name: row.median for row in found}
    return {f"{a} / {b}": median[a] / median[b] for a, b in RATIOS if a in median and b in median}


def saved_ms(report: dict[str, Any]) -> Row | None:
    """What each prefetch saved beside the restore of the same session before it."""
    returns = counted(report)
    if "prefetch" not in returns:
        return None
    pairs = zip(returns["restore"], returns["prefetch"], strict=True)
    return Row("saved", [(restored["ttft_s"] - prefetched["ttft_s"]) * 1e3 for restored, prefetched in pairs])


def table(report: dict[str, Any]) -> Any:
    found, returns = rows(report), counted(report)
    captions = [",  ".join(f"{name} = {ratio:.2f}" for name, ratio in ratios(found).items())]
    if (saved := saved_ms(report)) is not None:
        low, high = saved.quartiles
        captions.append(f"a prefetch saved {saved.median:.1f} ms of a restore ({low:.1f} to {high:.1f}), pair by pair")
    extra = {
        "tokens not computed": [str(min(answer["cached_tokens"] for answer in returns[row.name])) for row in found]
    }
    if not report["arguments"]["made_up"]:
        extra["right answers"] = [
            f"{sum(answer['right'] for answer in returns[row.name])} of {len(row.samples)}" for row in found
        ]
    return spread_table(_title(report), "\n".join(captions), "ms", found, extra)


def draw(report: dict[str, Any]) -> Any:
    """Bars for each kind of return."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    draw_bars(figure.subplots(), rows(report), "ms", _title(report))
    figure.suptitle(where(report), fontsize=9)
    return figure


def _title(report: dict[str, Any]) -> str:
    return f"A session of {report['arguments']['tokens']:,} tokens returns: time to first token"
