"""Results of the benchmark of scale: a table, the goals, and a picture."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from manthan.benchmarks.arms import save_plot
from manthan.benchmarks.capacity_report import COLORS
from manthan.benchmarks.capacity_report import quantile as share_of

SHARES = {"p50": 0.5, "p99": 0.99, "max": 1.0}


class Goal(NamedTuple):
    """Bound on a figure of a run. what: name of the figure. is_least: True if figures from `bound` up meet the goal.

    at, tokens: number of sessions, and tokens of each session, in the runs that must meet the goal.
    """

    what: str
    figure: Callable[[dict[str, Any]], float]
    bound: float
    is_least: bool = False
    at: int = 100_000
    tokens: int = 8192

    def is_met(self, run: dict[str, Any]) -> bool:
        """True if the run's figure is within the bound."""
        found = self.figure(run)
        return found >= self.bound if self.is_least else found <= self.bound


def quantile(values: Sequence[float], name: str) -> float:
    """Return p50, p99 or max of values."""
    return share_of(values, SHARES[name])


def collection_ms(run: dict[str, Any]) -> Iterator[float]:
    return (repeat["collection_ms"] for repeat in run["repeats"])


def step_us(run: dict[str, Any], name: str) -> Iterator[float]:
    return (repeat["step_us"][name] for repeat in run["repeats"])


def request_us(run: dict[str, Any]) -> Iterator[float]:
    return (repeat["request_us"]["p50"] for repeat in run["repeats"])


def requests_a_second(run: dict[str, Any]) -> Iterator[float]:
    return (repeat["requests_a_second"] for repeat in run["repeats"])


GOALS = (
    Goal("a full collection, ms", lambda run: min(collection_ms(run)), 20),
    Goal("a step, p99, µs", lambda run: min(step_us(run, "p99")), 200),
    Goal("bytes a block", lambda run: run["block_nbytes"], 200),
    Goal("tracked objects a block", lambda run: round(run["objects_a_block"], 3), 0),
    Goal("requests a second", lambda run: max(requests_a_second(run)), 1000, is_least=True),
)


def show(report: dict[str, Any], plot: Path, console: Console) -> None:
    """Print the table and the goals, and draw the plot."""
    machine = report["machine"]
    console.print(
        f"{machine['cpu']} ({machine['cores']} cores, load {machine['load']}), Python {machine['python']}; policy "
        f"{report['arguments']['policy']}, {report['arguments']['running']} requests at a time; ranges of "
        f"{report['arguments']['repeats']} measurements, least to most",
        soft_wrap=True,
    )
    console.print(make_table(report["runs"]))
    for line in said(report["runs"]):
        console.print(f"  {line}", soft_wrap=True)
    save_plot(draw, report, plot, console)


def make_table(runs: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    columns = ("sessions", "tokens", "collection, ms", "step p50, µs", "step p99, µs", "request, µs", "requests/s")
    for column in (*columns, "bytes/block", "objects/session", "longest, ms"):
        table.add_column(column, justify="right")
    for run in runs:
        table.add_row(
            f"{run['sessions']:,}",
            f"{run['tokens']:,}",
            _spread(collection_ms(run)),
            _spread(step_us(run, "p50")),
            _spread(step_us(run, "p99")),
            _spread(request_us(run)),
            _spread(requests_a_second(run)),
            f"{run['block_nbytes']:.0f}",
            f"{run['objects_a_session']:.2f}",
            f"{run['longest_ms']:,.0f}",
        )
    return table


def _spread(values: Iterator[float]) -> str:
    found = sorted(values)
    digits = 1 if found[0] < 20 else 0
    return f"{found[0]:,.{digits}f}-{found[-1]:,.{digits}f}"


def said(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line, met or missed, for each goal whose number of sessions and tokens was measured."""
    lines = []
    for goal in GOALS:
        for run in runs:
            if (run["sessions"], run["tokens"]) == (goal.at, goal.tokens):
                bound = f"at {'least' if goal.is_least else 'most'} {goal.bound:g}"
                word = "met" if goal.is_met(run) else "missed"
                lines.append(f"{goal.what}: {goal.figure(run):,.4g} (wanted: {bound}) {word}")
    return lines


def draw(report: dict[str, Any]) -> Any:
    """Draw times against the number of sessions, both on logarithmic axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    runs = report["runs"]
    lines: dict[str, Callable[[dict[str, Any]], list[float]]] = {
        "full collection": lambda run: [1e3 * each for each in collection_ms(run)],
        "request, p50": lambda run: list(request_us(run)),
        "step, p99": lambda run: list(step_us(run, "p99")),
        "step, p50": lambda run: list(step_us(run, "p50")),
    }
    counts = [run["sessions"] for run in runs]
    for (label, values), color in zip(lines.items(), COLORS, strict=False):
        least, most = [min(values(run)) for run in runs], [max(values(run)) for run in runs]
        axes.plot(counts, least, "-", color=color, marker="o", ms=4, label=label)
        axes.fill_between(counts, least, most, color=color, alpha=0.15, lw=0)
    axes.set(xscale="log", yscale="log", xlabel="sessions", ylabel="µs of one core")
    tokens = ", ".join(f"{run['sessions']:,} of {run['tokens']:,}" for run in runs)
    axes.set_title(f"Cost against sessions ({tokens} tokens)", loc="left", fontsize=8)
    axes.grid(alpha=0.3, which="both")
    axes.legend(frameon=False, fontsize=8)
    return figure
