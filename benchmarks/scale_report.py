"""Runs of the benchmark of many sessions, their tables and their plot."""

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from manthan.benchmarks.arms import leave_on_signals, make_console, new_report, read_report, save_plot, write_report
from manthan.benchmarks.progress import Bar
from manthan.benchmarks.scale_world import REQUEST, WITH_SHARE, Scale, figures, measure, measure_memory

WANTED_US = 200
CALLS = ("started", "wanted", "admitted", "restoring", "restored", "finished", "step", "encoded", "prefetched")
DEFAULT_LIST = "list by last_used"
MOST_TRACED = 10_000
"""Sessions: under tracemalloc all takes several times as long, and a session is not larger where there are more."""


def run(scales: Sequence[Scale], rounds: int, out: Path, plot_only: Sequence[Path], arguments: dict[str, Any]) -> None:
    """Measure each, write the report after each, and show it; or show earlier ones."""
    console = make_console()
    if plot_only:
        reports = {path.stem: read_report(path, "scale") for path in plot_only}
        for name, report in reports.items():
            console.print(name)
            show(report, console)
        return save_plot(lambda _: draw(reports), {}, plot_only[0].with_suffix(".png"), console)
    leave_on_signals()
    out.mkdir(parents=True, exist_ok=True)
    runs: list[dict[str, Any]] = []
    report = new_report("scale", arguments, [], {}, {}) | {"runs": runs}
    with Bar(console, "scale") as bar:
        bar.begin("", len(scales))
        for scale in scales:
            bar.begin(f"{scale.policy}, {scale.sessions:,} sessions of {scale.blocks} blocks")
            found = _least([_alone(measure, scale) for _ in range(rounds)])
            traced = _alone(measure_memory, scale._replace(sessions=min(scale.sessions, MOST_TRACED)))
            runs.append(scale._asdict() | found | {"traced": traced})
            path = write_report(report, out)
    show(report, console)
    console.print(f"  {path}", soft_wrap=True)
    save_plot(lambda _: draw({"": report}), report, path.with_suffix(".png"), console)


def _least(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Rounds serve the same requests, so that what a request takes is the least that it took: the rest is other work of
    the machine. Of calls, the least of each figure."""
    found = rounds[0]
    spent = [each.pop("requests") for each in rounds]
    same = [name for name in spent[0] if all(name in each for each in spent)]
    for kind in found["kinds"]:
        of_all = [each["kinds"][kind] for each in rounds if kind in each["kinds"]]
        found["kinds"][kind] = {what: min(each[what] for each in of_all) for what in of_all[0]}
    for place, kind in enumerate((REQUEST, WITH_SHARE)):
        found["kinds"][kind] = figures([min(each[name][place] for each in spent) for name in same])
    return found


def _alone(what: Any, scale: Scale) -> dict[str, Any]:
    """In a process of its own, which inherits nobody's heap."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        found: dict[str, Any] = pool.submit(what, scale).result()
        return found


# -- shown ----------------------------------------------------------------------------------------------


def show(report: dict[str, Any], console: Console) -> None:
    machine = report["machine"]
    console.print(
        f"{machine['cpu']} ({machine['cores']} cores), load {machine['load']}, Python {machine['python']}",
        soft_wrap=True,
    )
    console.print(_requests(report["runs"]))
    console.print(_calls(report["runs"]))
    console.print(_looks(report["runs"]))


def _name(run: dict[str, Any]) -> str:
    return f"{run['policy']}, {run['sessions']:,} × {run['blocks']}"


def _requests(runs: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="A request, µs of the scheduler's thread; memory", box=SIMPLE, caption=f"wanted: {WANTED_US}")
    table.add_column("sessions × blocks", no_wrap=True)
    headers = "p50", "p99", "most", "+ steps: p50", "p99", "most", "GC, ms", "a full one", "KiB", "traced"
    for header in headers:
        table.add_column(header, justify="right")
    for each in runs:
        kinds, traced = each["kinds"], each["traced"]
        longest = max((pause["max"] for pause in each["pauses"].values()), default=0)
        table.add_row(
            _name(each),
            *(f"{kinds[kind][what]:.0f}" for kind in (REQUEST, WITH_SHARE) for what in ("p50", "p99", "max")),
            f"{longest / 1e3:.1f}",
            f"{each['full_collection']['p50'] / 1e3:.0f}",
            f"{each['resident_nbytes'] / each['known'] / 1024:.1f}",
            f"{traced['nbytes'] / traced['known'] / 1024:.1f}",
        )
    return table


def _calls(runs: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="µs of each call, p50 / p99; steps and encoded blocks are of many", box=SIMPLE)
    table.add_column("", no_wrap=True)
    for kind in CALLS:
        table.add_column(kind)
    for each in runs:
        found = (each["kinds"].get(kind) for kind in CALLS)
        table.add_row(_name(each), *(f"{f['p50']:.0f} / {f['p99']:.0f}" if f else "" for f in found))
    return table


def _looks(runs: Sequence[dict[str, Any]]) -> Table:
    table = Table("", *map(_name, runs), title="ms of a look at 100 sessions, of the state, of gauges", box=SIMPLE)
    measured = (*CALLS, REQUEST, WITH_SHARE)
    for kind in [kind for kind in runs[0]["kinds"] if kind not in measured]:
        table.add_row(kind, *(f"{each['kinds'][kind]['p50'] / 1e3:.2f}" for each in runs))
    return table


def draw(reports: dict[str, dict[str, Any]]) -> Any:
    """A request, and a page of the list, by the number of sessions; a line for each policy of each report."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    requests, lists = figure.subplots(1, 2)
    for name, report in reports.items():
        groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
        for each in report["runs"]:
            groups.setdefault((each["policy"], each["blocks"]), []).append(each)
        for (policy, blocks), points in groups.items():
            label = ", ".join(filter(None, (name, policy, f"{blocks} blocks")))
            sizes = [each["sessions"] for each in points]
            p50, p99 = ([each["kinds"][WITH_SHARE][what] for each in points] for what in ("p50", "p99"))
            [line] = requests.plot(sizes, p99, "o-", label=f"{label}: p99")
            requests.plot(sizes, p50, "o:", color=line.get_color(), label=f"{label}: p50")
            pages = [each["kinds"][DEFAULT_LIST]["p50"] / 1e3 for each in points]
            lists.plot(sizes, pages, "o-", color=line.get_color(), label=label)
    requests.axhline(WANTED_US, color="grey", lw=0.8)
    for axes, title in ((requests, "µs a request, with its share of steps"), (lists, "ms a list of 100 sessions")):
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("sessions known")
        axes.set_title(title, loc="left")
        axes.legend(fontsize=8)
    lists.set_yscale("log")
    lists.set_ylim(0.1, None)
    return figure
