"""An hour of faults: sessions arrive at a server whose disk fails in every way there is, and which is killed twice.

Beside `manthan bench soak`, which is for any server: this one needs the tests' library that makes a disk fail. 20 new
sessions a second (a Poisson process), of one to four turns with pauses between them, of two tenants, with names and
without, some streamed, some left midway, some with hints. Codes are in RAM and behind it on a disk, with room for less
than half a minute of sessions.

    make soak MINUTES=60
    python tests/helpers/soak_hour.py [--minutes 60] [--rate 20] [--kills 2] [--seed 0] [--out FOLDER]
    python tests/helpers/soak_hour.py --plot-only FOLDER/soak_hour.json

Exit status 1 if a request failed, an answer was wrong, the store was not in use again after a fault, a fault was not
felt, no session came back after a kill, memory grew, or something was left. See docs/benchmarks.md.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import repo_benchmarks  # noqa: F401 it makes them importable
import typer
from rich.console import Console
from soak_chats import CALM, RESTART, Counts, Traffic
from soak_faults import FELT_LATER, Disk, Fault, Turn, disk, schedule
from soak_lives import DISK_S, MODEL, SESSION_BYTES, Lives, Told
from soak_report import failed, quantiles, show

from manthan.benchmarks.arms import leave_on_signals, make_console, new_report, read_report, write_report
from manthan.benchmarks.endpoint import ServerError
from manthan.benchmarks.progress import Bar
from manthan.benchmarks.settle import until_settled
from manthan.benchmarks.soak_run import left

NAME = "soak_hour"
ROUND_MINUTES = 7.5
FELT_S = 30.0
"""So much longer a fault may last until somebody felt it."""
USED_AGAIN_S = 120.0
USED_BLOCKS, USED_TOKENS = 20, 256
"""Encoded and put, and read from the disk, since a fault is over: then it counts as in use again."""
FROM_DISK = "prompt_tokens_cached_by_source_total{disk}"


def is_used_again(before: Told, now: Told) -> bool:
    """Both ways."""
    put = now["encoded_blocks_total"] - before.get("encoded_blocks_total", 0)
    read = now.get(FROM_DISK, 0) - before.get(FROM_DISK, 0)
    return put >= USED_BLOCKS and read >= USED_TOKENS and now.get("cold_store_up") == 1


def failures(before: Told, now: Told) -> dict[str, int]:
    """Blocks, by cause."""
    causes = {name: value - before.get(name, 0) for name, value in now.items() if name.startswith("failures_total{")}
    return {name[len("failures_total{") : -1]: int(value) for name, value in causes.items() if value}


class Weather:
    """Has all that was scheduled happen to the server, one thing after the other. events: what came of it."""

    def __init__(self, lives: Lives, disk: Disk, traffic: "Running") -> None:
        self._lives, self._disk, self._traffic = lives, disk, traffic
        self.events: list[dict[str, Any]] = []

    def wait_until_used(self) -> None:
        """There is something to lose. Raises ServerError."""
        if self._lives.wait_for(lambda now: is_used_again({}, now), USED_AGAIN_S) is None:
            raise self._lives.server.error(f"The cold store was not in use after {USED_AGAIN_S:.0f} s.")

    def let(self, turn: Turn) -> None:
        """Takes longer than the turn if the store is not in use again by its end. Raises ServerError."""
        until = time.monotonic() + turn.seconds
        self._lives.pause(turn.calm_s)
        self._kill() if turn.fault is None else self._fail(turn)
        self._traffic.of.phase = CALM
        self._lives.pause(until - time.monotonic())

    def _fail(self, turn: Turn) -> None:
        assert turn.fault is not None
        before, began = self._lives.look(), self._lives.now()
        self._traffic.of.phase = turn.fault
        with self._disk.failing(turn.fault):
            self._lives.pause(turn.fault_s)
            if turn.fault not in FELT_LATER:
                self._lives.wait_for(lambda now: self._is_felt(turn.fault, before, now), FELT_S)
        self._note(str(turn.fault), began, before)

    def _is_felt(self, fault: Fault, before: Told, now: Told) -> bool:
        """If not, more files are damaged: what was may have been in nobody's way."""
        is_felt = bool(failures(before, now))
        if not is_felt:
            self._disk.damage(fault)
        return is_felt

    def _kill(self) -> None:
        """Sessions that come meanwhile wait."""
        began = self._lives.now()
        self._traffic.of.phase = RESTART
        self._traffic.call(self._traffic.of.goes_down())
        self._lives.end(kill=True)
        url = self._lives.begin()
        before = self._lives.look()
        self._traffic.call(self._traffic.of.goes_up(url))
        self._note("kill -9", began, before)

    def _note(self, what: str, began: float, before: Told) -> None:
        ended, at_end = self._lives.now(), self._lives.look()
        now = self._lives.wait_for(lambda told: is_used_again(at_end, told), USED_AGAIN_S)
        again_s = None if now is None else self._lives.now() - ended
        event = {"what": what, "began_s": began, "ended_s": ended, "used_again_s": again_s}
        self.events.append(event | {"failures": failures(before, now or self._lives.look())})


class Running:
    """The traffic, on a loop and a thread of its own."""

    def __init__(self, traffic: Traffic) -> None:
        self.of = traffic
        self._loop = asyncio.new_event_loop()

    @contextlib.contextmanager
    def running(self, url: str) -> Iterator[None]:
        """At the end all requests that were sent have been answered; if something else went wrong, nobody waits."""
        thread = threading.Thread(target=self._loop.run_until_complete, args=[self._until_over()], daemon=True)
        thread.start()
        self.call(self.of.goes_up(url))
        yield
        self.call(self.of.ends())
        thread.join()
        if self._error is not None:
            raise self._error

    def call(self, coroutine: Any) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    _error: BaseException | None = None

    async def _until_over(self) -> None:
        try:
            await self.of.run()
        except BaseException as error:
            self._error = error


def soak(lives: Lives, disk: Disk, traffic: Traffic, turns: list[Turn], progress: Bar) -> dict[str, Any]:
    """All turns, and a look at what is left. Raises ServerError."""
    running = Running(traffic)
    weather = Weather(lives, disk, running)
    progress.begin("the server starts")
    url, processor_s = lives.begin(), -time.process_time()
    traffic.phase = CALM
    with running.running(url):
        weather.wait_until_used()
        for number, turn in enumerate(turns, 1):
            progress.begin(f"{number} of {len(turns)}, {turn.fault or 'kill -9'}; {so_far(traffic)}")
            weather.let(turn)
    processor_s += time.process_time()
    progress.begin("all becomes quiet")
    until_settled(lives.server, all_cold=True)
    is_left = left(lives.server)
    lives.end(kill=False)
    return {
        "seconds": lives.now(),
        "sessions": traffic.sessions,
        "phases": {phase: summed_up(counts) for phase, counts in traffic.counts.items()},
        "messages": traffic.errors,
        "returns": traffic.returns,
        "returns_of_before": traffic.returns_of_before,
        "slices": traffic.slices,
        "events": weather.events,
        "lives": [life.as_json() for life in lives.lives],
        "samples": lives.samples,
        "left": is_left,
        "client_processor_s": processor_s,
        "disk_is_small": disk.is_small,
    }


def summed_up(counts: Counts) -> dict[str, Any]:
    return {"number": counts.number, "first_s": quantiles(counts.first_s), "seconds": quantiles(counts.seconds)}


def so_far(traffic: Traffic) -> str:
    counted = [counts.number for counts in list(traffic.counts.values())]
    requests, misled, errors = (sum(one[what] for one in counted) for what in ("requests", "misled", "errors"))
    return f"{traffic.sessions:,} sessions, {requests:,} requests, {misled} wrong answers, {errors} errors"


def main(
    context: typer.Context,
    minutes: Annotated[float, typer.Option(min=0.5, help="Without the starts of the server.")] = 60,
    rate: Annotated[float, typer.Option(min=0.1, help="New sessions a second.")] = 20,
    rounds: Annotated[int, typer.Option(min=0, help="Of all faults; 0: one in 7.5 minutes.")] = 0,
    kills: Annotated[int, typer.Option(min=0, help="Of the server, with SIGKILL.")] = 2,
    seed: Annotated[int, typer.Option(help="Of sessions and faults.")] = 0,
    codec: Annotated[str, typer.Option(help="Of docs/codec.md.")] = "wht-5x",
    warm_up: Annotated[float, typer.Option(min=0, help="Seconds of each life until memory counts.")] = 120,
    most_growth: Annotated[float, typer.Option(help="MiB an hour, of a life of 15 minutes or more.")] = 64,
    out: Annotated[Path, typer.Option(help="Folder for JSON, plot, logs, and the disk.")] = Path("build", "soak"),
    plot_only: Annotated[Path | None, typer.Option(help="Show and plot this JSON of an earlier run again.")] = None,
) -> None:
    """Sessions on a server whose disk fails and which is killed."""
    console = make_console()
    if plot_only is not None:
        return show(read_report(plot_only, NAME), plot_only.with_suffix(".png"), console)
    leave_on_signals()
    turns = schedule(seed, 60 * minutes, rounds or max(1, round(minutes / ROUND_MINUTES)), kills)
    traffic = Traffic(str(MODEL), rate, seed)
    found = run(traffic, turns, rate, codec, seed, out.resolve(), console)
    path = write_report(new_report(NAME, context.params, [], {}, {}) | found, out)
    console.print(f"  {path}", soft_wrap=True)
    report = read_report(path, NAME)
    show(report, path.with_suffix(".png"), console)
    raise typer.Exit(1 if failed(report) else 0)


def run(
    traffic: Traffic, turns: list[Turn], rate: float, codec: str, seed: int, out: Path, console: Console
) -> dict[str, Any]:
    """Leaves with status 1 if the server does not live as it should."""
    out.mkdir(parents=True, exist_ok=True)

    def of_traffic() -> Told:
        requests = sum(counts.number["requests"] for counts in list(traffic.counts.values()))
        return {"open_sessions": traffic.open_sessions, "requests": requests}

    try:
        with (
            disk(out, int(DISK_S * rate * SESSION_BYTES), seed) as folder,
            Bar(console, "soak") as bar,
            Lives(out, folder, rate, codec, of_traffic) as lives,
        ):
            return soak(lives, folder, traffic, turns, bar)
    except ServerError as error:
        console.print(error.log_tail, markup=False, soft_wrap=True)
        console.print(f"  {error} (log: {error.log})", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None


if __name__ == "__main__":
    typer.run(main)
