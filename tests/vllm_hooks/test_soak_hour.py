"""The soak (tests/helpers/soak_hour.py): two minutes of it, and that it says what is wrong."""

import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import soak_hour
from aiohttp import web
from soak_chats import Traffic, Turn
from soak_faults import FELT_LATER, Fault, Order, schedule
from soak_hour import ENOUGH, came_back, failed, survived
from soak_lives import rise

SCRIPT = Path(soak_hour.__file__)


# -- two minutes on real servers ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every fault, a sleep, both resets and a kill. The codec decodes whatever it is given."""
    folder = tmp_path_factory.mktemp("soak")
    options = "--minutes 2 --agents 20 --speed 8 --rate 2 --kills 1 --store-share 0.4 --warm-up 10 --codec k3v3"
    command = [sys.executable, str(SCRIPT), *options.split(), "--out", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "in use again: never" not in done.stdout
    return dict(json.loads((folder / "soak_hour.json").read_text()))


@pytest.mark.slow
def test_no_answer_is_wrong_and_no_user_sees_an_error(found: dict[str, Any]) -> None:
    counts = found["counts"]
    wrong = [counts.get(what, 0) for what in ("errors", "misled", "stale")]
    assert (wrong, found["messages"]) == ([0, 0, 0], [])
    assert counts["checked"] == counts["requests"] >= 300
    for what in ("posted", "streamed", "left", "named", "hinted", "agents", "exact"):
        assert counts[what] >= 5
    assert counts["agents"] < counts["requests"]


@pytest.mark.slow
def test_every_fault_is_felt_and_the_stores_are_in_use_again_after_each(found: dict[str, Any]) -> None:
    assert {event["what"] for event in found["events"]} == {*Fault, *Order}
    assert all(event["used_again_s"] is not None for event in found["events"])
    assert {event["what"] for event in found["events"] if event["failures"]} >= {*Fault} - FELT_LATER


@pytest.mark.slow
def test_sessions_come_back_after_the_kill_and_on_the_other_server(found: dict[str, Any]) -> None:
    lives = [[life["server"], life["ready_s"] < life["end_s"]] for life in found["lives"]]
    assert lives == [[0, True], [1, True], [-1, True], [0, True]]
    assert {who for who in found["returns"] if who.endswith("before")} <= {"4 before"}
    assert survived(found, 4)
    assert came_back(found, "1 other") + came_back(found, "2 other") > 0
    assert 0 < found["returns"]["1 same"]["cached"] <= found["returns"]["1 same"]["full"]


@pytest.mark.slow
def test_all_tiers_are_used_and_dropped_from(found: dict[str, Any]) -> None:
    told = Counter[str]()
    for life in found["lives"]:
        told.update(life["told"])
    for source in ("host", "disk", "external_unspecified"):
        assert told[f"prompt_tokens_cached_by_source_total{{{source}}}"] > 0
    assert told["evictions_total"] > 50
    assert sum(value for name, value in told.items() if name.startswith("dropped_blocks_total{")) > 0


def test_what_is_wrong_is_said() -> None:
    lives = [{"server": server, "ready_s": 0.0, "end_s": 1800.0, "memory": []} for server in (0, 1, -1, 0)]
    lives[0]["memory"] = [[float(second), (1000 << 20) + (second << 14)] for second in range(1800)]
    events = [{"what": what, "used_again_s": 1.0, "failures": {"corrupt": 1}} for what in Fault if what != Fault.hang]
    lost = {"what": "hang", "used_again_s": None, "failures": {}}
    report = {
        "arguments": {"warm_up": 600.0, "most_rise": 10.0},
        "counts": {"requests": 9, "checked": 9, "errors": 2, "misled": 1, "stale": 3},
        "returns": {"4 same": {"came_back": 5}},
        "events": [*events, lost],
        "left": [{"pool": 0, "active": 0}, {"pool": 0.25, "active": 3}],
        "lives": lives,
    }
    assert failed(report) == [
        "2 requests failed",
        "1 answers are surely not the plain server's",
        "3 sessions came back from before a reset of all",
        "no session came back on the other server",
        "server 1: 25.0% of the pool is still in use",
        "server 1: 3 sessions are active",
        "memory rose by 16.9 MiB in life 1",
        "the store was not in use again after hang",
        "nobody felt the fault hang",
        "no session came back after the kill before life 4",
    ]
    for returns, is_told in ((ENOUGH - 1, False), (ENOUGH, True)):
        of = {"4 before": {"returns": returns}, "4 other": {"came_back": 5}}
        assert (failed(report | {"returns": of})[-1] == "no session came back after the kill before life 4") == is_told


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


Answers = Callable[[dict[str, Any]], Awaitable[web.StreamResponse]]


def played(answer: Answers) -> Counter[str]:
    """Play traffic for a second against a server that does what no vLLM can be made to do."""

    async def play() -> Traffic:
        async def handler(request: web.Request) -> web.StreamResponse:
            return await answer(await request.json())

        app = web.Application()
        app.router.add_post("/v1/chat/completions", handler)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        traffic = Traffic("model", 40, [[Turn(0.0, 0, 4)] * 2], 4, seed=0, plain_url=url)
        running = asyncio.create_task(traffic.run())
        for number in (0, 1):
            traffic.goes_up(number, url, 1 + number)
        await asyncio.sleep(1)
        traffic.ends()
        await running
        await runner.cleanup()
        return traffic

    return asyncio.run(play()).counts


def completion(body: dict[str, Any], text: str, margin: float) -> web.Response:
    """Answer in two tokens: the plain server's margin is that of the second one."""
    usage = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 0}}
    if body.get("stream"):
        chunks = [{"choices": [{"delta": {"content": text}}]}, {"choices": [], "usage": usage}]
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
        return web.Response(text="".join([*lines, "data: [DONE]\n\n"]))
    choice: dict[str, Any] = {"message": {"content": text}}
    if body.get("top_logprobs"):
        pairs = zip((text[:1], text[1:]), ([0.0, -9.0], [-margin - 0.1, -0.1]), strict=True)
        told = [{"token": token, "top_logprobs": [{"logprob": each} for each in one]} for token, one in pairs]
        choice["logprobs"] = {"content": told}
    return web.json_response({"choices": [choice], "usage": usage})


@pytest.mark.parametrize("margin", [2.5, 0.5, 0.1])
def test_an_answer_that_is_not_the_plain_servers_is_wrong(margin: float) -> None:
    """As far as the plain server was sure; who asks for exact KV must get what it says."""

    async def answer(body: dict[str, Any]) -> web.Response:
        return completion(body, "1000" if body.get("logprobs") else "1234", margin)

    found = played(answer)
    assert 0 < found["exact"] < found["requests"]
    assert found["wrong"] == found["checked"] == found["requests"]
    assert found["misled"] == {2.5: found["wrong"], 0.5: found["exact"], 0.1: 0}[margin]
    assert found["doubtful"] == found["wrong"] - found["misled"]
    assert found["errors"] == 0


# -- memory ---------------------------------------------------------------------------------------------


def test_memory_rises_by_its_highest_median_over_the_first() -> None:
    samples = [(float(s), (100 + (s >= 720) * 7 + (s == 800) * 900) << 20) for s in range(1200)]
    assert rise(samples, 600) == 7
    assert rise(samples, 720) == 0
    assert rise(samples, 1190) is None
