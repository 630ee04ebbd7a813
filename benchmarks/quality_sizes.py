"""How far predictions diverge over how much smaller codes are: results of `manthan eval quality` in one plot.

A panel for each model, a point for each codec; a codec that is in several results counts as the last one has it.

    python benchmarks/quality_sizes.py build/a/quality.json build/b/quality.json --out plot.png
"""

import json
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from matplotlib.figure import Figure

RATIOS = (3, 4, 5, 6, 8, 12, 16)
NATS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)


class Point(NamedTuple):
    """ratio: of a session of 8,192 tokens. kl, error: nats a token, and its standard error."""

    ratio: float
    kl: float
    error: float


def points(report: dict[str, Any]) -> dict[str, Point]:
    """By setting, those of the first engine that are not exact."""
    settings = next(iter(report["summary"].values()))
    return {
        name: Point(row["ratio_long"], row["kl"]["mean"], row["kl"]["error"] or 0.0)
        for name, row in settings.items()
        if row["kl"] and row["kl"]["mean"] > 0 and row["ratio_long"] > 1
    }


def draw(models: dict[str, dict[str, Point]]) -> Figure:
    figure = Figure(figsize=(5.5 * len(models), 4.6), layout="constrained")
    names = list(dict.fromkeys(name for found in models.values() for name in found))
    panels = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
    for axes, (model, found) in zip(panels, models.items(), strict=True):
        for name, point in found.items():
            look = {"color": f"C{names.index(name) % 10}", "marker": "o", "markersize": 5, "capsize": 3}
            axes.errorbar(point.ratio, point.kl, yerr=point.error, **look)
            axes.annotate(name, (point.ratio, point.kl), (5, 5), textcoords="offset points", fontsize=8)
        axes.set(xscale="log", yscale="log", xlabel="times smaller than bf16, all that is stored counted")
        axes.set_xticks(RATIOS, map(str, RATIOS))
        axes.set_yticks(NATS, map(str, NATS))
        axes.minorticks_off()
        axes.set_title(model, loc="left", fontsize=9)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("KL from exact, nats a token")
    return figure


def main(
    files: Annotated[list[Path], typer.Argument(help="Results of `manthan eval quality`.")],
    out: Annotated[Path, typer.Option(help="The plot.")] = Path("build/benchmarks/quality-sizes.png"),
) -> None:
    """Plot divergence over size, a panel for each model."""
    models: dict[str, dict[str, Point]] = {}
    for file in files:
        report = json.loads(file.read_text())
        models.setdefault(Path(report["arguments"]["model"]).name, {}).update(points(report))
    out.parent.mkdir(parents=True, exist_ok=True)
    draw(models).savefig(out, dpi=110)
    typer.echo(out)


if __name__ == "__main__":
    typer.run(main)
