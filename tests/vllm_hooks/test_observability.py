"""Spans in a real collector and log lines as JSON, of engines whose sessions go cold and return."""

import json
import logging
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest
from scripts import run_script
from trace_collector import Collector, collecting

from manthan.manager.config.resolve import ConfigError, load_config
from manthan.vllm_hooks.telemetry import structured
from manthan.vllm_hooks.telemetry.structured import COMMON, EVENTS, JsonFormatter, fields, use_format

IDLE = {"idle_after_s": 0.2, "sweep_interval_s": 0.05}
RETURN = [
    {"session": "alice", "prompt": 1, "trace": 1},
    {"session": "bob", "prompt": 2, "trace": 2, "after_s": 0.4},  # alice is idle, and goes cold
    {"session": "alice", "prompt": 1, "tokens": 360, "trace": 3},
]
CROWD = [{"session": f"user-{number}", "prompt": number, "tokens": 620, "trace": number} for number in range(1, 5)]


def converse(turns: list[Any], manthan: Any, endpoint: str | None = None, log: str = "text") -> tuple[Any, str]:
    """What the script reports, and all that it printed besides."""
    job = {"turns": turns, "manthan": manthan, "endpoint": endpoint, "log": log}
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


def test_lines_as_json_and_no_traces_where_they_are_off() -> None:
    report, said = converse(RETURN, IDLE, log="json")
    assert report["traces"] is None
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    events = {line["event"]: line for line in lines if "event" in line}
    assert {"started", "evicted", "restored"} <= set(events)
    assert "Manthan: " not in "".join(line for line in said.splitlines() if not line.startswith("{"))
    for line in lines:
        of = EVENTS[line["event"]] if "event" in line else ()
        assert list(line) == [*COMMON, *(("event", *of) if "event" in line else ())]
        assert datetime.fromisoformat(line["time"]).utcoffset() is not None
        assert line["logger"].startswith("vllm.manthan")
    evicted, restored = events["evicted"], events["restored"]
    assert (restored["session_id"], restored["blocks_restored"], restored["causes"]) == ("alice", 10, [])
    assert restored["message"].startswith("Manthan: session alice restored 10 of 10 blocks (320 tokens) in ")
    assert (evicted["tokens"], evicted["reason"]) == (320, "idle")
    assert evicted["cold_bytes"] < evicted["hot_bytes"]
    assert events["started"]["cold_store"] == "host"


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    found = logging.getLogger(structured.LOGGER)
    before = found.propagate, list(found.handlers)
    yield found
    found.propagate, found.handlers = before


def test_a_format_is_used_once_and_can_be_left(logger: logging.Logger) -> None:
    before = list(logger.handlers)
    use_format("json")
    use_format("json")
    assert len(logger.handlers) == len(before) + 1
    assert not logger.propagate
    use_format("text")
    assert (logger.handlers, logger.propagate) == (before, True)


def test_what_went_wrong_is_one_line_too() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        told = type(error), error, error.__traceback__
    record = logging.LogRecord("vllm.manthan.worker", logging.ERROR, __file__, 1, "it %s", ("broke\nso",), told)
    text = JsonFormatter().format(record)
    assert "\n" not in text
    assert json.loads(text)["message"] == "it broke\nso"
    assert "ValueError: two\nlines" in json.loads(text)["exception"]


def test_fields_are_those_that_are_documented() -> None:
    with pytest.raises(AssertionError):
        fields("not_stored", cause="encode")


def test_another_format_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"log.format must be text or json, not 'xml'"):
        load_config(env={}, flags={"--manthan-log-format": "xml"})
