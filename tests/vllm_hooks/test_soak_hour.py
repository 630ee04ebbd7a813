"""The soak (tests/helpers/soak_hour.py): two minutes of it, and that it says what is wrong."""

import asyncio
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import soak_hour
from aiohttp import web
from bench_command import is_png
from soak_chats import CALM, LONGEST, RESTART, Traffic, Turn, agents
from soak_faults import FELT_LATER, Disk, Fault, Order, schedule
from soak_memory import Group, Sample, rise, slope
from soak_report import failed, failures, share, total

SCRIPT = Path(soak_hour.__file__)


# -- two minutes on real servers ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every fault, a sleep, both resets and a kill; `folder` is where it is. The codec decodes whatever it is given."""
    folder = tmp_path_factory.mktemp("soak")
    options = "--minutes 2 --agents 20 --speed 8 --rate 2 --kills 1 --store-share 0.4 --warm-up 10 --codec k3v3"
    command = [sys.executable, str(SCRIPT), *options.split(), "--out", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads((folder / "soak_hour.json").read_text())) | {"folder": folder, "said": done.stdout}


@pytest.mark.slow
def test_no_answer_is_wrong_and_no_user_sees_an_error(found: dict[str, Any]) -> None:
    wrong = [total(found, what) for what in ("errors", "misled", "stale")]
    assert (wrong, found["messages"]) == ([0, 0, 0], [])
    assert total(found, "checked") == total(found, "requests") >= 300
    for what in ("posted", "streamed", "left", "named", "hinted", "agents", "exact"):
        assert total(found, what) >= 5
    assert total(found, "agents") < total(found, "requests")


@pytest.mark.slow
def test_every_fault_is_felt_and_the_stores_are_in_use_again_after_each(found: dict[str, Any]) -> None:
    assert {event["what"] for event in found["events"]} == {*Fault, *Order}
    assert all(event["used_again_s"] is not None for event in found["events"])
    felt = failures(found)
    assert all(felt[fault] for fault in Fault if fault not in FELT_LATER)


@pytest.mark.slow
def test_sessions_come_back_after_the_kill_and_on_the_other_server(found: dict[str, Any]) -> None:
    lives = [[life["server"], life["ready_s"] < life["end_s"]] for life in found["lives"]]
    assert lives == [[0, True], [1, True], [-1, True], [0, True]]
    assert list(found["returns_of_before"]) == ["4"]
    assert found["returns_of_before"]["4"]["came_back"] > 0
    assert 0 < share(found["returns"]["1"]) <= 1
    assert sum(found["returns_of_other"].get(life, {}).get("came_back", 0) for life in "12") > 0


@pytest.mark.slow
def test_all_tiers_are_used_and_dropped_from(found: dict[str, Any]) -> None:
    told = Counter[str]()
    for life in found["lives"]:
        told.update(life["told"])
    for source in ("host", "disk", "external_unspecified"):
        assert told[f"prompt_tokens_cached_by_source_total{{{source}}}"] > 0
    assert told["evictions_total"] > 50
    assert sum(value for name, value in told.items() if name.startswith("dropped_blocks_total{")) > 0


@pytest.mark.slow
def test_it_is_shown_and_drawn_again(found: dict[str, Any]) -> None:
    plot = found["folder"] / "soak_hour.png"
    assert is_png(plot)
    plot.unlink()
    command = [sys.executable, str(SCRIPT), "--plot-only", str(plot.with_suffix(".json"))]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert is_png(plot)
    assert "Server 1 when all is quiet: 0.0% of the pool" in said
    assert "FAILED" not in said
    assert "13 of 13" in found["said"]  # progress


@pytest.mark.slow
def test_what_is_wrong_is_said(found: dict[str, Any]) -> None:
    numbers = {"requests": 9, "checked": 9, "errors": 2, "misled": 1, "stale": 3}
    calm = {"number": numbers, "first_s": {}, "seconds": {}}
    lost = {"what": "hang", "began_s": 60.0, "ended_s": 70.0, "used_again_s": None, "failures": {}}
    leak = [[float(second), (1000 << 20) + (second << 14)] for second in range(1800)]
    told = found["lives"][0] | {"memory": leak, "ready_s": 0.0, "end_s": 1800.0}
    left = found["left"][1] | {"pool_in_use": 0.25, "sessions_hot": 3.0}
    changed = {"phases": {CALM: calm}, "left": [found["left"][0], left], "lives": [told, *found["lives"][1:]]}
    changed |= {"returns_of_before": {}, "returns_of_other": {}, "arguments": {"warm_up": 600.0, "most_rise": 10.0}}
    events = [event for event in found["events"] if event["what"] != Fault.hang]
    assert failed(found | changed | {"events": [*events, lost]}) == [
        "2 requests failed",
        "1 answers are surely not the plain server's",
        "3 sessions came back from before a reset of all",
        "server 1: 25.0% of the pool is still in use",
        "server 1: 3 sessions are hot",
        "the store was not in use again after hang at 70 s",
        "nobody felt the fault hang",
        "no session came back after the kill before life 4",
        "no session came back on the other server",
        "memory rose by 16.9 MiB in life 1, of server 0",
    ]


# -- its parts ------------------------------------------------------------------------------------------


def test_an_hour_has_every_fault_six_times_and_two_kills_far_apart() -> None:
    events = schedule(seed=0, seconds=3600, rounds=6, kills=2)
    often = dict.fromkeys([*Fault, Order.sleep, Order.reset], 6) | {Order.kill: 2, Order.reset_all: 2}
    assert Counter(event.what for event in events) == often
    assert sum(event.seconds for event in events) == pytest.approx(3600)
    assert all(event.calm_s + event.lasts_s < event.seconds for event in events)
    kills = [(number, event.server) for number, event in enumerate(events) if event.what is Order.kill]
    assert kills == [(23, 0), (47, 1)]
    for number, server in kills:  # shared sessions are back soon after nothing was shared
        resets = [event.server for event in events[number - 6 : number] if event.what is Order.reset_all]
        assert resets == [server]
    assert events == schedule(0, 3600, 6, 2) != schedule(1, 3600, 6, 2)


def test_agents_talk_as_those_of_the_trace() -> None:
    trace = agents(1)
    assert len(trace) == 100
    turns = [turn for agent in trace for turn in agent]
    pauses = sorted(turn.pause_s for agent in trace for turn in agent[1:])
    assert 5 <= pauses[len(pauses) // 2] <= 20  # half of them
    assert max(turn.tokens for turn in turns) < LONGEST
    assert sum(map(len, trace)) > 500
    fast = [turn for agent in agents(1000) for turn in agent]
    assert [turn.tokens for turn in fast] == [turn.tokens for turn in turns]
    assert max(turn.pause_s for turn in fast) < max(pauses) / 30


class NoLibrary:
    """Files are damaged without it."""

    environment: dict[str, str] = {}  # noqa: RUF012

    def now(self, fault: str) -> None:
        self.told = fault


@pytest.mark.parametrize("fault", [Fault.flipped, Fault.truncated, Fault.deleted])
def test_half_of_the_files_are_damaged(tmp_path: Path, fault: Fault) -> None:
    whole, page = os.urandom(5 * 4096), 4096
    for number in range(6):
        (tmp_path / f"{number:08d}.seg").write_bytes(whole)
    disk = Disk(tmp_path, NoLibrary(), 1 << 20, seed=0, is_small=False)
    with disk.failing(fault):
        found = [path.read_bytes() for path in tmp_path.glob("*.seg")]
    assert found.count(whole) == 3
    damaged = [each for each in found if each != whole]
    assert len(damaged) == (0 if fault is Fault.deleted else 3)
    for each in damaged if fault is Fault.flipped else ():
        assert Counter(at // page for at, byte in enumerate(each) if byte != whole[at]) == dict.fromkeys(range(5), 1024)
    for each in damaged if fault is Fault.truncated else ():
        assert each == whole[: len(whole) // 2]


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def played(handler: Handler, script: Callable[[Traffic, str], Awaitable[None]], plain: str = "") -> Traffic:
    """Traffic against a server that does what no vLLM can be made to do."""

    async def play() -> Traffic:
        app = web.Application()
        app.router.add_post("/v1/completions", handler)
        app.router.add_post("/v1/chat/completions", handler)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        traffic = Traffic("model", 40, [[Turn(0.0, 0, 4)] * 2], 4, seed=0, plain_url=plain or url)
        traffic.phase = CALM
        running = asyncio.create_task(traffic.run())
        await script(traffic, url)
        await traffic.ends()
        await running
        await runner.cleanup()
        return traffic

    return asyncio.run(play())


async def a_moment(traffic: Traffic, url: str) -> None:
    await traffic.goes_up(0, url, 1)
    await asyncio.sleep(1)


def counted(traffic: Traffic) -> Counter[str]:
    return sum((counts.number for counts in traffic.counts.values()), Counter[str]())


def completion(body: dict[str, Any], text: str, margin: float, lossy: int = 0) -> web.Response:
    """An answer in two tokens: the plain server's margin is that of the second one."""
    usage = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": None}
    choice: dict[str, Any] = {"text": text, "message": {"content": text}, "delta": {"content": text}}
    tokens, ranked = [text[:1], text[1:]], ([0.0, -9.0], [-margin - 0.1, -0.1])
    if body.get("top_logprobs"):
        pairs = zip(tokens, ranked, strict=True)
        told = [{"token": token, "top_logprobs": [{"logprob": each} for each in one]} for token, one in pairs]
        choice["logprobs"] = {"content": told}
    elif body.get("logprobs"):
        choice["logprobs"] = {"tokens": tokens, "top_logprobs": [dict(zip("45", one, strict=True)) for one in ranked]}
    if not body.get("stream"):
        params = {"manthan": {"lossy_tokens": lossy}}
        return web.json_response({"choices": [choice], "usage": usage, "kv_transfer_params": params})
    chunks = [{"choices": [{"text": text, "delta": {"content": text}}]}, {"choices": [], "usage": usage}]
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    return web.Response(text="".join([*lines, "data: [DONE]\n\n"]))


def wants_exact(body: dict[str, Any]) -> bool:
    return "exact" in json.dumps(body.get("kv_transfer_params", {}))


@pytest.mark.parametrize(
    ("margin", "exactly", "else_"),
    [(2.5, "misled", "misled"), (0.5, "misled", "doubtful"), (0.1, "doubtful", "doubtful")],
)
def test_an_answer_that_is_not_the_plain_servers_is_wrong(margin: float, exactly: str, else_: str) -> None:
    """As far as the plain server was sure; who asks for exact KV must get what it says."""

    async def handler(request: web.Request) -> web.Response:
        body = await request.json()
        return completion(body, "1000" if body.get("logprobs") else "1234", margin)

    found = counted(played(handler, a_moment))
    assert 0 < found["exact"] < found["requests"]
    assert found["wrong"] == found["checked"] == found["requests"] - found["errors"]
    assert found[exactly] >= found["exact"]
    assert found["misled"] == {2.5: found["wrong"], 0.5: found["exact"], 0.1: 0}[margin]
    assert found["doubtful"] == found["wrong"] - found["misled"]
    assert found["errors"] == 0


def test_who_asks_for_exact_kv_gets_none_that_is_lossy() -> None:
    async def handler(request: web.Request) -> web.Response:
        body = await request.json()
        return completion(body, "1234", 9.0, lossy=32)

    traffic = played(handler, a_moment)
    found = counted(traffic)
    assert 0 < found["misled"] <= found["exact"]
    assert found["wrong"] == 0
    assert "lossy tokens for who asked for exact ones" in traffic.errors[0]


def test_what_comes_back_from_before_a_reset_of_all_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    for pause in ("THINK_S", "FAR_S"):
        monkeypatch.setattr(f"soak_chats.{pause}", (0.4, 0.6))

    async def handler(request: web.Request) -> web.Response:
        body = await request.json()
        usage = {"prompt_tokens": 900, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 600}}
        choice = {"text": "1234", "message": {"content": "1234"}}
        if body.get("stream"):
            return completion(body, "1234", 9.0)
        return web.json_response({"choices": [choice], "usage": usage})

    async def reset(traffic: Traffic, url: str) -> None:
        await a_moment(traffic, url)
        await traffic.was_reset(0)
        for _ in range(200):  # until sessions of before have returned
            if counted(traffic)["stale"]:
                break
            await asyncio.sleep(0.1)

    traffic = played(handler, reset)
    assert counted(traffic)["stale"] > 0
    assert "tokens of before a reset that drops all" in traffic.errors[0]
    assert counted(played(handler, a_moment))["stale"] == 0


def test_a_status_is_an_error() -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=500, text="oh")

    traffic = played(handler, a_moment)
    found = counted(traffic)
    assert found["errors"] == found["requests"] > 10
    assert "status 500: oh" in traffic.errors[0]


async def hang_up(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def test_a_broken_connection_is_an_error_while_the_server_lives() -> None:
    found = counted(played(hang_up, a_moment))
    assert found["errors"] == found["requests"] > 10
    assert found["retried"] == 0


def test_a_broken_connection_of_a_server_that_was_killed_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("soak_chats.AGAIN_S", 0.1)
    is_dead = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        if is_dead.is_set():
            return web.Response(status=503)
        await is_dead.wait()
        return await hang_up(request)

    async def kill(traffic: Traffic, url: str) -> None:
        await a_moment(traffic, url)
        await traffic.goes_down(0)
        is_dead.set()
        await asyncio.sleep(0.1)
        await traffic.goes_up(1, url, 2)
        await asyncio.sleep(1)

    traffic = played(handler, kill)
    assert traffic.counts[RESTART].number["retried"] > 10
    assert all("status 503" in error for error in traffic.errors)


# -- memory ---------------------------------------------------------------------------------------------


def test_the_slope_is_that_of_the_samples_after_the_warm_up() -> None:
    rng = random.Random(0)
    samples = [Sample(s, int((1000 if s < 60 else 100 + s / 36 + rng.gauss(0, 1)) * 2**20)) for s in range(3600)]
    found = slope(samples, 60)
    assert found is not None
    assert found.mib_per_hour == pytest.approx(100, abs=5 * found.standard_error)
    assert 0.02 < found.standard_error < 0.1  # 1 / (hours' spread · root of 3540)
    assert slope(samples[:5], 3) is None


def test_memory_rises_by_its_highest_median_over_the_first() -> None:
    samples = [Sample(s, (100 + (s >= 720) * 7 + (s == 800) * 900) << 20) for s in range(1200)]
    assert rise(samples, 600) == 7
    assert rise(samples, 720) == 0
    assert rise(samples, 1190) is None


def test_a_group_is_all_that_a_process_started() -> None:
    """A parent that holds little and a child that holds 64 MiB."""
    child = "import sys; held = bytearray(b'x' * (64 << 20)); print('up', flush=True); sys.stdin.read()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        group = Group(process.pid)
        sizes, took = group.memory(), group.processor_s()
        process.communicate()
    assert len(sizes) == 2
    assert sum(sizes.values()) > 64 << 20
    assert sum(took.values()) > 0
    assert group.memory() == {}
