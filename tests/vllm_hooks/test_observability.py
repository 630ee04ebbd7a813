"""Spans in a real collector, of an engine whose sessions go cold and return."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service
from scripts import run_script

TRACEPARENT = f"00-{'a' * 32}-{'b' * 16}-01"
"""Trace of vLLM's own start."""


class Collector(service.TraceServiceServicer):
    """OpenTelemetry collector that keeps the spans that it is sent. endpoint: as --otlp-traces-endpoint."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.endpoint = ""

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.spans += [span for each in request.resource_spans for scope in each.scope_spans for span in scope.spans]
        return messages.ExportTraceServiceResponse()

    def named(self, name: str) -> list[Any]:
        """Spans of this name, in the order in which they ended."""
        return sorted((span for span in self.spans if span.name == name), key=lambda span: int(span.end_time_unix_nano))


@pytest.fixture
def collector() -> Iterator[Collector]:
    server, collector = grpc.server(ThreadPoolExecutor(2)), Collector()
    service.add_TraceServiceServicer_to_server(collector, server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield collector
    server.stop(None)


def attributes(span: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, str(each.value.WhichOneof("value"))) for each in span.attributes}


@pytest.mark.slow
def test_a_restore_is_in_the_trace_of_its_request(collector: Collector) -> None:
    """And an eviction by the clock is a trace of its own."""
    kept, _ = run_script("sessions.py", {"scenario": "traced", "endpoint": collector.endpoint}, TRACEPARENT=TRACEPARENT)
    assert kept == 0, "nothing is kept of requests that have ended"
    [restore] = collector.named("manthan.restore")
    assert (restore.trace_id.hex(), restore.parent_span_id.hex()) == (f"{3:032x}", f"{3:016x}")
    [ours] = [span for span in collector.named("llm_request") if span.trace_id == restore.trace_id]
    assert ours.parent_span_id == restore.parent_span_id
    began, ended = restore.start_time_unix_nano, restore.end_time_unix_nano
    assert ours.start_time_unix_nano <= began <= ended <= ours.end_time_unix_nano
    told = attributes(restore)
    assert told.pop("gen_ai.request.id").startswith(attributes(ours)["gen_ai.request.id"])
    assert 0 < told.pop("manthan.load_seconds") <= (ended - began) / 1e9
    assert 10_000 < told.pop("manthan.bytes") < 10 * 32 * 2048 * 2
    assert told == {
        "manthan.session_id": "alice",
        "manthan.blocks": 10,
        "manthan.blocks_restored": 10,
        "manthan.blocks_at_points": 0,
        "manthan.tokens": 320,
        "manthan.tier": "host",
    }
    eviction = collector.named("manthan.evict")[0]
    assert eviction.trace_id not in [span.trace_id for span in collector.named("llm_request")]
    assert not eviction.parent_span_id
    told = attributes(eviction)
    assert (told["manthan.session_id"], told["manthan.reason"]) == ("alice", "idle")
    assert told["manthan.idle_seconds"] >= 0.2
    assert told["manthan.blocks"] == told["manthan.blocks_encoded"] == 10
    assert told["manthan.bytes"] < told["manthan.bytes_hot"]
    assert "gen_ai.request.id" not in told
