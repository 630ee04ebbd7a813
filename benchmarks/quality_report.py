"""What quality.py found, as tables and as a plot."""

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
from manthan.benchmarks.quality_settings import EXACT

MARKERS = {"vllm": "o", "transformers": "D"}


class Mean(NamedTuple):
    """Over pieces, with its standard error; None of a single piece."""

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
    """One setting on one engine. added: nats per token more than after the exact prefix, paired piece by piece."""

    name: str
    nll: Mean
    added: Mean
    kl: Mean
    top1: Mean
    recall: Mean | None
    cosines: tuple[float, float] | None
    storage: dict[str, float]

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll.mean)


def rows(report: dict[str, Any], engine: str) -> list[Row]:
    """Of each setting, in the order of the report; exact first."""
    arms = report["arms"].get(engine, {})
    return [_row(name, arm, arms[EXACT]["pieces"]) for name, arm in arms.items()]


def _row(name: str, arm: dict[str, Any], exact: list[dict[str, Any]]) -> Row:
    texts = [(found, base) for found, base in zip(arm["pieces"], exact, strict=True) if found["recall"] is None]
    recalls = [found["recall"] for found in arm["pieces"] if found["recall"] is not None]
    pairs = zip(arm.get("cosines", []), arm["pieces"], strict=False)  # exact KV has no cosines
    cosines = [pair for pair, found in pairs if found["recall"] is None]
    return Row(
        name,
        Mean.of([found["nll"] for found, _ in texts]),
        Mean.of([found["nll"] - base["nll"] for found, base in texts]),
        Mean.of([found["kl"] for found, _ in texts]),
        Mean.of([found["top1"] for found, _ in texts]),
        Mean.of(recalls) if recalls else None,
        (statistics.fmean(k for k, _ in cosines), statistics.fmean(v for _, v in cosines)) if cosines else None,
        arm["storage"],
    )


class Difference(NamedTuple):
    """What one engine says less what the other says, both of the same pieces."""

    name: str
    added: Mean
    kl: Mean


def differences(report: dict[str, Any]) -> list[Difference]:
    """vLLM's figures less Transformers', of each setting that both have."""
    vllm, plain = (report["arms"].get(engine, {}) for engine in ("vllm", "transformers"))
    found = []
    for name in (name for name in vllm if name in plain and name != EXACT):
        added, kl = [], []
        parts = (vllm[name], vllm[EXACT], plain[name], plain[EXACT])
        for a, a0, b, b0 in zip(*(part["pieces"] for part in parts), strict=True):
            if a["recall"] is None:
                added.append(a["nll"] - a0["nll"] - b["nll"] + b0["nll"])
                kl.append(a["kl"] - b["kl"])
        found.append(Difference(name, Mean.of(added), Mean.of(kl)))
    return found


def summary(report: dict[str, Any]) -> dict[str, Any]:
    """The figures of the tables as plain numbers."""
    return {
        engine: {
            row.name: {
                "perplexity": row.perplexity,
                **{name: getattr(row, name)._asdict() for name in ("nll", "added", "kl", "top1")},
                "recall": row.recall and row.recall._asdict(),
                "cosines": row.cosines,
                **row.storage,
            }
            for row in rows(report, engine)
        }
        for engine in report["arms"]
    }


def show(report: dict[str, Any], plot: Path, console: Console) -> None:
    """Tables of what was measured, and the plot."""
    console.print(where(report), soft_wrap=True)
    console.print(_measured_on(report), soft_wrap=True)
    for engine in report["arms"]:
        console.print(_table(report, engine))
    if found := differences(report):
        console.print(_agreement(found))
    if report["arms"]:
        save_plot(draw, report, plot, console)


def _measured_on(report: dict[str, Any]) -> str:
    arguments, pieces = report["arguments"], next(iter(report["arms"].values()), {EXACT: {"pieces": []}})
    tables = sum(found["recall"] is not None for found in pieces[EXACT]["pieces"])
    texts = len(pieces[EXACT]["pieces"]) - tables
    return (
        f"{arguments['model']}: {texts} pieces of {arguments['text'] or 'the text it brings'} and {tables} tables, "
        f"{arguments['prefix']} tokens of prefix, {arguments['continuation']} of continuation, blocks of "
        f"{report['block_size']}"
    )


def _table(report: dict[str, Any], engine: str) -> Table:
    caption = f"± standard error over pieces; KL over {report['kl'][engine]}; sizes are those of the prefix"
    table = Table(
        title=f"What compression costs: {engine}", caption=caption, box=SIMPLE, pad_edge=False, padding=(0, 0, 0, 2)
    )
    table.add_column("", no_wrap=True)
    headers = ("bits", "B/token", "ratio", "PPL", "NLL added", "KL", "top 1, %", "recall, %", "cos K", "cos V")
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)
    for row in rows(report, engine):
        size = row.storage
        table.add_row(
            row.name,
            f"{size['bits']:.2f}",
            f"{size['bytes_per_token']:,.0f}",
            f"{size['ratio']:.2f}",
            f"{row.perplexity:.3f}",
            "" if row.name == EXACT else row.added.text(4),
            "" if row.name == EXACT else row.kl.text(4),
            "" if row.name == EXACT else row.top1.text(1, 100),
            f"{100 * row.recall.mean:.1f}" if row.recall else "",
            *(f"{cosine:.4f}" for cosine in row.cosines or ()),
        )
    return table


def _agreement(found: list[Difference]) -> Table:
    table = Table(title="vLLM less Transformers, of the same pieces", box=SIMPLE)
    table.add_column("")
    for header in ("NLL added", "KL"):
        table.add_column(header, justify="right")
    for row in found:
        table.add_row(row.name, row.added.text(4), row.kl.text(4))
    return table


# -- the plot -------------------------------------------------------------------------------------------


def draw(report: dict[str, Any]) -> Any:
    """NLL added and KL over the bits of a number, with standard errors."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5.5), layout="constrained")
    axes = figure.subplots(1, 2)
    names = list(dict.fromkeys(row.name for engine in report["arms"] for row in rows(report, engine)))
    for engine in report["arms"]:
        for row in rows(report, engine):
            if row.name != EXACT:
                color = f"C{names.index(row.name) % 10}"
                _point(axes[0], row.storage["bits"], row.added, engine, color, f"{row.name}, {engine}")
                _point(axes[1], row.storage["bits"], row.kl, engine, color, None)
    axes[0].axhline(0, color="#9aa5b1", linewidth=0.8)
    axes[0].set_yscale("symlog", linthresh=1e-3)
    axes[1].set_yscale("log")
    for panel, title in zip(axes, ("NLL added, nats a token", "KL from exact, nats a token"), strict=True):
        panel.set_title(title, loc="left")
        panel.set_xlabel("bits a number, all that is stored counted")
        panel.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    figure.suptitle(f"{_measured_on(report)}\n{where(report)}", fontsize=9)
    return figure


def _point(axes: Any, bits: float, value: Mean, engine: str, color: str, label: str | None) -> None:
    axes.errorbar(
        bits, value.mean, yerr=value.error, fmt=MARKERS[engine], color=color, capsize=3, markersize=6, label=label,
        markerfacecolor="none" if engine == "transformers" else color,
    )  # fmt: skip
