"""Show results of quality.py as tables and as a plot. An arm is a setting or a baseline (EXACT), on an engine."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from manthan.benchmarks.arms import save_plot, where
from manthan.benchmarks.quality_answers import Agreement
from manthan.benchmarks.quality_settings import EXACT, LAST_BIT, LONG, RECOMPUTED

MARKERS = {"vllm": "o", "transformers": "D"}
FILLS = {"vllm": None, "transformers": "none"}
SHAPES = {"vllm": "●", "transformers": "◇"}


class Mean(NamedTuple):
    """Mean over pieces. error: standard error; None for a single piece."""

    mean: float
    error: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Mean":
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
        return cls(statistics.fmean(values), error)

    def text(self, digits: int, scale: float = 1) -> str:
        error = "" if self.error is None else f" ± {scale * self.error:.{digits}f}"
        return f"{scale * self.mean:.{digits}f}{error}"


@dataclass(frozen=True)
class Row:
    """Figures of an arm.

    nll: negative log-likelihood, nats per token. added: mean of a piece's `nll` less that of the exact arm. kl, top1:
    see `Figures`. tasks: recall by name of the task and length of the context. cosines: means for keys and for values,
    between exact and decoded vectors; None if not measured. storage: fields of `Storage`.
    """

    name: str
    nll: Mean
    added: Mean
    kl: Mean
    top1: Mean
    tasks: dict[tuple[str, int], Mean]
    answers: Agreement | None
    cosines: tuple[float, float] | None
    storage: dict[str, float | None]

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll.mean)


def rows(report: dict[str, Any], engine: str) -> list[Row]:
    """Return a row for each arm of the engine, in the order of the report, the exact arm first."""
    arms = report["arms"].get(engine, {})
    return [_row(name, arm, arms[EXACT]["pieces"]) for name, arm in arms.items()]


def _row(name: str, arm: dict[str, Any], exact: list[dict[str, Any]]) -> Row:
    pairs = list(zip(arm["pieces"], exact, strict=False))  # RECOMPUTED lacks tasks, which come last
    texts = [(found, base) for found, base in pairs if not found["task"]]
    tasks: dict[tuple[str, int], list[float]] = {}
    for found in arm["pieces"]:
        if found["task"]:
            tasks.setdefault((found["task"], found["context"]), []).append(found["recall"])
    coded = zip(arm.get("cosines", []), arm["pieces"], strict=False)  # only settings with Transformers have cosines
    cosines = [pair for pair, found in coded if not found["task"]]
    return Row(
        name,
        Mean.of([found["nll"] for found, _ in texts]),
        Mean.of([found["nll"] - base["nll"] for found, base in texts]),
        Mean.of([found["kl"] for found, _ in texts]),
        Mean.of([found["top1"] for found, _ in texts]),
        {which: Mean.of(found) for which, found in tasks.items()},
        Agreement.of(arm.get("answers", [])),
        (statistics.fmean(k for k, _ in cosines), statistics.fmean(v for _, v in cosines)) if cosines else None,
        arm["storage"],
    )


class Difference(NamedTuple):
    """Figures of an arm on vLLM less its figures with Transformers, mean over the text's pieces that both have."""

    name: str
    added: Mean
    kl: Mean


def differences(report: dict[str, Any]) -> list[Difference]:
    """Return a difference for each arm that both engines have, but the exact arm."""
    vllm, plain = (report["arms"].get(engine, {}) for engine in ("vllm", "transformers"))
    found = []
    for name in (name for name in vllm if name in plain and name != EXACT):
        added, kl = [], []
        parts = (vllm[name], vllm[EXACT], plain[name], plain[EXACT])
        for a, a0, b, b0 in zip(*(part["pieces"] for part in parts), strict=False):  # as in `_row`
            if not a["task"]:
                added.append(a["nll"] - a0["nll"] - b["nll"] + b0["nll"])
                kl.append(a["kl"] - b["kl"])
        found.append(Difference(name, Mean.of(added), Mean.of(kl)))
    return found


def summary(report: dict[str, Any]) -> dict[str, Any]:
    """Return the tables' figures as JSON, by engine and by arm."""
    return {
        engine: {
            row.name: {
                "perplexity": row.perplexity,
                **{name: getattr(row, name)._asdict() for name in ("nll", "added", "kl", "top1")},
                "tasks": {f"{task} {context}": found._asdict() for (task, context), found in row.tasks.items()},
                "answers": row.answers and row.answers._asdict(),
                "cosines": row.cosines,
                **row.storage,
            }
            for row in rows(report, engine)
        }
        for engine in report["arms"]
    }


def show(report: dict[str, Any], plot: Path, console: Console) -> None:
    """Print tables of the results, and draw the plot."""
    console.print(where(report), soft_wrap=True)
    console.print(_measured_on(report), soft_wrap=True)
    if report["arms"]:
        console.print(_sizes(report))
    for engine in report["arms"]:
        console.print(_table(report, engine))
        for table in (_tasks(report, engine), _answers(report, engine)):
            if table.columns[1:]:
                console.print(table)
    if found := differences(report):
        console.print(_agreement(found))
    if report["arms"]:
        save_plot(draw, report, plot, console)


def _measured_on(report: dict[str, Any]) -> str:
    arguments, pieces = report["arguments"], next(iter(report["arms"].values()), {EXACT: {"pieces": []}})
    texts = sum(not found["task"] for found in pieces[EXACT]["pieces"])
    tasks = len(pieces[EXACT]["pieces"]) - texts
    return (
        f"{arguments['model']}: {texts} pieces of {arguments['text'] or 'its own text'} and {tasks} of tasks, "
        f"{arguments['prefix']} tokens of prefix, {arguments['continuation']} of continuation, blocks of "
        f"{report['block_size']}"
    )


def _table(report: dict[str, Any], engine: str) -> Table:
    found = rows(report, engine)
    caption = f"± standard error over pieces; KL over {report['kl'][engine]}"
    table = Table(title=f"What compression costs: {engine}", caption=caption, box=SIMPLE)
    _columns(table, "perplexity", "NLL added", "KL", "same top 1, %")
    if any(row.cosines for row in found):
        _columns(table, "cos K", "cos V", first=False)
    for row in found:
        costs = (row.added.text(4), row.kl.text(4), row.top1.text(1, 100)) if row.name != EXACT else ("", "", "")
        table.add_row(row.name, f"{row.perplexity:.3f}", *costs, *(f"{cosine:.4f}" for cosine in row.cosines or ()))
    return table


def _tasks(report: dict[str, Any], engine: str) -> Table:
    """Return a table with mean recall for each task and for each context length; without columns if there are none."""
    found = [row for row in rows(report, engine) if row.tasks]
    table = Table(title=f"Right tokens of the answers, %: {engine}", box=SIMPLE)
    if not found:
        return table
    tasks, lengths = (list(dict.fromkeys(which[i] for which in found[0].tasks)) for i in (0, 1))
    _columns(table, *tasks, *(f"at {length:,}" for length in lengths))
    for row in found:
        means = [
            statistics.fmean(mean.mean for which, mean in row.tasks.items() if wanted in which)
            for wanted in (*tasks, *lengths)
        ]
        table.add_row(row.name, *(f"{100 * mean:.1f}" for mean in means))
    return table


def _answers(report: dict[str, Any], engine: str) -> Table:
    """Return the table of chats; without columns if there are none."""
    table = Table(title=f"Greedy answers: {engine}", box=SIMPLE)
    if found := [row for row in rows(report, engine) if row.answers]:
        _columns(table, "same answers", "alike up to")
        for row in found:
            assert row.answers is not None
            table.add_row(row.name, f"{row.answers.same} of {row.answers.answers}", f"{row.answers.share:.2f}")
    return table


def _sizes(report: dict[str, Any]) -> Table:
    tokens = report["arguments"]["prefix"]
    table = Table(title=f"What a prefix of {tokens:,} tokens takes, headers and exact tokens counted", box=SIMPLE)
    _columns(table, "bits a number", "bytes a token", "times smaller than bf16", f"ratio at {LONG:,} tokens")
    for row in rows(report, next(iter(report["arms"]))):
        size = row.storage
        ratios = (f"{size[name]:.2f}" if size[name] else "" for name in ("ratio", "ratio_long"))
        table.add_row(row.name, f"{size['bits']:.2f}", f"{size['bytes_per_token']:,.0f}", *ratios)
    return table


def _columns(table: Table, *headers: str, first: bool = True) -> None:
    """Add a column for each header. first: True to add a column of names before them."""
    if first:
        table.add_column("", no_wrap=True)
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)


def _agreement(found: list[Difference]) -> Table:
    table = Table(title="vLLM less Transformers, of the same pieces", box=SIMPLE)
    _columns(table, "NLL added", "KL")
    for row in found:
        table.add_row(row.name, row.added.text(4), row.kl.text(4))
    return table


# -- the plot -------------------------------------------------------------------------------------------


def draw(report: dict[str, Any]) -> Any:
    """Return a figure of added NLL and of KL against bits per number, with standard errors. A setting has a color."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5.5), layout="constrained")
    axes = figure.subplots(1, 2)
    settings = [
        row.name for row in rows(report, next(iter(report["arms"]))) if row.name not in (EXACT, RECOMPUTED, LAST_BIT)
    ]
    colors = dict(zip(settings, _colors(len(settings)), strict=True))
    for number, engine in enumerate(report["arms"]):
        for row in rows(report, engine):
            if row.name in colors:
                look = {"marker": MARKERS[engine], "color": colors[row.name], "markerfacecolor": FILLS[engine]}
                bits, label = row.storage["bits"], row.name if number == 0 else None
                _point(axes[0], bits, row.added, label, look)
                _point(axes[1], bits, row.kl, None, look)
    axes[0].axhline(0, color="#9aa5b1", linewidth=0.8)
    for engine in report["arms"]:
        for row in rows(report, engine):
            if row.name == LAST_BIT and row.kl.mean > 0:
                axes[1].axhline(row.kl.mean, color="#9aa5b1", linewidth=0.8, linestyle=":", label=LAST_BIT)
    axes[0].set_yscale("symlog", linthresh=2e-3)
    axes[1].set_yscale("log")
    for panel, title in zip(axes, ("NLL added, nats a token", "KL from exact, nats a token"), strict=True):
        panel.set_title(title, loc="left")
        panel.set_xlabel("bits a number, all that is stored counted")
        panel.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8, title=", ".join(f"{SHAPES[on]} {on}" for on in report["arms"]))
    figure.suptitle(f"{_measured_on(report)}\n{where(report)}", fontsize=9)
    return figure


def _colors(count: int) -> list[Any]:
    import matplotlib

    colors = matplotlib.colormaps["tab20" if count > 10 else "tab10"].colors
    return [colors[number % len(colors)] for number in range(count)]


def _point(axes: Any, bits: float, value: Mean, label: str | None, look: dict[str, Any]) -> None:
    """Draw a point with an error bar. look: marker and colors; markerfacecolor None fills the marker with `color`."""
    if look["markerfacecolor"] is None:
        look = look | {"markerfacecolor": look["color"]}
    axes.errorbar(bits, value.mean, yerr=value.error, label=label, linestyle="", capsize=3, markersize=6, **look)
