"""What the soak found, as tables and as a plot of memory over time."""

from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from manthan.benchmarks.arms import save_plot, where

MIB = 2**20


def total(report: dict[str, Any], what: str) -> int:
    return sum(kind.get(what, 0) for kind in report["kinds"].values())


def failed(report: dict[str, Any]) -> list[str]:
    """What is not as it should be, a sentence each."""
    left = report["left"]
    wrong = {
        f"{total(report, 'errors')} requests failed": total(report, "errors"),
        f"{total(report, 'misled')} answers were wrong that are right when computed anew": total(report, "misled"),
        f"{left['pool_in_use']:.1%} of the pool is still in use": left["pool_in_use"],
        f"{left['sessions_not_cold']:.0f} sessions are not cold": left["sessions_not_cold"],
        "the cold store is over its budget": left["cold_bytes"] > left["cold_budget_bytes"],
    }
    return [sentence for sentence, is_so in wrong.items() if is_so]


def show(report: dict[str, Any], plot: Path, console: Console) -> None:
    """Tables, what is wrong, and the plot."""
    console.print(where(report), soft_wrap=True)
    console.print(requests_table(report))
    for line in summary(report):
        console.print(f"  {line}", soft_wrap=True)
    for message in report["messages"]:
        console.print(f"  {message}", style="red", markup=False, soft_wrap=True)
    for sentence in failed(report):
        console.print(f"  FAILED: {sentence}", style="red", soft_wrap=True)
    save_plot(draw, report, plot, console)


def requests_table(report: dict[str, Any]) -> Table:
    title = f"Rounds: {report['rounds']}, in {report['seconds'] / 60:.1f} min: {report['model']}"
    table = Table(title=title, box=SIMPLE)
    table.add_column("")
    for header in (
        "requests",
        "tokens\ngenerated",
        "prompt tokens\nnot computed",
        "errors",
        "answers\nchecked",
        "wrong",
        "right if\ncomputed anew",
    ):
        table.add_column(header, justify="right")
    for name, kind in [*report["kinds"].items(), ("all", None)]:
        counts = {what: total(report, what) if kind is None else kind.get(what, 0) for what in WHAT}
        share = f"{counts['cached'] / counts['prompt']:.0%}" if counts["prompt"] else ""
        numbers = (f"{counts[what]:,}" for what in ("errors", "checked", "wrong", "misled"))
        table.add_row(name, f"{counts['requests']:,}", f"{counts['tokens']:,}", share, *numbers)
    return table


WHAT = ("requests", "tokens", "prompt", "cached", "errors", "checked", "wrong", "misled")


def summary(report: dict[str, Any]) -> list[str]:
    """What Manthan did, what is left, and memory."""
    manthan, left, lines = report["manthan"], report["left"], []
    if manthan:
        names = (
            "evictions",
            "restores",
            "prefetches",
            "encoded_blocks",
            "restored_blocks",
            "dropped_blocks",
            "failures",
        )
        counts = (f"{manthan.get(f'vllm:manthan_{name}_total', 0):,.0f} {name.replace('_', ' ')}" for name in names)
        lines.append(f"Manthan: {', '.join(counts)}")
    lines.append(
        f"Left when all is quiet: {left['pool_in_use']:.1%} of the pool, {left['sessions_not_cold']:.0f} sessions that "
        f"are not cold; codes {left['cold_bytes'] / MIB:.1f} of {left['cold_budget_bytes'] / MIB:.1f} MiB"
    )
    rss = [nbytes / MIB for _, nbytes, _ in report["memory"]]
    lines.append(
        f"Resident memory of all processes: first {rss[0]:,.0f}, most {max(rss):,.0f}, last {rss[-1]:,.0f} MiB"
    )
    if report["slope"]:
        rate, error = report["slope"]
        lines.append(f"It grows by {rate:,.1f} MiB an hour after the warm-up (standard error {error:,.1f})")
    return lines


def draw(report: dict[str, Any]) -> Any:
    """Resident memory over time, with the fitted line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    axes = figure.subplots()
    minutes = [seconds / 60 for seconds, _, _ in report["memory"]]
    rss = [nbytes / MIB for _, nbytes, _ in report["memory"]]
    axes.plot(minutes, rss, color="#2f6db5", lw=1.2, label="RSS, all processes of the server")
    warm_up = report["arguments"]["warm_up"] / 60
    late = [(minute, size) for minute, size in zip(minutes, rss, strict=True) if minute >= warm_up]
    if report["slope"] and late:
        rate, error = report["slope"]
        middle, mean = (sum(column) / len(late) for column in zip(*late, strict=True))
        ends = late[0][0], late[-1][0]
        fit = [mean + rate / 60 * (minute - middle) for minute in ends]
        axes.plot(ends, fit, "--", color="#d1663b", label=f"{rate:+,.1f} ± {error:,.1f} MiB an hour after the warm-up")
    axes.set(ylim=(0, 1.15 * max(rss)), xlabel="minutes", ylabel="MiB")
    requests, tokens, errors = (total(report, what) for what in ("requests", "tokens", "errors"))
    axes.set_title(f"{requests:,} requests, {tokens:,} tokens, {errors} errors", loc="left")
    axes.legend(frameon=False, loc="lower right")
    axes.grid(alpha=0.3)
    figure.suptitle(where(report), fontsize=9)
    return figure
