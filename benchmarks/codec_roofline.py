"""The instruction roofline of the CUDA kernels (Ding and Williams, 2019): how near they are to the memory's pace and to
the rate at which a GPU issues instructions.

    python benchmarks/codec.py --backend cuda --codec all --json codec.json       # needs a GPU
    ncu --profile-from-start off --clock-control none --metrics METRICS --csv --log-file codec.csv \\
        python benchmarks/codec.py --backend cuda --codec all --once              # needs a GPU
    python benchmarks/codec_roofline.py codec.json codec.csv

METRICS: `python benchmarks/codec_roofline.py --metrics` prints them. Times are those of codec.json, which no profiler
has slowed down.
"""

import csv
import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from manthan.benchmarks.arms import save_plot

INSTRUCTIONS = "smsp__inst_executed.sum"
PER_CYCLE = "smsp__inst_executed.sum.peak_sustained"
CLOCK = "smsp__cycles_elapsed.avg.per_second"
TENSOR = "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_elapsed"
DRAM = "dram__bytes.sum"
TIME = "gpu__time_duration.sum"
METRICS = (INSTRUCTIONS, PER_CYCLE, CLOCK, TENSOR, DRAM, TIME)
UNITS = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
OPERATIONS = {"encode": "o", "decode": "s"}
COLORS = ("#2f6db5", "#d1663b", "#3a8f4d", "#8a5bb0", "#a3762b", "#444444", "#c44e7a", "#5fa8a8", "#999999", "#777777")


@dataclass(frozen=True)
class Point:
    """A codec's pass. intensity: warp instructions for a byte read or written. rate: G warp instructions a second.
    issued: as a share of what the GPU can issue. tensor: of the time, tensor cores' pipes are busy."""

    codec: str
    operation: str
    heads: int
    head_dim: int
    per_vector: float
    intensity: float
    rate: float
    issued: float
    of_copy: float
    tensor: float


def launches(path: Path) -> list[list[dict[str, float]]]:
    """Of each pass the metrics of its kernels: those next to each other on one stream."""
    lines = path.read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith('"ID"'))
    kernels: dict[str, dict[str, float]] = {}
    streams: dict[str, str] = {}
    for row in csv.DictReader(lines[first:]):
        streams[row["ID"]] = row["Stream"]
        value = float(row["Metric Value"].replace(",", ""))
        kernels.setdefault(row["ID"], {})[row["Metric Name"]] = value * _factor(row["Metric Unit"])
    groups = itertools.groupby(kernels, key=streams.__getitem__)
    return [[kernels[one] for one in some] for _, some in groups]


def _factor(unit: str) -> float:
    """Of what a metric is given in to bytes, seconds, cycles: "Gbyte", "us", "Ghz", "cycle/nsecond"."""
    above, _, below = unit.partition("/")
    return _prefix(above) / _prefix(below)


def _prefix(unit: str) -> float:
    return UNITS.get(unit[:1], 1.0) if unit[1:].lower() in ("byte", "s", "second", "hz") else 1.0


def points(figures: dict[str, Any], passes: list[list[dict[str, float]]]) -> Iterator[Point]:
    """Those that read and write vectors."""
    if len(passes) != len(figures["results"]):
        raise typer.BadParameter(f"{len(passes)} passes were counted, and {len(figures['results'])} measured.")
    for result, kernels in zip(figures["results"], passes, strict=True):
        if result["operation"] not in OPERATIONS:
            continue
        seconds = result["vectors"] / (result["median"] * 1e9)
        instructions = sum(kernel[INSTRUCTIONS] for kernel in kernels)
        busy = sum(kernel[TENSOR] * kernel[TIME] for kernel in kernels) / sum(kernel[TIME] for kernel in kernels)
        rate = instructions / seconds
        yield Point(
            result["codec"],
            result["operation"],
            result["heads"],
            result["head_dim"],
            instructions / result["vectors"],
            instructions / result["nbytes"],
            rate / 1e9,
            rate / roof(passes),
            result["of_copy"],
            busy / 100,
        )


def roof(passes: list[list[dict[str, float]]]) -> float:
    """Warp instructions a second, at most."""
    kernels = [kernel for some in passes for kernel in some]
    return max(kernel[PER_CYCLE] for kernel in kernels) * max(kernel[CLOCK] for kernel in kernels)


def table(found: list[Point]) -> Table:
    made = Table(box=SIMPLE, padding=0)
    columns = ("codec", "heads", "D", "", "inst/vector", "inst/byte", "G inst/s", "issued", "of copy", "tensor cores")
    for column in columns:
        made.add_column(column, justify="right", no_wrap=True)
    for p in found:
        shares = (f"{share:.0%}" for share in (p.issued, p.of_copy, p.tensor))
        numbers = (f"{p.per_vector:.1f}", f"{p.intensity:.2f}", f"{p.rate:.0f}")
        made.add_row(p.codec, str(p.heads), str(p.head_dim), p.operation, *numbers, *shares)
    return made


def draw(report: dict[str, Any]) -> Any:
    """The roofs, and a point for each codec's pass at each head size."""
    import matplotlib.pyplot as plt
    import numpy as np

    found: list[Point] = report["points"]
    copy, issue = report["copy_bytes_s"] / 1e9, report["roof"] / 1e9
    figure, axes = plt.subplots(figsize=(8, 5))
    x = np.geomspace(min(p.intensity for p in found) / 2, 2 * max(p.intensity for p in found), 200)
    axes.plot(x, np.minimum(copy * x, issue), color="black")
    axes.plot(x, np.minimum(copy * x / 2, issue), color="black", linewidth=0.6, linestyle=":")
    codecs = list(dict.fromkeys(p.codec for p in found))
    for codec, operation in itertools.product(codecs, OPERATIONS):
        some = [p for p in found if (p.codec, p.operation) == (codec, operation)]
        color = COLORS[codecs.index(codec) % len(COLORS)]
        label = f"{codec} {operation}"
        marker = OPERATIONS[operation]
        filled = color if operation == "encode" else "none"
        places = [p.intensity for p in some], [p.rate for p in some]
        axes.scatter(*places, 30, filled, marker=marker, edgecolors=color, label=label)
    axes.set(xscale="log", yscale="log", xlabel="warp instructions for a byte read or written")
    axes.set_ylabel("G warp instructions a second")
    axes.set_title(f"{report['machine']}: a copy's pace (half of it dotted), and the rate of issue", fontsize=9)
    axes.legend(fontsize=7, ncol=2, loc="lower right")
    axes.grid(which="both", alpha=0.2)
    return figure


def main(
    figures: Annotated[Path | None, typer.Argument(help="What codec.py wrote with --json.")] = None,
    counters: Annotated[Path | None, typer.Argument(help="What ncu wrote of the same codecs.")] = None,
    metrics: Annotated[bool, typer.Option("--metrics", help="Print what ncu is to count.")] = False,
) -> None:
    """Draw the roofline beside the figures, as a PNG of the same name."""
    console = Console()
    if metrics:
        sys.stdout.write(",".join(METRICS) + "\n")
        return
    if figures is None or counters is None:
        raise typer.BadParameter("it takes two files: figures and counters.")
    report, passes = json.loads(figures.read_text()), launches(counters)
    found = list(points(report, passes))
    console.print(table(found))
    report |= {"points": found, "roof": roof(passes)}
    save_plot(draw, report, figures.with_suffix(".png"), console)


if __name__ == "__main__":
    typer.run(main)
