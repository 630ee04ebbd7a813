"""Spans in a real collector, of an engine whose sessions go cold and return."""

import pytest
from scripts import run_script
from trace_collector import collecting


@pytest.mark.slow
def test_a_restore_is_in_the_trace_of_its_request() -> None:
    """And an eviction by the clock is a trace of its own."""
    with collecting() as collector:
        environment = {"TRACEPARENT": f"00-{'a' * 32}-{'b' * 16}-01"}  # of vLLM's own start
        out, _ = run_script("traced_sessions.py", {"endpoint": collector.endpoint}, **environment)
    assert out.endswith("kept: 0"), "nothing is kept of requests that have ended"
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
    eviction = collector.named("manthan.evict")[0]
    assert eviction.trace not in {span.trace for span in collector.named("llm_request")}
    assert eviction.parent == ""
    assert eviction.attributes["manthan.session_id"] == "alice"
    assert eviction.attributes["manthan.reason"] == "idle"
    assert eviction.attributes["manthan.idle_seconds"] >= 0.2
    assert eviction.attributes["manthan.blocks"] == eviction.attributes["manthan.blocks_encoded"] == 10
    assert eviction.attributes["manthan.bytes"] < eviction.attributes["manthan.bytes_hot"]
    assert "gen_ai.request.id" not in eviction.attributes
