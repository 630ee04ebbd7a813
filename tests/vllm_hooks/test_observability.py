"""Spans in a real collector, of engines whose sessions go cold and return."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from scripts import run_script
from trace_collector import Collector, collecting

IDLE = {"idle_after_s": 0.2}
RETURN = [
    {"session": "alice", "prompt": 1, "trace": 1},
    {"session": "bob", "prompt": 2, "trace": 2, "after_s": 0.4},  # alice is idle, and goes cold
    {"session": "alice", "prompt": 1, "tokens": 360, "trace": 3},
]
CROWD = [{"session": f"user-{number}", "prompt": number, "tokens": 620, "trace": number} for number in range(1, 5)]


def converse(turns: list[Any], manthan: Any, endpoint: str | None = None) -> tuple[Any, str]:
    """What the script reports, and all that it printed besides."""
    job = {"turns": turns, "manthan": manthan, "endpoint": endpoint}
    out, err = run_script("traced_sessions.py", job, TRACEPARENT=f"00-{'a' * 32}-{'b' * 16}-01")  # of vLLM's own start
    said, _, report = out.rpartition('{"found"')
    return json.loads('{"found"' + report), said + err


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


def test_a_restore_is_in_the_trace_of_its_request(collector: Collector) -> None:
    report, _ = converse(RETURN, IDLE, collector.endpoint)
    [restore] = collector.named("manthan.restore")
    assert (restore.trace, restore.parent) == (f"{3:032x}", f"{3:016x}")
    [ours] = [span for span in collector.named("llm_request") if span.trace == restore.trace]
    assert ours.parent == restore.parent
    assert ours.began <= restore.began <= restore.ended <= ours.ended
    request_id = restore.attributes.pop("gen_ai.request.id")
    assert request_id.startswith(ours.attributes["gen_ai.request.id"])
    seconds, nbytes = restore.attributes.pop("manthan.load_seconds"), restore.attributes.pop("manthan.bytes")
    assert 0 < seconds <= restore.ended - restore.began
    assert 10_000 < nbytes < 10 * 32 * 2048 * 2
    assert restore.attributes == {
        "manthan.session_id": "alice",
        "manthan.blocks": 10,
        "manthan.blocks_restored": 10,
        "manthan.blocks_beside": 0,
        "manthan.tokens": 320,
        "manthan.tier": "host",
    }
    assert report["traces"] == 0  # nothing is kept of requests that have ended


def test_an_eviction_by_the_clock_is_a_trace_of_its_own(collector: Collector) -> None:
    converse(RETURN, IDLE, collector.endpoint)
    eviction = collector.named("manthan.evict")[0]
    assert eviction.trace not in {span.trace for span in collector.named("llm_request")}
    assert eviction.parent == ""
    assert eviction.attributes["manthan.session_id"] == "alice"
    assert eviction.attributes["manthan.reason"] == "idle"
    assert eviction.attributes["manthan.idle_seconds"] >= 0.2
    assert eviction.attributes["manthan.blocks"] == eviction.attributes["manthan.blocks_encoded"] == 10
    assert eviction.attributes["manthan.bytes"] < eviction.attributes["manthan.bytes_hot"]
    assert "gen_ai.request.id" not in eviction.attributes
