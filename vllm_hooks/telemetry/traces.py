"""Spans of evictions (sessions saved in tiers) and restores, if vLLM traces requests (`--otlp-traces-endpoint`).

A restore's span is in the request's trace, like vLLM's `llm_request`. Each eviction is a trace of its own, and so is
each prefetch (restore before the request).
"""

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig
from vllm.tracing import extract_trace_context, instrument_manual, is_tracing_available

if TYPE_CHECKING:
    from manthan.manager.events import Evicted, Restored
    from manthan.manager.session.blocks import MemoryShape

NANO = 1_000_000_000
REQUEST_ID = "gen_ai.request.id"
"""Name, the same as vLLM's, of a span's attribute with the request's id."""


class Traces:
    """Sends an engine's spans by the exporter that vLLM has set up. tiers: names of the tiers, the fastest first."""

    def __init__(self, tiers: Sequence[str]) -> None:
        from opentelemetry.context import Context  # present, because tracing is on

        self._tiers, self._none = tiers, Context()
        self._headers: dict[str, Mapping[str, str] | None] = {}  # trace headers by id of a running request
        self._begun: dict[str, tuple[int, Sequence[str]]] = {}
        """By request id, begin of the restore in nanoseconds since 1970, and names of the tiers with the blocks."""

    def began(self, request_id: str, headers: Mapping[str, str] | None) -> None:
        self._headers[request_id] = headers

    def ended(self, request_id: str) -> None:
        self._headers.pop(request_id, None)
        self._begun.pop(request_id, None)

    def restoring(self, request_id: str, tiers: Sequence[str]) -> None:
        """Note the begin of a request's restore from tiers with these names."""
        self._begun[request_id] = time.time_ns(), tiers

    def restored(self, restored: "Restored", shape: "MemoryShape") -> None:
        """Send the span of a finished restore or prefetch."""
        now, request_id = time.time_ns(), restored.request_id or ""
        began, tiers = self._begun.pop(request_id, (now - int(restored.seconds * NANO), self._tiers))
        attributes = {
            "manthan.session_id": restored.session_id,
            "manthan.blocks": restored.blocks,
            "manthan.blocks_restored": restored.good,
            "manthan.blocks_at_points": restored.at_points,
            "manthan.tokens": restored.good * shape.block_tokens,
            "manthan.bytes": restored.nbytes,
            "manthan.tier": ",".join(tiers),
            "manthan.load_seconds": restored.seconds,
        }
        if restored.causes:
            attributes["manthan.causes"] = sorted(set(restored.causes))
        if request_id:
            attributes[REQUEST_ID] = request_id
        self._span(f"manthan.{'restore' if request_id else 'prefetch'}", began, now, attributes, request_id)

    def evicted(self, eviction: "Evicted") -> None:
        now = time.time_ns()
        attributes = {
            "manthan.session_id": eviction.session_id,
            "manthan.blocks": eviction.blocks,
            "manthan.blocks_encoded": eviction.stored,
            "manthan.blocks_at_points": eviction.at_points,
            "manthan.tokens": eviction.tokens,
            "manthan.bytes": eviction.cold_nbytes,
            "manthan.bytes_hot": eviction.pool_nbytes,
            "manthan.tier": ",".join(self._tiers),
            "manthan.idle_seconds": eviction.idle_s,
            "manthan.reason": "pressure" if eviction.is_pressed else "idle",
        }
        began = now - int(eviction.took_s * NANO)
        self._span("manthan.evict", began, now, attributes, "")

    def _span(self, name: str, began: int, ended: int, attributes: dict[str, Any], request_id: str) -> None:
        """Send a span in the trace of the request, if the request is traced and running.

        Otherwise the span begins a new trace: its context is empty, because without a context vLLM would use the trace
        of the server's start. began, ended: nanoseconds since 1970.
        """
        context = extract_trace_context(self._headers.get(request_id))
        instrument_manual(name, began, ended, attributes, self._none if context is None else context)


def make_traces(vllm_config: VllmConfig, tiers: Sequence[str]) -> Traces | None:
    """Return the engine's traces; None if tracing is off, or OpenTelemetry is not installed."""
    endpoint = vllm_config.observability_config.otlp_traces_endpoint
    return Traces(tiers) if endpoint is not None and is_tracing_available() else None
