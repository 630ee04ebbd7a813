"""What a policy costs: microseconds an event, and bytes a session, for places of 10,000 to 1,000,000 sessions.

Every registered policy is measured, those of other packages too, each figure in a process of its own.

An event is one of three. 60 of 100 are requests of sessions that were there before: how far back is Zipf's law with the
exponent 0.8, over twice as many sessions as the place holds, so that some had been evicted. 20 are requests of new
sessions. 20 are evictions: the first of victims() goes. A request is told twice, when it begins and when it ends. Time
is the process's own CPU time, so that what else the machine does matters less. A round is 10,000 events; then the place
is brought back to its size, which does not count. The place is filled with twice as many sessions as it holds, all of
which but those that stay are evicted again: seconds, with what the benchmark itself does.

Memory is what Python has allocated (tracemalloc) when twice as many sessions as the place holds have gone through it,
every other one with a second request, without the ids themselves, which the manager has anyway.

    python benchmarks/policies.py [--out FOLDER] [--only NAME,NAME] [--sessions N,N]
    python benchmarks/policies.py --plot-only FOLDER/policies.json
"""

import gc
import json
import multiprocessing
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from manthan.benchmarks.arms import OUT, leave_on_signals, make_console, new_report, save_plot, write_report
from manthan.policies import EvictionPolicy, SessionView, get_policy, policy_names

ZIPF = 0.8
TOKEN_NBYTES = 147_456
GAP_S = 0.01
WARM_UP = 5
MAX_US, MAX_NBYTES = 20, 1 << 30


class Traffic:
    """A place with a policy, and requests to it. Sessions are numbered as they come."""

    def __init__(self, policy: EvictionPolicy, seed: int) -> None:
        self.policy = policy
        self.rng = random.Random(seed)
        self.now = 0.0
        self.views: list[SessionView] = []
        """Of each session, as of its last request."""
        self.present: set[str] = set()

    def new(self, session_id: str) -> SessionView:
        self.now += GAP_S
        tokens = 16 * round(self.rng.lognormvariate(6, 1) + 1)
        view = SessionView(session_id, tokens, tokens * TOKEN_NBYTES, created=self.now, last_used=self.now)
        self.views.append(view)
        return view

    def another(self, number: int) -> SessionView:
        """The next request of that session."""
        self.now += GAP_S
        last = self.views[number]
        self.views[number] = view = last._replace(
            last_used=self.now, uses=last.uses + 1, gap=self.now - last.last_used, added_tokens=16, answer_tokens=16
        )
        return view

    def request(self, view: SessionView) -> None:
        self.policy.used(view)
        self.policy.used(view)
        self.present.add(view.session_id)

    def evict(self) -> None:
        victim = next(iter(self.policy.victims()))
        self.policy.evicted(victim)
        self.present.discard(victim)

    def shrink(self, sessions: int) -> None:
        while len(self.present) > sessions:
            self.evict()

    def events(self, count: int, sessions: int) -> Iterator[Callable[[], None]]:
        """Events to come, made beforehand."""
        for kind in self.rng.choices(("again", "new", "evict"), (60, 20, 20), k=count):
            if kind == "evict":
                yield self.evict
                continue
            if kind == "new":
                view = self.new(f"session-{len(self.views)}")
            else:
                back = int(min(len(self.views), 2 * sessions) * self.rng.random() ** (1 / (1 - ZIPF)))
                view = self.another(len(self.views) - 1 - back)
            yield lambda view=view: self.request(view)


class Speed(NamedTuple):
    """Seconds to fill the place, and microseconds an event of each round."""

    fill_s: float
    us: list[float]


def measure_speed(name: str, sessions: int, events: int, rounds: int, seed: int) -> Speed:
    """Of a place through which twice as many sessions have gone as it holds."""
    traffic = Traffic(get_policy(name).family()(), seed)
    began = time.process_time()
    for number in range(2 * sessions):
        traffic.request(traffic.new(f"session-{number}"))
        traffic.shrink(sessions)
    fill_s = time.process_time() - began
    found = []
    for _ in range(WARM_UP + rounds):
        todo = list(traffic.events(events, sessions))
        began = time.process_time()
        for event in todo:
            event()
        found.append((time.process_time() - began) / events * 1e6)
        traffic.shrink(sessions)
    return Speed(fill_s, found[WARM_UP:])


def measure_memory(name: str, sessions: int, seed: int) -> int:
    """Bytes that the policy of a place with so many sessions has allocated."""
    ids = [f"session-{number}" for number in range(2 * sessions)]
    traffic, nobody = Traffic(get_policy(name).family()(), seed), SessionView("")
    tracemalloc.start()
    for number, session_id in enumerate(ids):
        traffic.request(traffic.new(session_id))
        if number % 2:
            traffic.request(traffic.another(number))
        traffic.views[number] = nobody  # or the traffic itself takes gigabytes at a million sessions
        traffic.shrink(sessions)
    traffic.views.clear()
    traffic.present = set()
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def measure(
    names: list[str], sizes: list[int], events: int, rounds: int, seed: int, console: Console
) -> dict[str, dict[str, Any]]:
    """Figures by policy and number of sessions; a process for each, so that none inherits another's heap."""
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    spawn = multiprocessing.get_context("spawn")
    with (
        Progress(*columns, console=console) as progress,
        ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as pool,
    ):
        task = progress.add_task("", total=2 * len(names) * len(sizes))
        for sessions in sizes:
            for name in names:
                progress.update(task, description=f"{name}, {sessions:,} sessions: time")
                fill_s, us = pool.submit(measure_speed, name, sessions, events, rounds, seed).result()
                progress.update(task, advance=1, description=f"{name}, {sessions:,} sessions: memory")
                nbytes = pool.submit(measure_memory, name, sessions, seed).result()
                progress.update(task, advance=1)
                found[name][str(sessions)] = {"fill_s": fill_s, "us": us, "nbytes": nbytes}
    return found


# -- the report -----------------------------------------------------------------------------------------


def show(report: dict[str, Any], plot: Path, console: Console) -> None:
    """The table and the plot."""
    console.print(machine_line(report), soft_wrap=True)
    console.print(table(report))
    save_plot(draw, report, plot, console)


def machine_line(report: dict[str, Any]) -> str:
    machine = report["machine"]
    return f"{machine['cpu']} ({machine['cores']} cores), load {machine['load']}, Python {machine['python']}"


def quartiles(samples: list[float]) -> tuple[float, float, float]:
    if len(samples) < 2:
        return samples[0], samples[0], samples[0]
    first, median, third = statistics.quantiles(samples, method="inclusive")
    return first, median, third


def table(report: dict[str, Any]) -> Table:
    limits = f"wanted: below {MAX_US} µs, and below {MAX_NBYTES / 2**20:.0f} MiB for a million sessions"
    made = Table(title="CPU time and memory of each policy", caption=limits, box=SIMPLE)
    made.add_column("policy")
    for header in ("sessions", "s to fill it", "µs an event", "quartiles", "least", "most", "bytes a session", "MiB"):
        made.add_column(header, justify="right")
    for name, by_size in report["arms"].items():
        for sessions, figures in by_size.items():
            first, median, third = quartiles(figures["us"])
            is_slow, is_large = median > MAX_US, figures["nbytes"] > MAX_NBYTES
            made.add_row(
                name,
                f"{int(sessions):,}",
                f"{figures.get('fill_s', float('nan')):.1f}",
                f"{median:.2f}",
                f"{first:.2f} to {third:.2f}",
                f"{min(figures['us']):.2f}",
                f"{max(figures['us']):.2f}",
                f"{figures['nbytes'] / int(sessions):.0f}",
                f"{figures['nbytes'] / 2**20:.1f}",
                style="red" if is_slow or is_large else "",
            )
    return made


def draw(report: dict[str, Any]) -> Any:
    """Time and memory over the number of sessions, a line for each policy."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    time_axes, memory_axes = figure.subplots(1, 2)
    for name, by_size in report["arms"].items():
        sizes = [int(sessions) for sessions in by_size]
        spread = [quartiles(figures["us"]) for figures in by_size.values()]
        time_axes.plot(sizes, [median for _, median, _ in spread], marker="o", label=name)
        time_axes.fill_between(sizes, [low for low, _, _ in spread], [high for _, _, high in spread], alpha=0.15)
        nbytes = [figures["nbytes"] / int(sessions) for sessions, figures in by_size.items()]
        memory_axes.plot(sizes, nbytes, marker="o", label=name)
    for axes, title in ((time_axes, "µs of CPU time an event: median, quartiles"), (memory_axes, "bytes a session")):
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("sessions in the place")
        axes.set_title(title, loc="left")
    time_axes.legend()
    figure.suptitle(machine_line(report), fontsize=9)
    return figure


def main(
    context: typer.Context,
    only: Annotated[str, typer.Option(help="Policies, by comma; all of them if not given.")] = "",
    sessions: Annotated[str, typer.Option(help="Sessions that the place holds, by comma.")] = "10000,100000,1000000",
    events: Annotated[int, typer.Option(min=1, help="Events of a round.")] = 10_000,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that count.")] = 25,
    seed: Annotated[int, typer.Option(help="Of the traffic.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for JSON and plot.")] = OUT,
    plot_only: Annotated[Path | None, typer.Option(help="Show and plot this JSON of an earlier run again.")] = None,
) -> None:
    """Measure what each policy costs."""
    console = make_console()
    if plot_only is not None:
        return show(json.loads(plot_only.read_text()), plot_only.with_suffix(".png"), console)
    leave_on_signals()
    out.mkdir(parents=True, exist_ok=True)
    names = [name.strip() for name in only.split(",")] if only else policy_names()
    sizes = [int(size) for size in sessions.split(",")]
    found = measure(names, sizes, events, rounds, seed, console)
    report = new_report("policies", context.params, [], found, {})
    path = write_report(report, out)
    console.print(f"  {path}", soft_wrap=True)
    show(report, path.with_suffix(".png"), console)


if __name__ == "__main__":
    typer.run(main)
