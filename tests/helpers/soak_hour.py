"""An hour of faults: agents and chats on two servers whose disk fails, which are reset, sleep, and are killed.

Both servers keep compressed blocks in RAM, on a disk of their own and in one Redis, with room for a tenth of the open
sessions. A third server is plain vLLM: each answer is compared with its answer to the same prompt, and its memory with
theirs.

    make soak MINUTES=60
    python tests/helpers/soak_hour.py [--minutes 60] [--agents 150] [--rate 1] [--kills 2] [--seed 0] [--out FOLDER]
    python tests/helpers/soak_hour.py --plot-only FOLDER/soak_hour.json

Exit status 1 if a request failed, an answer was wrong, the stores were not in use again after a fault, a fault was not
felt, no session came back after a kill or on the other server, memory grew, or something was left. See
docs/benchmarks.md.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import repo_benchmarks  # noqa: F401 it makes them importable
import typer
from redis_server import RedisServer
from rich.console import Console
from soak_chats import CALM, Counts, Traffic
from soak_chats import agents as sessions
from soak_faults import FELT_LATER, Disk, Event, Fault, Order, disk, schedule
from soak_lives import (
    CODE_BYTES,
    DISK_SHARE,
    MODEL,
    Clock,
    Life,
    Server,
    Setting,
    Told,
    left,
    pause,
    wait_for,
)
from soak_report import failed, quantiles, show

from manthan.benchmarks.arms import leave_on_signals, make_console, new_report, read_report, tell_codec, write_report
from manthan.benchmarks.endpoint import ServerError
from manthan.benchmarks.progress import Bar

NAME = "soak_hour"
REDIS_ITSELF = 4 << 20
"""Bytes that Redis takes before it has a block; with that it evicts what the disk may have lost."""
ROUND_MINUTES = 10.0
AGENT_TOKENS, CHAT_TOKENS, CHAT_S = 550, 140, 20.0
"""Tokens of an open session on average, and seconds that a short chat is open."""
FELT_S = 30.0
"""Time by which a fault lasts longer until somebody felt it."""
USED_AGAIN_S = 180.0
USED_BLOCKS, USED_TOKENS = 20, 64
"""Blocks encoded, and tokens read from a tier behind RAM, since a fault is over: then the store is in use again."""
QUIET_S = 120.0
BUSY = ("num_requests_running", "num_requests_waiting", "sessions{hot}", "sessions{evicting}")
READ_FROM = tuple(f"prompt_tokens_cached_by_source_total{{{source}}}" for source in ("disk", "external_unspecified"))


def is_used_again(before: Told, now: Told) -> bool:
    """True if blocks were stored and read since `before`."""
    put = now.get("encoded_blocks_total", 0) - before.get("encoded_blocks_total", 0)
    read = sum(now.get(name, 0) - before.get(name, 0) for name in READ_FROM)
    return put >= USED_BLOCKS and read >= USED_TOKENS and now.get("cold_store_up") == 1


def is_quiet(now: Told) -> bool:
    """True if nothing runs. A session for which the shared store has no room stays idle."""
    return not any(now.get(name, 0) for name in BUSY)


def failures(before: Sequence[Told], now: Sequence[Told]) -> dict[str, int]:
    """Return blocks by cause."""
    found: dict[str, int] = {}
    for earlier, later in zip(before, now, strict=True):
        for name, value in later.items():
            if name.startswith("failures_total{") and (new := int(value - earlier.get(name, 0))):
                cause = name[len("failures_total{") : -1]
                found[cause] = found.get(cause, 0) + new
    return found


class Weather:
    """Has all that was scheduled happen to the servers, one thing after the other. events: what came of it."""

    def __init__(self, servers: Sequence[Server], disk: Disk, clock: Clock, traffic: "Running") -> None:
        self._servers, self._disk, self._clock, self._traffic = servers, disk, clock, traffic
        self.events: list[dict[str, Any]] = []

    def wait_until_used(self) -> None:
        """Wait until there is something to lose. Raises ServerError."""
        if not self._used_again(self._servers, [{} for _ in self._servers]):
            raise self._servers[0].server.error(f"The cold stores were not in use after {USED_AGAIN_S:.0f} s.")

    def let(self, event: Event) -> None:
        """Takes longer than the event if the store is not in use again by its end. Raises ServerError."""
        until = time.monotonic() + event.seconds
        pause(self._servers, event.calm_s)
        what = event.what
        self._traffic.of.phase = str(what)
        self._fail(what, event.lasts_s) if isinstance(what, Fault) else self._order(event)
        self._traffic.of.phase = CALM
        pause(self._servers, until - time.monotonic())

    def _fail(self, fault: Fault, lasts_s: float) -> None:
        before, began = self._look(self._servers), self._clock.now()
        with self._disk.failing(fault):
            pause(self._servers, lasts_s)
            if fault not in FELT_LATER:
                wait_for(self._servers, lambda now: self._is_felt(fault, before, now), FELT_S)
        self._note(str(fault), self._servers, began, before)

    def _is_felt(self, fault: Fault, before: Sequence[Told], now: Sequence[Told]) -> bool:
        """Damage more files if not: what was damaged may have been in nobody's way."""
        is_felt = bool(failures(before, now))
        if not is_felt:
            self._disk.damage(fault)
        return is_felt

    def _order(self, event: Event) -> None:
        server, before, began = self._servers[event.server], self._look(self._servers), self._clock.now()
        about: dict[str, Any] = {"server": event.server}
        if event.what is Order.kill:
            self._traffic.call(self._traffic.of.goes_down(event.server))
            server.end(kill=True)
            server.start()
            life = server.wait()
            before[event.server] = server.look()
            self._traffic.call(self._traffic.of.goes_up(event.server, server.server.url, life))
        elif event.what is Order.sleep:
            server.sleep()
            pause(self._servers, min(event.lasts_s, 10.0))
            server.wake()
        else:
            drop_all = event.what is Order.reset_all
            about["tries"] = server.reset(drop_all=drop_all, stop_running=True)
            if drop_all:
                self._traffic.call(self._traffic.of.was_reset(event.server))
        self._note(str(event.what), [server], began, [before[event.server]], **about)

    def _note(self, what: str, servers: Sequence[Server], began: float, before: list[Told], **about: Any) -> None:
        ended, at_end = self._clock.now(), self._look(servers)
        now = self._used_again(servers, at_end)
        again_s = self._clock.now() - ended if now else None
        event = {"what": what, "began_s": began, "ended_s": ended, "used_again_s": again_s} | about
        self.events.append(event | {"failures": failures(before, now or self._look(servers))})

    def _used_again(self, servers: Sequence[Server], before: list[Told]) -> list[Told] | None:
        def done(now: list[Told]) -> bool:
            return all(map(is_used_again, before, now))

        return wait_for(servers, done, USED_AGAIN_S)

    def _look(self, servers: Sequence[Server]) -> list[Told]:
        return [server.look() for server in servers]


class Running:
    """The traffic, on a loop and a thread of its own."""

    def __init__(self, traffic: Traffic) -> None:
        self.of = traffic
        self._loop = asyncio.new_event_loop()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """At the end all requests that were sent have been answered; if something else went wrong, nobody waits."""
        thread = threading.Thread(target=self._loop.run_until_complete, args=[self._until_over()], daemon=True)
        thread.start()
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


def soak(
    servers: Sequence[Server], plain: Server, disk: Disk, clock: Clock, traffic: Traffic, events: list[Event], bar: Bar
) -> dict[str, Any]:
    """Play all events, and look at what is left. Raises ServerError."""
    running = Running(traffic)
    weather = Weather(servers, disk, clock, running)
    bar.begin("the servers start")
    for server in (*servers, plain):
        server.start()
    lives = [server.wait() for server in (*servers, plain)]
    processor_s = -time.process_time()
    traffic.plain_url, traffic.phase = plain.server.url, CALM
    with running.running():
        for server, life in zip(servers, lives, strict=False):
            running.call(traffic.goes_up(server.number, server.server.url, life))
        weather.wait_until_used()
        for number, event in enumerate(events, 1):
            bar.begin(f"{number} of {len(events)}, {event.what}; {so_far(traffic)}")
            weather.let(event)
    processor_s += time.process_time()
    bar.begin("all becomes quiet")
    are_left = []
    for server in servers:
        wait_for([server], lambda told: is_quiet(told[0]), QUIET_S)
        are_left.append(left(server.look()))
    for server in (*servers, plain):
        server.end(kill=False)
    return {
        "seconds": clock.now(),
        "sessions": traffic.sessions,
        "phases": {phase: summed_up(counts) for phase, counts in traffic.counts.items()},
        "messages": traffic.errors,
        "returns": traffic.returns,
        "returns_of_before": traffic.returns_of_before,
        "returns_of_other": traffic.returns_of_other,
        "slices": traffic.slices,
        "events": weather.events,
        "left": are_left,
        "client_processor_s": processor_s,
        "disk_is_small": disk.is_small,
    }


def summed_up(counts: Counts) -> dict[str, Any]:
    return {"number": counts.number, "first_s": quantiles(counts.first_s), "seconds": quantiles(counts.seconds)}


def so_far(traffic: Traffic) -> str:
    counted = [counts.number for counts in list(traffic.counts.values())]
    whats = ("requests", "misled", "stale", "errors")
    requests, misled, stale, errors = (sum(one[what] for one in counted) for what in whats)
    return f"{traffic.sessions:,} sessions, {requests:,} requests, {misled + stale} wrong answers, {errors} errors"


def main(
    context: typer.Context,
    minutes: Annotated[float, typer.Option(min=0.5, help="Without the starts of the servers.")] = 60,
    agents: Annotated[int, typer.Option(min=1, help="At a time.")] = 150,
    speed: Annotated[float, typer.Option(min=0.1, help="Of the agents, in times of the trace's.")] = 1,
    rate: Annotated[float, typer.Option(min=0.1, help="New short chats a second.")] = 1,
    rounds: Annotated[int, typer.Option(min=0, help="Of all faults; 0: one in 10 minutes.")] = 0,
    kills: Annotated[int, typer.Option(min=0, help="Of a server, with SIGKILL.")] = 2,
    store_share: Annotated[float, typer.Option(min=0.01, help="Room for so much of the open sessions.")] = 0.1,
    seed: Annotated[int, typer.Option(help="Of sessions and faults.")] = 0,
    codec: Annotated[str, typer.Option(help="Of docs/codec.md.")] = "wht-5x",
    warm_up: Annotated[float, typer.Option(min=0, help="Seconds of each life until memory counts.")] = 600,
    most_rise: Annotated[float, typer.Option(help="MiB that a life's memory may rise from then on.")] = 10,
    out: Annotated[Path, typer.Option(help="Folder for JSON, plot, logs, and the disk.")] = Path("build", "soak"),
    plot_only: Annotated[Path | None, typer.Option(help="Show and plot this JSON of an earlier run again.")] = None,
) -> None:
    """Agents and chats on two servers to which everything happens."""
    console = make_console()
    if plot_only is not None:
        return show(read_report(plot_only, NAME), plot_only.with_suffix(".png"), console)
    leave_on_signals()
    events = schedule(seed, 60 * minutes, rounds or max(1, round(minutes / ROUND_MINUTES)), kills)
    traffic = Traffic(str(MODEL), rate, sessions(speed), agents, seed)
    nbytes = int(store_share * CODE_BYTES * (agents * AGENT_TOKENS + rate * CHAT_S * CHAT_TOKENS))
    found = run(traffic, events, nbytes, codec, seed, out.resolve(), console)
    path = write_report(new_report(NAME, context.params, [], {}, {}) | {"store_bytes": nbytes} | found, out)
    console.print(f"  {path}", soft_wrap=True)
    report = read_report(path, NAME)
    tell_codec(out / "server-0-1.log", console)
    show(report, path.with_suffix(".png"), console)
    raise typer.Exit(1 if failed(report) else 0)


def run(
    traffic: Traffic, events: list[Event], nbytes: int, codec: str, seed: int, out: Path, console: Console
) -> dict[str, Any]:
    """Leaves with status 1 if a server does not live as it should."""
    out.mkdir(parents=True, exist_ok=True)
    clock, lives, samples = Clock(), list[Life](), list[Told]()
    try:
        with (
            RedisServer(
                out, ["--maxmemory", str(nbytes + REDIS_ITSELF), "--maxmemory-policy", "volatile-ttl"]
            ) as redis,
            disk(out, int(2 * DISK_SHARE * nbytes), seed) as folder,
            Bar(console, "soak") as bar,
            contextlib.ExitStack() as stack,
        ):
            setting = Setting(out, folder.folder, folder.environment, redis.url, codec, nbytes)
            first, second, plain = (
                stack.enter_context(Server(number, setting, clock, lives, samples)) for number in (0, 1, -1)
            )
            found = soak([first, second], plain, folder, clock, traffic, events, bar)
    except ServerError as error:
        console.print(error.log_tail, markup=False, soft_wrap=True)
        console.print(f"  {error} (log: {error.log})", style="red", markup=False, soft_wrap=True)
        for message in traffic.errors:
            console.print(f"  {message}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    return found | {"lives": [life.as_json() for life in lives], "samples": samples}


if __name__ == "__main__":
    typer.run(main)
