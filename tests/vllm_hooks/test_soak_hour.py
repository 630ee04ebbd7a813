"""The soak (tests/helpers/soak_hour.py): two minutes of it, and that it says what is wrong."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import redis
import soak_hour
from redis_server import RedisServer
from soak_faults import FELT_LATER, OF_REDIS, Fault, Order, redis_failing, schedule
from soak_hour import UNANSWERED, WINDOW_S, came_back, failed, felt, survived
from soak_lives import MIB, rise

SCRIPT = Path(soak_hour.__file__)


# -- judgements, without servers ----------------------------------------------------------------------


def told(p90_s: list[float], seconds: float = 2 * WINDOW_S, last_mib: int = 100) -> dict[str, Any]:
    """Return a report with one life of two hours, with half an hour of warm-up, of 100 MiB and then `last_mib`."""
    memory = [(float(at), (last_mib if at > 3600 else 100) * MIB) for at in range(0, 7201, 60)]
    return {
        "seconds": seconds,
        "p90_s": p90_s,
        "counts": {"checked": 1},
        "lives": [{"server": 0, "ready_s": 0.0, "end_s": 7200.0, "memory": memory}],
        "arguments": {"most_rise": 10, "warm_up": 1800},
        "events": [{"what": str(fault), "used_again_s": 1.0, "failures": {"some": 1}} for fault in Fault],
        "left": [],
        "returns": {"1 other": {"came_back": 1}},
    }


def test_a_soak_that_gets_slower_fails_if_it_has_room_for_two_windows() -> None:
    assert failed(told([2.0, 2.2])) == []
    assert failed(told([2.0, 2.3])) == ["p90 of answers rose from 2.00 to 2.30 s"]
    assert failed(told([2.0, 2.3], seconds=2 * WINDOW_S - 1)) == []


def test_memory_is_told_by_the_hour_and_judged_by_the_life() -> None:
    assert failed(told([2.0, 2.0], last_mib=110)) == []
    assert failed(told([2.0, 2.0], last_mib=112)) == ["memory rose by 12.0 MiB in life 1, 8.0 an hour"]
    assert rise([(0.0, 1), (130.0, 1)], 60) is None


def test_a_fault_that_nobody_felt_or_after_which_a_store_is_not_used_fails() -> None:
    report = told([2.0, 2.0])
    for event in report["events"]:
        if event["what"] == Fault.redis_frozen:
            event["failures"] = {}
        if event["what"] == Fault.redis_killed:
            event["used_again_s"] = None
    assert failed(report) == [
        "the store was not in use again after Redis killed",
        "nobody felt the fault Redis frozen",
    ]


def test_lookups_without_an_answer_are_felt_while_redis_is_known_to_be_down() -> None:
    before, after = {UNANSWERED: 3.0, "cold_store_up": 1.0}, {UNANSWERED: 8.0, "cold_store_up": 0.0}
    assert felt(Fault.redis_frozen, [before, before], [after, before]) == {UNANSWERED: 5}
    assert felt(Fault.redis_frozen, [before, before], [after | {"cold_store_up": 1.0}, before]) == {}
    assert felt(Fault.slow, [before], [after]) == {}
    assert felt(Fault.slow, [before], [after | {"failures_total{io}": 2.0}]) == {"io": 2}


@pytest.mark.parametrize(
    "fault", [pytest.param(Fault.redis_frozen, marks=pytest.mark.slow), *sorted(OF_REDIS - {Fault.redis_frozen})]
)
def test_redis_does_not_answer_during_its_fault_and_answers_on_the_same_port_after(
    fault: Fault, tmp_path: Path
) -> None:
    with RedisServer(tmp_path) as server:
        server.client.set("key", "value")
        client = redis.Redis(port=server.port, socket_timeout=0.2)
        with redis_failing(server, fault), pytest.raises((redis.TimeoutError, redis.ConnectionError)):
            client.ping()
        assert server.client.get("key") == ("value" if fault is Fault.redis_frozen else None)


def test_each_round_has_every_fault() -> None:
    events = schedule(0, 3600.0, 2, 1)
    assert {fault: [event.what for event in events].count(fault) for fault in Fault} == dict.fromkeys(Fault, 2)
    parts = [schedule(0, 3600.0, 2, 1, (part, 3)) for part in (1, 2, 3)]
    assert [event[:2] for part in parts for event in part] == [event[:2] for event in events]
    assert all(sum(event.seconds for event in part) == pytest.approx(3600) for part in parts)


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
