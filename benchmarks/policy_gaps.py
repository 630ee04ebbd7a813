"""How much of what can be found do `returns`, `lru` and `gdsf` find, on each trace and in caches of each size?

One cache, as `manthan simulate --hot 0`, of a share of the trace's distinct blocks. Traces are files, and workloads
that are made up here: `mix` is what `manthan workload` makes, `agents` and `readers` have one kind of session,
`changing` is agents in the first half and chats in the second. `told` is agents among others that say when they will be
back, `lied` the same where half of the others say falsely that they will be back at once, `liars` where only those say
something, `silent` where nobody does. In `named` agents wait for tools and name them, in `unnamed` they do not say so.

    python benchmarks/policy_gaps.py [TRACE ...] [--workloads mix,readers] [--sizes 1,2,5,10,20] [--out FOLDER]
    python benchmarks/policy_gaps.py --plot-only FOLDER/policy_gaps.json

Of each trace and size: the share of asked blocks that each policy finds and that Belady's optimum would; how much of
the gap between lru and the optimum the others close; and how far `returns` is from the better of lru and gdsf, in
percent of what that finds.
"""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from manthan.benchmarks.arms import OUT, make_console, new_report, save_plot, write_report
from manthan.manager.simulator.replay import Setup
from manthan.manager.simulator.runs import Run, run_all
from manthan.manager.simulator.traces import read_trace
from manthan.manager.simulator.workload import WorkloadLine, make_workload
from manthan.policies import get_policy

POLICIES = ("lru", "gdsf", "returns")
SEED = 11
AGENTS, CHATS = {"chat": 0, "agent": 100, "single": 0}, {"chat": 100, "agent": 0, "single": 0}
HINTS = {"chat": 25, "agent": 45, "single": 30}
HALF_HOUR_MS = 1_800_000


def made_up(name: str) -> list[WorkloadLine]:
    """One of the workloads, by name."""
    kinds: dict[str, dict[str, Any]] = {
        "mix": {"sessions": 2500, "hours": 2},
        "agents": {"sessions": 600, **AGENTS},
        "readers": {"sessions": 1500, "chat": 0, "agent": 0, "single": 0, "reader": 100},
        "silent": {"sessions": 1000, **HINTS},
        "told": {"sessions": 1000, **HINTS, "told": 1},
        "lied": {"sessions": 1000, **HINTS, "told": 1, "lies": 0.5},
        "liars": {"sessions": 1000, **HINTS, "lies": 0.5},
        "named": {"sessions": 1000, **HINTS, "tools": 1},
    }
    if name == "unnamed":
        return [line._replace(tool="") for line in made_up("named")]
    if name == "changing":
        first = make_workload(300, SEED, hours=0.5, **AGENTS)
        then = make_workload(1200, SEED + 1, hours=0.5, **CHATS)
        ids = 1 + max(block for line in first for block in line.hash_ids)
        return first + [
            line._replace(timestamp=line.timestamp + HALF_HOUR_MS, hash_ids=[ids + block for block in line.hash_ids])
            for line in then
        ]
    if name not in kinds:
        raise typer.BadParameter(f"--workloads: {name!r} is none of {', '.join((*kinds, 'unnamed', 'changing'))}")
    return make_workload(seed=SEED, **kinds[name])


def measure(path: Path, sizes: Sequence[float], jobs: int) -> list[dict[str, Any]]:
    """A row for each size: the found share by policy, and the best possible."""
    trace = read_trace(path)
    runs = [
        Run(name, Setup(get_policy(name), cold_blocks=max(1, round(size / 100 * trace.distinct_blocks))))
        for size in sizes
        for name in POLICIES
    ]
    results = run_all(path, trace, runs, jobs)
    rows = []
    for number, size in enumerate(sizes):
        some = results[number * len(POLICIES) : (number + 1) * len(POLICIES)]
        found = {result.policy: result.found_share for result in some}
        rows.append({"size": size, "best": some[0].best_share, **found})
    return rows


# -- the report -----------------------------------------------------------------------------------------


def closed(row: dict[str, Any], name: str) -> float:
    """How much of the gap between lru and the best possible the policy closes."""
    return float((row[name] - row["lru"]) / max(row["best"] - row["lru"], 1e-9))


def beside(row: dict[str, Any]) -> float:
    """How much more `returns` finds than the better of the others, as a part of that."""
    return float(row["returns"] / max(row["lru"], row["gdsf"]) - 1)


def table(arms: dict[str, list[dict[str, Any]]]) -> Table:
    made = Table(title="Shares of the asked blocks that are found", box=SIMPLE)
    made.add_column("trace")
    headers = ("size", *POLICIES, "best possible", "gap closed: gdsf", "returns", "returns beside the better")
    for header in headers:
        made.add_column(header, justify="right")
    for name, rows in arms.items():
        for row in rows:
            made.add_row(
                name,
                f"{row['size']:g}%",
                *(f"{row[column]:.4f}" for column in (*POLICIES, "best")),
                *(f"{100 * closed(row, policy):+.0f}%" for policy in ("gdsf", "returns")),
                f"{100 * beside(row):+.1f}%",
                style="red" if beside(row) < -0.01 else "",
            )
    return made


def draw(report: dict[str, Any]) -> Any:
    """For each trace, how much of the gap gdsf and returns close, over the size of the cache."""
    from matplotlib.figure import Figure

    arms = report["arms"]
    columns = min(4, len(arms))
    lines = -(-len(arms) // columns)
    figure = Figure(figsize=(3.2 * columns, 2.8 * lines), layout="constrained")
    for axes, (name, rows) in zip(figure.subplots(lines, columns, squeeze=False).flat, arms.items(), strict=False):
        axes.axhline(0, color="k", linewidth=0.8)
        for policy in ("gdsf", "returns"):
            axes.plot([row["size"] for row in rows], [100 * closed(row, policy) for row in rows], "o-", label=policy)
        axes.set_xscale("log")
        axes.set_xticks([row["size"] for row in rows], [f"{row['size']:g}" for row in rows])
        axes.minorticks_off()
        axes.set_title(name, loc="left", fontsize=10)
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=8)
    figure.supxlabel("cache, % of the distinct blocks", fontsize=9)
    figure.supylabel("% of the gap from lru to the best possible", fontsize=9)
    return figure


def show(report: dict[str, Any], plot: Path, console: Console) -> None:
    console.print(table(report["arms"]))
    save_plot(draw, report, plot, console)


def main(
    context: typer.Context,
    traces: Annotated[list[Path] | None, typer.Argument(help="JSON lines as Mooncake's, or CSV.")] = None,
    workloads: Annotated[str, typer.Option(help="Made-up workloads, by comma.")] = "mix,agents,readers,changing",
    sizes: Annotated[
        str, typer.Option(help="Of the cache, in percent of the distinct blocks, by comma.")
    ] = "1,2,5,10,20",
    jobs: Annotated[int, typer.Option(min=1, help="Processes side by side.")] = 2,
    out: Annotated[Path, typer.Option(help="Folder for JSON and plot.")] = OUT,
    plot_only: Annotated[Path | None, typer.Option(help="Show and plot this JSON of an earlier run again.")] = None,
) -> None:
    """Measure what returns finds beside lru, gdsf and the best possible."""
    console = make_console()
    if plot_only is not None:
        return show(json.loads(plot_only.read_text()), plot_only.with_suffix(".png"), console)
    out.mkdir(parents=True, exist_ok=True)
    shares = [float(size) for size in sizes.split(",")]
    parameters = context.params | {"traces": [path.name for path in traces or []]}
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        paths = {path.stem: path for path in traces or []}
        for name in filter(None, workloads.split(",")):
            paths[name] = Path(folder, f"{name}.jsonl")
            lines = (line._asdict() for line in made_up(name))
            paths[name].write_text("".join(json.dumps(line) + "\n" for line in lines))
        for name, path in paths.items():
            found[name] = measure(path, shares, jobs)
            report = new_report("policy_gaps", parameters, [], found, {})
            path = write_report(report, out)
            console.print(f"  {name}: {path}", soft_wrap=True)
    show(report, path.with_suffix(".png"), console)


if __name__ == "__main__":
    typer.run(main)
