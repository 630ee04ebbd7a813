"""What the soak of faults found: what is wrong, tables, and a plot over time."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from soak_chats import CALM, RESTART, SLICE_S
from soak_faults import FELT_LATER, Fault, Order
from soak_memory import MIB, Sample, Slope, rise, slope

from manthan.benchmarks.arms import save_plot, where

GAP_S = 15.0
JUDGED_S = 900.0
"""Memory of a life is judged if it is that long: before, it says too little."""
BACK = "came_back"
COUNTED = ("requests", "exact", "retried", "errors", "wrong", "doubtful", "misled", "stale")
Report = dict[str, Any]


# -- figures ------------------------------------------------------------------------------------------


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """How many, their median, 99th percentile and most, in seconds."""
    found = sorted(seconds)
    if not found:
        return {"count": 0}

    def at(share: float) -> float:
        return round(found[min(len(found) - 1, int(share * len(found)))], 4)

    return {"count": len(found), "p50": at(0.5), "p99": at(0.99), "most": at(1)}


def total(report: Report, what: str) -> int:
    return sum(phase["number"].get(what, 0) for phase in report["phases"].values())


def share(counts: dict[str, int]) -> float:
    """Of what had been computed for returning sessions, what was not computed again."""
    return counts["cached"] / counts["full"] if counts.get("full") else 0.0


def samples(life: dict[str, Any]) -> list[Sample]:
    return [Sample(*sample) for sample in life["memory"]]


def slopes(report: Report) -> list[Slope | None]:
    """Return the slope of each life's memory after the warm-up."""
    return [slope(samples(life), report["arguments"]["warm_up"]) for life in report["lives"]]


def rises(report: Report) -> list[float | None]:
    """Return MiB by which each life's memory rose after the warm-up."""
    return [rise(samples(life), report["arguments"]["warm_up"]) for life in report["lives"]]


def name_of(life: dict[str, Any]) -> str:
    return "plain vLLM" if life["server"] < 0 else f"server {life['server']}"


def failures(report: Report) -> dict[str, Counter[str]]:
    """Blocks that could not be stored or restored, by fault and cause."""
    found: dict[str, Counter[str]] = {}
    for event in report["events"]:
        found.setdefault(event["what"], Counter()).update(event["failures"])
    return found


def failed(report: Report) -> list[str]:
    """What is not as it should be, a sentence each."""
    wrong = {
        f"{total(report, 'errors')} requests failed": total(report, "errors"),
        f"{total(report, 'misled')} answers are surely not the plain server's": total(report, "misled"),
        f"{total(report, 'stale')} sessions came back from before a reset of all": total(report, "stale"),
        "nothing was checked": not total(report, "checked"),
    }
    sentences = [sentence for sentence, is_so in wrong.items() if is_so]
    for number, is_left in enumerate(report["left"]):
        is_kept = {
            f"{is_left['pool_in_use']:.1%} of the pool is still in use": is_left["pool_in_use"],
            f"{is_left['sessions_hot']:.0f} sessions are hot": is_left["sessions_hot"],
        }
        sentences += [f"server {number}: {sentence}" for sentence, is_so in is_kept.items() if is_so]
    return sentences + store_failed(report) + memory_failed(report)


def store_failed(report: Report) -> list[str]:
    """A fault that nobody felt was not tried."""
    lost = [event for event in report["events"] if event["used_again_s"] is None]
    felt, before, others = failures(report), report["returns_of_before"], report["returns_of_other"]
    killed = [number for number, life in enumerate(report["lives"], 1) if number > 3 and life["server"] >= 0]
    return [
        *(f"the store was not in use again after {event['what']} at {event['ended_s']:.0f} s" for event in lost),
        *(f"nobody felt the fault {one}" for one in Fault if one not in FELT_LATER and not felt.get(one)),
        *(f"no session came back after the kill before life {one}" for one in killed if not _back(before, one)),
        *(["no session came back on the other server"] if not any(_back(others, int(one)) for one in others) else []),
    ]


def _back(returns: dict[str, dict[str, int]], life: int) -> int:
    return returns.get(str(life), {}).get(BACK, 0)


def memory_failed(report: Report) -> list[str]:
    """Short lives are not judged, nor the plain server."""
    most, sentences = report["arguments"]["most_rise"], []
    for number, (life, found) in enumerate(zip(report["lives"], rises(report), strict=True), 1):
        is_judged = life["server"] >= 0 and life["end_s"] - life["ready_s"] >= JUDGED_S
        if is_judged and found is not None and found > most:
            sentences.append(f"memory rose by {found:.1f} MiB in life {number}, of {name_of(life)}")
    return sentences


# -- tables -------------------------------------------------------------------------------------------


def show(report: Report, plot: Path, console: Console) -> None:
    """Tables, what is wrong, and the plot."""
    console.print(where(report), soft_wrap=True)
    for table in (phase_table(report), event_table(report), life_table(report)):
        console.print(table)
    for line in summary(report):
        console.print(f"  {line}", soft_wrap=True)
    for message in report["messages"]:
        console.print(f"  {message}", style="red", markup=False, soft_wrap=True)
    for sentence in failed(report):
        console.print(f"  FAILED: {sentence}", style="red", soft_wrap=True)
    save_plot(draw, report, plot, console)


def phase_table(report: Report) -> Table:
    minutes, asked = report["seconds"] / 60, report["arguments"]
    who = f"{asked['agents']} agents, {asked['rate']:g} chats a second"
    title = f"{report['sessions']:,} sessions in {minutes:.1f} min: {who}"
    headers = (
        "requests",
        "exact",
        "sent\nagain",
        "errors",
        "not as\nplain's",
        "by a\nhair",
        "surely",
        "of before\na reset",
    )
    times = ("first token\np50", "first token\np99", "answer\np50", "answer\np99")
    table = _table(title, "sent while", *headers, *times)
    phases = [CALM, RESTART, *map(str, Fault), *map(str, Order)]
    for phase in [phase for phase in phases if phase in report["phases"]]:
        found = report["phases"][phase]
        numbers = [f"{found['number'].get(what, 0):,}" for what in COUNTED]
        waits = [_ms(found[what], at) for what in ("first_s", "seconds") for at in ("p50", "p99")]
        table.add_row(phase, *numbers, *waits)
    numbers = [f"{total(report, what):,}" for what in COUNTED]
    table.add_row("all", *numbers, "", "", "", "")
    return table


def event_table(report: Report) -> Table:
    table = _table(
        "What happened", "", "times", "seconds", "in use again\nafter, s (most)", "blocks that failed, by cause"
    )
    felt = failures(report)
    for what in dict.fromkeys(event["what"] for event in report["events"]):
        events = [event for event in report["events"] if event["what"] == what]
        lasted = [event["ended_s"] - event["began_s"] for event in events]
        again = [event["used_again_s"] for event in events]
        most = "never" if None in again else f"{max(again):.1f}"
        causes = ", ".join(f"{cause} {count:,}" for cause, count in sorted(felt[what].items()))
        table.add_row(what, str(len(events)), f"{min(lasted):.1f} to {max(lasted):.1f}", most, causes)
    return table


def life_table(report: Report) -> Table:
    headers = (
        "minutes",
        "returns",
        "not computed\nagain",
        "after\na kill",
        "came back",
        "from the\nother",
        "came back",
    )
    memory = ("memory,\nMiB", "rise,\nMiB", "slope,\nMiB an hour")
    table = _table("The servers' lives", "", *headers, *memory)
    figures = zip(report["lives"], slopes(report), rises(report), strict=True)
    for number, (life, found, risen) in enumerate(figures, 1):
        whats = ("returns", "returns_of_before", "returns_of_other")
        returns, before, other = (report[what].get(str(number), {}) for what in whats)
        sizes = [nbytes / MIB for _, nbytes in life["memory"]]
        table.add_row(
            f"{number}: {name_of(life)}",
            f"{(life['end_s'] - life['ready_s']) / 60:.1f}",
            f"{returns.get('returns', 0):,}",
            f"{share(returns):.0%}",
            *(f"{found.get(what, 0):,}" for found in (before, other) for what in ("returns", BACK)),
            f"{min(sizes):,.0f} to {max(sizes):,.0f}" if sizes else "",
            f"{risen:+.1f}" if risen is not None else "",
            f"{found.mib_per_hour:+,.1f} ± {found.standard_error:,.1f}" if found else "",
        )
    return table


def summary(report: Report) -> list[str]:
    """What Manthan did, what is left, and what it took."""
    ours = [life for life in report["lives"] if life["server"] >= 0]
    told = Counter[str]()
    for life in ours:
        told.update(life["told"])
    names = ("evictions", "restores", "prefetches", "encoded_blocks", "restored_blocks", "lossy_tokens", "pins_refused")
    counts = [f"{told[f'{name}_total']:,.0f} {name.replace('_', ' ')}" for name in names]
    source = "prompt_tokens_cached_by_source_total{%s}"
    labelled = {
        "tokens from RAM": source % "host",
        "from the disk": source % "disk",
        "from Redis": source % "external_unspecified",
        "blocks dropped for room": "dropped_blocks_total{budget}",
    }
    counts += [f"{told[name]:,.0f} {what}" for what, name in labelled.items()]
    requests = max(1, total(report, "requests"))
    kinds = ((ours, "the two servers"), ([life for life in report["lives"] if life["server"] < 0], "the plain one"))
    took = ", ".join(f"{what} {_processor_s(lives) / requests * 1000:.1f} ms" for lives, what in kinds)
    checked = f"{total(report, 'checked'):,} answers compared, {total(report, 'exact'):,} of them exactly"
    lines = [
        f"Manthan: {', '.join(counts)}",
        f"{checked}; {total(report, 'errs'):,} times the plain server looks up a wrong number",
        f"Processor time of a request: {took}, this program {report['client_processor_s'] / requests * 1000:.1f} ms",
    ]
    for number, is_left in enumerate(report["left"]):
        lines.append(
            f"Server {number} when all is quiet: {is_left['pool_in_use']:.1%} of the pool in use, "
            f"sessions: {is_left['sessions_cold']:.0f} cold, {is_left['sessions_idle']:.0f} idle, "
            f"{is_left['sessions_hot']:.0f} hot; compressed blocks "
            f"{is_left['cold_bytes'] / MIB:.1f} of {is_left['cold_budget_bytes'] / MIB:.1f} MiB"
        )
    return lines


def _processor_s(lives: Sequence[dict[str, Any]]) -> float:
    return float(sum(sum(life["processor_s"].values()) for life in lives))


def _table(title: str, first: str, *headers: str) -> Table:
    table = Table(title=title, box=SIMPLE)
    table.add_column(first)
    for header in headers:
        table.add_column(header, justify="right")
    return table


def _ms(found: dict[str, float], at: str) -> str:
    return f"{found[at] * 1000:,.0f} ms" if at in found else ""


# -- the plot -----------------------------------------------------------------------------------------

BLUE, RED, GREY, GREEN = "#2f6db5", "#d1663b", "#8a8a8a", "#4a9d5b"


def draw(report: Report) -> Any:
    """Memory, sessions, and what was not computed again, over time; faults as bands, kills as lines."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8.5), layout="constrained")
    panels = figure.subplots(3, 1, sharex=True)
    for axes, draw_panel in zip(panels, (_memory, _sessions, _returns), strict=True):
        draw_panel(axes, report)
        _events(axes, report, has_names=axes is panels[0])
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, loc="best", fontsize=8)
    panels[-1].set_xlabel("minutes")
    figure.suptitle(where(report), fontsize=9)
    return figure


def _memory(axes: Any, report: Report) -> None:
    colors = {0: BLUE, 1: GREEN, -1: GREY}
    for number, (life, risen) in enumerate(zip(report["lives"], rises(report), strict=True), 1):
        minutes = [(life["ready_s"] + seconds) / 60 for seconds, _ in life["memory"]]
        sizes = [nbytes / MIB for _, nbytes in life["memory"]]
        told = f"life {number}, {name_of(life)}" + (f": {risen:+.1f} MiB" if risen is not None else "")
        axes.plot(minutes, sizes, color=colors[life["server"]], lw=1.2, label=told)
    axes.set_ylim(0, 1.25 * max(nbytes / MIB for life in report["lives"] for _, nbytes in life["memory"]))
    axes.set_ylabel("memory of all processes, MiB")
    counts = [f"{total(report, what):,} {what}" for what in ("requests", "errors")]
    axes.set_title(", ".join([*counts, f"{total(report, 'misled')} wrong answers"]), loc="left", fontsize=10)


def _sessions(axes: Any, report: Report) -> None:
    lines = {"sessions{cold}": ("cold", BLUE), "sessions{idle}": ("idle", GREEN), "sessions{hot}": ("hot", RED)}
    for server, style in ((0, "-"), (1, ":")):
        samples = [sample for sample in report["samples"] if sample["server"] == server]
        minutes = [sample["at_s"] / 60 for sample in samples]
        for name, (label, color) in lines.items():
            values = [sample.get(name, 0) for sample in samples]
            axes.plot(*_broken(minutes, values), style, color=color, lw=1, label=f"{label}, server {server}")
    axes.set_ylabel("sessions")


def _broken(minutes: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """As a line with gaps, where there was nobody to ask."""
    found: list[tuple[float, float]] = []
    for at, value in zip(minutes, values, strict=True):
        if found and at - found[-1][0] > GAP_S / 60:
            found.append((at, float("nan")))
        found.append((at, value))
    return [at for at, _ in found], [value for _, value in found]


def _returns(axes: Any, report: Report) -> None:
    slices = sorted((int(number), counts) for number, counts in report["slices"].items())
    began = max(life["ready_s"] for life in report["lives"][:3])
    minutes = [(began + (number + 0.5) * SLICE_S) / 60 for number, _ in slices]
    axes.plot(
        *_broken(minutes, [share(counts) for _, counts in slices]),
        color=BLUE,
        lw=1.2,
        label="tokens not computed again",
    )
    axes.set(ylim=(0, 1.05), ylabel=f"of returning sessions, in {SLICE_S:.0f} s")


def _events(axes: Any, report: Report, *, has_names: bool) -> None:
    for event in report["events"]:
        begin, end = event["began_s"] / 60, event["ended_s"] / 60
        is_kill = event["what"] == Order.kill
        if is_kill:
            axes.axvline(begin, color="black", lw=1.4)
        axes.axvspan(begin, end, color=GREY if is_kill else RED, alpha=0.12, lw=0)
        if has_names:
            where_to = {"transform": axes.get_xaxis_transform(), "rotation": 90, "fontsize": 6, "va": "top"}
            axes.text((begin + end) / 2, 0.98, event["what"], ha="center", **where_to)
