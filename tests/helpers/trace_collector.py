"""An OpenTelemetry collector: a gRPC server on a free port that keeps the spans that it is sent."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service
from opentelemetry.proto.common.v1.common_pb2 import AnyValue


class Span(NamedTuple):
    """trace, parent: in hexadecimal, empty for none. Times in seconds since 1970."""

    name: str
    trace: str
    parent: str
    began: float
    ended: float
    attributes: dict[str, Any]


class Collector(service.TraceServiceServicer):
    """endpoint: as --otlp-traces-endpoint."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.endpoint = ""

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans += map(_span, scope.spans)
        return messages.ExportTraceServiceResponse()

    def named(self, name: str) -> list[Span]:
        """In the order in which they ended."""
        return sorted((span for span in self.spans if span.name == name), key=lambda span: span.ended)


@contextmanager
def collecting() -> Iterator[Collector]:
    server, collector = grpc.server(ThreadPoolExecutor(2)), Collector()
    service.add_TraceServiceServicer_to_server(collector, server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None)


def _span(span: Any) -> Span:
    attributes = {each.key: _value(each.value) for each in span.attributes}
    times = span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9
    return Span(span.name, span.trace_id.hex(), span.parent_span_id.hex(), *times, attributes)


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, str(kind))
