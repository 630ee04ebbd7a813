"""The soak of faults (tests/helpers/soak_hour.py): a minute of it, and that it says what is wrong."""

import asyncio
import json
import os
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
from soak_chats import CALM, RESTART, Traffic
from soak_faults import FELT_LATER, Disk, Fault, schedule
from soak_report import failed, failures, share, total

SCRIPT = Path(soak_hour.__file__)
KILL = "kill -9"


# -- a minute on a real server ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every fault once, and a kill; `folder` is where it is. The codec decodes whatever it is given."""
    folder = tmp_path_factory.mktemp("soak")
    options = "--minutes 1 --rate 3 --kills 1 --warm-up 10 --codec k3v3"
    command = [sys.executable, str(SCRIPT), *options.split(), "--out", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads((folder / "soak_hour.json").read_text())) | {"folder": folder, "said": done.stdout}


@pytest.mark.slow
def test_no_answer_is_wrong_and_no_user_sees_an_error(found: dict[str, Any]) -> None:
    assert (total(found, "errors"), total(found, "misled"), found["messages"]) == (0, 0, [])
    assert total(found, "checked") == total(found, "requests") >= 150
    for what in ("posted", "streamed", "left", "named", "hinted"):
        assert total(found, what) >= 5
    assert total(found, "named") < total(found, "requests")


@pytest.mark.slow
def test_every_fault_is_felt_and_the_store_is_in_use_again_after_each(found: dict[str, Any]) -> None:
    assert {event["what"] for event in found["events"]} == {*Fault, KILL}
    assert all(event["used_again_s"] is not None for event in found["events"])
    felt = failures(found)
    assert all(felt[fault] for fault in Fault if fault not in FELT_LATER)
    assert felt[Fault.eio]["disk"] > 0
    assert felt[Fault.read_only]["disk"] > 0
    assert felt[Fault.hang]["store_down"] > 0
    assert felt[Fault.full]["store_full"] > 0
    assert felt[Fault.flipped]["missing"] > 0


@pytest.mark.slow
def test_sessions_of_before_the_kill_come_back(found: dict[str, Any]) -> None:
    first, second = found["lives"]
    assert first["ready_s"] < first["end_s"] < second["start_s"] < second["ready_s"] < second["end_s"]
    assert "1" not in found["returns_of_before"]
    assert found["returns_of_before"]["2"]["came_back"] > 0
    assert 0 < share(found["returns"]["1"]) <= 1
    assert found["phases"][RESTART]["number"]["requests"] > 0


@pytest.mark.slow
def test_all_tiers_are_used_and_dropped_from(found: dict[str, Any]) -> None:
    told = Counter[str]()
    for life in found["lives"]:
        told.update(life["told"])
    assert told["prompt_tokens_cached_by_source_total{host}"] > 0
    assert told["prompt_tokens_cached_by_source_total{disk}"] > 0
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
    assert "Left when all is quiet: 0.0% of the pool" in said
    assert "FAILED" not in said
    assert "9 of 10" in found["said"] or "10 of 10" in found["said"]  # progress


@pytest.mark.slow
def test_what_is_wrong_is_said(found: dict[str, Any]) -> None:
    calm = {"number": {"requests": 9, "checked": 9, "errors": 2, "misled": 1}, "first_s": {}, "seconds": {}}
    lost = {"what": "hang", "began_s": 60.0, "ended_s": 70.0, "used_again_s": None, "failures": {}}
    leak = [[float(second), (1000 + second) << 20, 4] for second in range(1000)]
    told = found["lives"][0] | {"memory": leak, "ready_s": 0.0, "end_s": 1000.0}
    left = {"pool_in_use": 0.25, "sessions_not_cold": 3.0, "cold_bytes": 2.0, "cold_budget_bytes": 1.0}
    changed = {"phases": {CALM: calm}, "left": left, "lives": [told, found["lives"][1]], "returns_of_before": {}}
    events = [event for event in found["events"] if event["what"] != Fault.hang]
    assert failed(found | changed | {"events": [*events, lost]}) == [
        "2 requests failed",
        "1 wrong answers are surely right when computed anew",
        "25.0% of the pool is still in use",
        "3 sessions are not cold",
        "the cold store is over its budget",
        "the store was not in use again after hang at 70 s",
        "nobody felt the fault hang",
        "no session came back after the kill before life 2",
        "memory grew by 3600 MiB an hour (standard error 0) in life 1",
    ]


# -- its parts ------------------------------------------------------------------------------------------


def test_an_hour_has_every_fault_eight_times_and_two_kills_far_apart() -> None:
    turns = schedule(seed=0, seconds=3600, rounds=8, kills=2)
    assert Counter(turn.fault for turn in turns) == {**dict.fromkeys(Fault, 8), None: 2}
    assert sum(turn.seconds for turn in turns) == pytest.approx(3600)
    assert all(turn.calm_s + turn.fault_s < turn.seconds for turn in turns)
    assert [number for number, turn in enumerate(turns) if turn.fault is None] == [24, 49]
    assert turns == schedule(0, 3600, 8, 2) != schedule(1, 3600, 8, 2)


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


def played(handler: Handler, script: Callable[[Traffic, str], Awaitable[None]]) -> Traffic:
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
        traffic = Traffic("model", rate=200, seed=0)
        traffic.phase = CALM
        running = asyncio.create_task(traffic.run())
        await script(traffic, url)
        await traffic.ends()
        await running
        await runner.cleanup()
        return traffic

    return asyncio.run(play())


async def a_moment(traffic: Traffic, url: str) -> None:
    await traffic.goes_up(url)
    await asyncio.sleep(0.3)


def counted(traffic: Traffic) -> Counter[str]:
    return sum((counts.number for counts in traffic.counts.values()), Counter[str]())


@pytest.mark.parametrize(("margin", "counted_as"), [(2.5, "misled"), (0.5, "doubtful")])
def test_an_answer_that_is_right_only_when_computed_anew_is_wrong(margin: float, counted_as: str) -> None:
    async def handler(request: web.Request) -> web.Response:
        body = await request.json()
        prompt = body["prompt"] if "prompt" in body else "".join(said["content"] for said in body["messages"])
        name = prompt.split()[-2]
        right = prompt.split(f"{name} = ")[1][:4] if "cache_salt" in body else "0000"
        usage = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": None}
        choice: dict[str, Any] = {"text": right, "message": {"content": right}, "delta": {"content": right}}
        if body.get("top_logprobs"):
            ranked = ([0.0, -9.0], [-margin - 0.1, -0.1])
            tokens = [{"top_logprobs": [{"logprob": each} for each in one]} for one in ranked]
            choice["logprobs"] = {"content": tokens}
        elif body.get("logprobs"):
            choice["logprobs"] = {"top_logprobs": [{"4": 0.0, "5": -9.0}, {"4": -0.1, "5": -margin - 0.1}]}
        if not body.get("stream"):
            return web.json_response({"choices": [choice], "usage": usage})
        chunks = [{"choices": [{"text": right, "delta": {"content": right}}]}, {"choices": [], "usage": usage}]
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
        return web.Response(text="".join([*lines, "data: [DONE]\n\n"]))

    found = counted(played(handler, a_moment))
    assert found["requests"] > 10
    assert found["wrong"] == found[counted_as] == found["checked"] == found["requests"]
    assert found["errors"] == 0


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
        await traffic.goes_down()
        is_dead.set()
        await asyncio.sleep(0.1)
        await traffic.goes_up(url)
        await asyncio.sleep(0.3)

    traffic = played(handler, kill)
    assert traffic.counts[RESTART].number["retried"] > 10
    assert all("status 503" in error for error in traffic.errors)
