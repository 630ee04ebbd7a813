"""An hour of faults: agents and chats on two servers whose disk and Redis fail, which are reset, sleep, and are killed.

Both servers keep compressed blocks in RAM, on a disk of their own and in one Redis, with room for a tenth of the open
sessions. A third server is plain vLLM: each answer is compared with its answer to the same prompt.

    make soak MINUTES=60
    python tests/helpers/soak_hour.py [--minutes 60] [--agents 150] [--rate 1] [--kills 2] [--seed 0] [--out FOLDER]

Exit status 1 if a request failed, an answer was wrong, the stores were not in use again after a fault, a fault was not
felt, no session came back after a kill or on the other server, answers became slower, memory grew, or something was
left. See docs/benchmarks.md.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import repo_benchmarks  # noqa: F401 it makes them importable
import typer
from redis_server import RedisServer
from rich.console import Console
from soak_chats import Traffic
from soak_chats import agents as sessions
from soak_faults import FELT_LATER, OF_REDIS, Disk, Event, Fault, Order, disk, redis_failing, schedule
from soak_lives import CODE_BYTES, DISK_SHARE, MIB, MODEL, Life, Server, Setting, Told, pause, rise, wait_for

from manthan.benchmarks.arms import leave_on_signals, make_console, new_report, tell_codec, where, write_report
from manthan.benchmarks.endpoint import ServerError
from manthan.benchmarks.progress import Bar

REDIS_ROOM, REDIS_ITSELF = 1.25, 4 << 20
"""Redis has a quarter more than the budget, as docs/redis.md asks, and what it takes before it has a block. So it has
evicted some of what the disk loses."""
ROUND_MINUTES = 10.0
AGENT_TOKENS, CHAT_TOKENS, CHAT_S = 550, 140, 20.0
"""Tokens of an open session on average, and seconds that a short chat is open."""
FELT_S = 30.0
"""Time by which a fault lasts longer until somebody felt it."""
USED_AGAIN_S = 180.0
USED_BLOCKS, USED_TOKENS = 20, 64
"""Blocks encoded, and tokens read from a tier behind RAM, since a fault is over: then the store is in use again."""
QUIET_S = 120.0
WINDOW_S = 600.0
SLOWER = 1.1
"""Most that p90 of the last WINDOW_S may be, in times of that of the first, in a soak that has room for both."""
ENOUGH = 20
"""A kill is judged by its own server's sessions if that many returned."""
JUDGED_S = 900.0
"""Memory of a life is judged if it is that long: before, it says too little."""
UNANSWERED = "lookups_total{unanswered}"
BUSY = ("num_requests_running", "num_requests_waiting", "sessions{active}")
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
    found = Counter[str]()
    for earlier, later in zip(before, now, strict=True):
        for name, value in later.items():
            if name.startswith("failures_total{"):
                found[name[len("failures_total{") : -1]] += int(value - earlier.get(name, 0))
    return dict(+found)


def felt(fault: Fault, before: Sequence[Told], now: Sequence[Told]) -> dict[str, int]:
    """Return what came of a fault that lasts: failed blocks by cause, and for Redis lookups without an answer.

    Nothing came of one of Redis that no server has noticed: on a busy machine, lookups stay unanswered without a fault.
    """
    found = Counter(failures(before, now))
    if fault in OF_REDIS:
        if all(told.get("cold_store_up") for told in now):
            return {}
        found[UNANSWERED] = int(
            sum(told.get(UNANSWERED, 0) for told in now) - sum(told.get(UNANSWERED, 0) for told in before)
        )
    return dict(+found)


class Weather:
    """Has all that was scheduled happen to the servers, one thing after the other. events: what came of it."""

    def __init__(self, servers: Sequence[Server], disk: Disk, redis: RedisServer, traffic: Traffic) -> None:
        self._servers, self._disk, self._redis, self._traffic = servers, disk, redis, traffic
        self.events: list[dict[str, Any]] = []

    def play(self, events: Sequence[Event], bar: Bar) -> None:
        """Begin when there is something to lose. Raises ServerError."""
        if not self._used_again(self._servers, [{} for _ in self._servers]):
            raise self._servers[0].server.error(f"The cold stores were not in use after {USED_AGAIN_S:.0f} s.")
        for number, event in enumerate(events, 1):
            bar.begin(f"{number} of {len(events)}, {event.what}; {so_far(self._traffic.counts)}")
            self._let(event)

    def _let(self, event: Event) -> None:
        """Takes longer than the event if the store is not in use again by its end."""
        until = time.monotonic() + event.seconds
        pause(self._servers, event.calm_s)
        self._traffic.phase = str(event.what)
        self._fail(event.what, event.lasts_s) if isinstance(event.what, Fault) else self._order(event)
        pause(self._servers, until - time.monotonic())

    def _fail(self, fault: Fault, lasts_s: float) -> None:
        before, began = self._look(self._servers), time.monotonic()
        found: list[Told] | None = None
        with redis_failing(self._redis, fault) if fault in OF_REDIS else self._disk.failing(fault):
            pause(self._servers, lasts_s)
            if fault not in FELT_LATER:
                found = wait_for(self._servers, lambda now: self._is_felt(fault, before, now), FELT_S)
        during = felt(fault, before, found or before) if fault in OF_REDIS else None
        self._note(str(fault), self._servers, began, before, during)

    def _is_felt(self, fault: Fault, before: Sequence[Told], now: Sequence[Told]) -> bool:
        """Damage more files if not: what was damaged may have been in nobody's way."""
        is_felt = bool(felt(fault, before, now))
        if not is_felt:
            self._disk.damage(fault)
        return is_felt

    def _order(self, event: Event) -> None:
        server, before, began = self._servers[event.server], self._look(self._servers), time.monotonic()
        if event.what is Order.kill:
            self._traffic.goes_down(event.server)
            server.end(kill=True)
            server.start()
            life = server.wait()
            before[event.server] = server.look()
            self._traffic.goes_up(event.server, server.server.url, life)
        elif event.what is Order.sleep:
            server.sleep()
            pause(self._servers, min(event.lasts_s, 10.0))
            server.wake()
        else:
            server.reset(drop_all=event.what is Order.reset_all, stop_running=True)
            if event.what is Order.reset_all:
                self._traffic.was_reset(event.server)
        self._note(str(event.what), [server], began, [before[event.server]])

    def _note(
        self,
        what: str,
        servers: Sequence[Server],
        began: float,
        before: list[Told],
        during: dict[str, int] | None = None,
    ) -> None:
        """during: found while the event lasted; None to count until the stores are used again."""
        ended = time.monotonic()
        now = self._used_again(servers, self._look(servers))
        again_s = time.monotonic() - ended if now else None
        found = failures(before, now or self._look(servers)) if during is None else during
        self.events.append({"what": what, "lasted_s": ended - began, "used_again_s": again_s, "failures": found})

    def _used_again(self, servers: Sequence[Server], before: list[Told]) -> list[Told] | None:
        return wait_for(servers, lambda now: all(map(is_used_again, before, now)), USED_AGAIN_S)

    def _look(self, servers: Sequence[Server]) -> list[Told]:
        return [server.look() for server in servers]


def soak(
    servers: Sequence[Server],
    plain: Server,
    disk: Disk,
    redis: RedisServer,
    traffic: Traffic,
    events: list[Event],
    bar: Bar,
) -> dict[str, Any]:
    """Play all events, and look at what is left. Raises ServerError."""
    bar.begin("the servers start")
    for server in (*servers, plain):
        server.start()
    for server in (*servers, plain):
        life = server.wait()
        if server is not plain:
            traffic.goes_up(server.number, server.server.url, life)
    traffic.plain_url = plain.server.url
    weather, began = Weather(servers, disk, redis, traffic), time.monotonic()

    async def together() -> None:
        running = asyncio.create_task(traffic.run())
        try:
            await asyncio.to_thread(weather.play, events, bar)
        except asyncio.CancelledError:
            Server.is_leaving.set()  # what plays in the thread would go on to its end
            raise
        traffic.ends()
        await running

    asyncio.run(together())
    bar.begin("all becomes quiet")
    left = []
    for server in servers:
        wait_for([server], lambda told: is_quiet(told[0]), QUIET_S)
        now = server.look()
        left.append({"pool": now["kv_cache_usage_perc"], "active": now["sessions{active}"]})
    for server in (*servers, plain):
        server.end(kill=False)
    return {
        "seconds": time.monotonic() - began,
        "sessions": traffic.sessions,
        "counts": traffic.counts,
        "messages": traffic.errors,
        "returns": traffic.returns,
        "p90_s": p90s(traffic.waits),
        "events": weather.events,
        "left": left,
    }


def p90s(waits: Sequence[tuple[float, float]]) -> list[float]:
    """Return the p90 of the seconds that answers took, of the first and of the last WINDOW_S of a soak."""
    if not waits:
        return []
    first, last = min(waits)[0] + WINDOW_S, max(waits)[0] - WINDOW_S
    parts = [s for at, s in waits if at <= first], [s for at, s in waits if at >= last]
    return [float(np.percentile(part, 90)) for part in parts]


def so_far(counts: Counter[str]) -> str:
    wrong = counts["misled"] + counts["stale"]
    return f"{counts['requests']:,} requests, {wrong} wrong answers, {counts['errors']} errors"


# -- what was found -------------------------------------------------------------------------------------


def failed(report: dict[str, Any]) -> list[str]:
    """Say what is not as it should be, a sentence each."""
    counts, lives, most = report["counts"], report["lives"], report["arguments"]["most_rise"]
    events = report["events"]
    lost = [event for event in events if event["used_again_s"] is None]
    happened, noticed = {event["what"] for event in events}, {event["what"] for event in events if event["failures"]}
    killed = [number for number, life in enumerate(lives, 1) if number > 3 and life["server"] >= 0]
    first, last = report["p90_s"] or (0.0, 0.0)
    wrong = {
        f"{counts.get('errors')} requests failed": counts.get("errors"),
        f"{counts.get('misled')} answers are surely not the plain server's": counts.get("misled"),
        f"{counts.get('stale')} sessions came back from before a reset of all": counts.get("stale"),
        "nothing was checked": not counts.get("checked"),
        "no session came back on the other server": not came_back(report, "other"),
        f"p90 of answers rose from {first:.2f} to {last:.2f} s": report["seconds"] >= 2 * WINDOW_S
        and last > SLOWER * first,
    }
    for number, left in enumerate(report["left"]):
        wrong[f"server {number}: {left['pool']:.1%} of the pool is still in use"] = left["pool"]
        wrong[f"server {number}: {left['active']:.0f} sessions are active"] = left["active"]
    for number, life in enumerate(lives, 1):
        risen = rise(life["memory"], report["arguments"]["warm_up"])
        is_judged = life["server"] >= 0 and life["end_s"] - life["ready_s"] >= JUDGED_S
        if is_judged and risen is not None:
            wrong[f"memory rose by {risen.mib:.1f} MiB in life {number}, {risen.an_hour:.1f} an hour"] = (
                risen.mib > most
            )
    return [
        *(sentence for sentence, is_so in wrong.items() if is_so),
        *(f"the store was not in use again after {event['what']}" for event in lost),
        *(f"nobody felt the fault {one}" for one in Fault if one in happened - FELT_LATER - noticed),
        *(f"no session came back after the kill before life {one}" for one in killed if not survived(report, one)),
    ]


def came_back(report: dict[str, Any], who: str) -> int:
    """Return the number of sessions that found tokens: of "4 before", say, or of all "other"."""
    return sum(counts.get("came_back", 0) for key, counts in report["returns"].items() if who in (key, key.split()[1]))


def survived(report: dict[str, Any], life: int) -> bool:
    """True if sessions of before a kill came back in the life after it; of any server's, where few were its own."""
    own = f"{life} before"
    few = report["returns"].get(own, {}).get("returns", 0) < ENOUGH
    return came_back(report, own) + (few and came_back(report, f"{life} other")) > 0


def show(report: dict[str, Any], console: Console) -> None:
    """Print what happened, what came of it, and what is wrong."""
    minutes, counts = report["seconds"] / 60, report["counts"]
    lines = [where(report), f"{report['sessions']:,} sessions in {minutes:.1f} min: {so_far(Counter(counts))}"]
    lines.append(", ".join(f"{count:,} {what}" for what, count in sorted(counts.items())))
    first, last = report["p90_s"]
    lines.append(f"p90 of answers: {first:.2f} s in the first {WINDOW_S / 60:.0f} min, {last:.2f} s in the last")
    for event in report["events"]:
        again = "never" if event["used_again_s"] is None else f"{event['used_again_s']:.1f} s later"
        causes = ", ".join(f"{cause} {count:,}" for cause, count in sorted(event["failures"].items())) or "none"
        lines.append(f"{event['what']}: {event['lasted_s']:.1f} s; in use again: {again}; failures: {causes}")
    for number, life in enumerate(report["lives"], 1):
        name = "plain vLLM" if life["server"] < 0 else f"server {life['server']}"
        sizes = [nbytes / MIB for _, nbytes in life["memory"]]
        risen = rise(life["memory"], report["arguments"]["warm_up"])
        more = "" if risen is None else f", rise {risen.mib:+.1f} MiB, {risen.an_hour:+.1f} an hour"
        lasted = (life["end_s"] - life["ready_s"]) / 60
        lines.append(f"life {number}, {name}: {lasted:.1f} min, {min(sizes):,.0f} to {max(sizes):,.0f} MiB{more}")
    for who, found in sorted(report["returns"].items()):
        kept = found["cached"] / found["full"] if found["full"] else 0.0
        back = f"{found['came_back']:,} of {found['returns']:,} came back"
        lines.append(f"life and origin, {who}: {back}, {kept:.0%} of their tokens were not computed again")
    for line in lines:
        console.print(f"  {line}", soft_wrap=True)
    for message in [*report["messages"], *(f"FAILED: {sentence}" for sentence in failed(report))]:
        console.print(f"  {message}", style="red", markup=False, soft_wrap=True)


def main(
    context: typer.Context,
    minutes: Annotated[float, typer.Option(min=0.5, help="Without the starts of the servers.")] = 60,
    agents: Annotated[int, typer.Option(min=1, help="At a time.")] = 150,
    speed: Annotated[float, typer.Option(min=0.1, help="Of the agents, in times of the trace's.")] = 1,
    rate: Annotated[float, typer.Option(min=0.1, help="New short chats a second.")] = 1,
    rounds: Annotated[int, typer.Option(min=0, help="Of all faults; 0: one in 10 minutes.")] = 0,
    kills: Annotated[int, typer.Option(min=0, help="Of a server, with SIGKILL.")] = 2,
    part: Annotated[str, typer.Option(help="Of the faults, resets, sleeps and kills; 1/2: the first half.")] = "1/1",
    store_share: Annotated[float, typer.Option(min=0.01, help="Room for so much of the open sessions.")] = 0.1,
    seed: Annotated[int, typer.Option(help="Of sessions and faults.")] = 0,
    codec: Annotated[str, typer.Option(help="Of docs/codec.md.")] = "wht-5x",
    flags: Annotated[str, typer.Option(help="Further flags of all servers.")] = "",
    warm_up: Annotated[float, typer.Option(min=0, help="Seconds of each life until memory counts.")] = 600,
    most_rise: Annotated[
        float, typer.Option(help="MiB that a life's memory may rise from then on. The report has MiB an hour too.")
    ] = 10,
    out: Annotated[Path, typer.Option(help="Folder for JSON, logs, and the disk.")] = Path("build", "soak"),
) -> None:
    """Agents and chats on two servers to which everything happens."""
    console = make_console()
    leave_on_signals()
    at, parts = map(int, part.split("/"))
    events = schedule(seed, 60 * minutes, rounds or max(1, round(minutes / ROUND_MINUTES)), kills, (at, parts))
    traffic = Traffic(str(MODEL), rate, sessions(speed), agents, seed)
    nbytes = int(store_share * CODE_BYTES * (agents * AGENT_TOKENS + rate * CHAT_S * CHAT_TOKENS))
    found = run(traffic, events, nbytes, codec, flags.split(), seed, out.resolve(), console)
    report = new_report("soak_hour", context.params, [], {}, {}) | {"store_bytes": nbytes} | found
    console.print(f"  {write_report(report, out)}", soft_wrap=True)
    tell_codec(out / "server-0-1.log", console)
    show(report, console)
    raise typer.Exit(1 if failed(report) else 0)


def run(
    traffic: Traffic,
    events: list[Event],
    nbytes: int,
    codec: str,
    flags: Sequence[str],
    seed: int,
    out: Path,
    console: Console,
) -> dict[str, Any]:
    """Leaves with status 1 if a server does not live as it should."""
    out.mkdir(parents=True, exist_ok=True)
    lives = list[Life]()
    memory = ["--maxmemory", str(int(REDIS_ROOM * nbytes) + REDIS_ITSELF), "--maxmemory-policy", "volatile-ttl"]
    try:
        with (
            RedisServer(out, memory) as redis,
            disk(out, int(2 * DISK_SHARE * nbytes), seed) as folder,
            Bar(console, "soak") as bar,
            contextlib.ExitStack() as stack,
        ):
            setting = Setting(out, folder.folder, folder.environment, redis.url, codec, nbytes, flags)
            first, second, plain = (stack.enter_context(Server(number, setting, lives)) for number in (0, 1, -1))
            found = soak([first, second], plain, folder, redis, traffic, events, bar)
    except ServerError as error:
        console.print(error.log_tail, markup=False, soft_wrap=True)
        console.print(f"  {error} (log: {error.log})", style="red", markup=False, soft_wrap=True)
        for message in traffic.errors:
            console.print(f"  {message}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    return found | {"lives": [asdict(life) for life in lives]}


if __name__ == "__main__":
    typer.run(main)
