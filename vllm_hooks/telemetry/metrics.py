"""Metrics: collected on the scheduler's side, carried by vLLM's stats, and shown at /metrics as vllm:manthan_…"""

import collections
from typing import Any, NamedTuple

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from manthan.manager.events import DropCause
from manthan.manager.session.hints import Hints

_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_NATS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.25, 1.0, 3.0, 10.0)
_BYTES = tuple(float(4**power) for power in range(5, 18))  # 1 KiB to 16 GiB
FAILURE_CAUSES = (
    *("store_full", "store_down", "disk", "encode", "decode", "missing", "reset", "internal"),
    *("truncated", "trailing", "magic", "version", "checksum", "codec", "size", "key", "fingerprint"),
    "seal",
)
CALLS = (
    *("new_request", "match", "allocated", "step", "worker_output", "finished"),
    *("submit_loads", "submit_stores", "_transfer_results", "take_report"),
)
"""Main methods, of the connector's two halves, whose exceptions are caught and counted. Their series begin at 0."""


class _Metric(NamedTuple):
    """Metric of /metrics.

    text: help text. label: name of the metric's own label. buckets: upper bounds of a histogram's buckets. values:
    known values of a counter's label.
    """

    kind: type[Gauge] | type[Counter] | type[Histogram]
    text: str
    label: str | None = None
    buckets: tuple[float, ...] = ()
    values: tuple[str, ...] = ()


METRICS: dict[str, _Metric] = {
    "sessions": _Metric(Gauge, "Sessions by state: active, idle, cold.", "state"),
    "hot_bytes": _Metric(Gauge, "KV bytes of sessions and requests that are not saved, in full attention."),
    "resume_points": _Metric(Gauge, "Completely saved resume points, in models with sliding windows or states."),
    "cold_bytes": _Metric(
        Gauge, "Bytes of compressed blocks in the tiers, of all KV cache groups, as its budget counts them."
    ),
    "exact_blocks": _Metric(Gauge, "Cold blocks stored with all or some of their tokens exact, whatever their mark."),
    "cold_budget_bytes": _Metric(Gauge, "The cold store's budget in bytes."),
    "held_requests": _Metric(Gauge, "Waiting requests that a later one has passed."),
    "held_seconds": _Metric(Gauge, "Seconds that the first of these requests has waited."),
    "cold_store_up": _Metric(Gauge, "1 if the cold store answers, 0 while Redis is down."),
    "codec_noise": _Metric(
        Gauge,
        "Noise of the configured codec in this model's KV: of logits, of the worst layer's logits, of values.",
        "of",
    ),
    "codec_fallback": _Metric(
        Gauge, "1 if the guard found the configured codec unfaithful or slow, and a finer one is used, else 0."
    ),
    "compression_ratio": _Metric(Gauge, "Pool bytes of cold blocks, on all ranks, over their compressed bytes."),
    "evictions": _Metric(Counter, "Sessions that went cold."),
    "restores": _Metric(Counter, "Requests that had blocks restored."),
    "prefetches": _Metric(Counter, "Sessions restored before their request came."),
    "prefetched_blocks": _Metric(Counter, "Blocks restored before their request came."),
    "prefetch_hits": _Metric(Counter, "Prefetched sessions whose request found them resident."),
    "encoded_blocks": _Metric(Counter, "Blocks encoded into the cold store, of all KV cache groups."),
    "encodings": _Metric(
        Counter,
        "Blocks handed to the encoder, by the origin of their KV in the pool, whatever the codec.",
        "mark",
        values=("exact", "derived", "decoded"),
    ),
    "lossy_tokens": _Metric(Counter, "Cached tokens of prompts that were decoded, or computed behind decoded ones."),
    "rechecks": _Metric(Counter, "Lossy restores that were computed anew while the server was idle."),
    "recheck_same_token": _Metric(Counter, "Of these, those whose likeliest first token is the same."),
    "restored_blocks": _Metric(Counter, "Blocks restored from the cold store, of all KV cache groups."),
    "restored_levels": _Metric(
        Counter, "Lossy blocks of calibrated codecs restored for requests, by level.", "level", values=tuple("01234")
    ),
    "dropped_blocks": _Metric(
        Counter, "Blocks dropped from the cold store, by cause.", "cause", values=tuple(DropCause)
    ),
    "trimmed_blocks": _Metric(
        Counter, "Blocks cut in the cold store, by the level that is left.", "level", values=tuple("0123")
    ),
    "overwritten_blocks": _Metric(
        Counter, "Blocks overwritten in the pool before they were encoded, and needed since."
    ),
    "given_up_blocks": _Metric(
        Counter, "Blocks not saved, because all blocks in the full tiers are worth more to the policy."
    ),
    "failures": _Metric(
        Counter, "Blocks that could not be stored or restored, by cause.", "cause", values=FAILURE_CAUSES
    ),
    "errors": _Metric(
        Counter, "Exceptions of Manthan's that were caught at its boundary to vLLM, by call.", "call", values=CALLS
    ),
    "lookups": _Metric(
        Counter,
        "Prompts looked up in a shared store: found, nothing, unanswered.",
        "outcome",
        values=("found", "nothing", "unanswered"),
    ),
    "hints": _Metric(Counter, "Hints that requests gave, by hint.", "hint", values=tuple(Hints.model_fields)),
    "pins_refused": _Metric(Counter, "Pins refused for want of room: tiers.pinned_share."),
    "encode_seconds": _Metric(Histogram, "Time to encode and store a block.", None, _SECONDS),
    "restore_seconds": _Metric(Histogram, "Time to fetch and decode a restore.", None, _SECONDS),
    "restore_bytes": _Metric(Histogram, "Encoded bytes of a restore.", None, _BYTES),
    "encode_bytes": _Metric(Histogram, "Bytes of compressed blocks that an eviction made.", None, _BYTES),
    "recheck_divergence": _Metric(
        Histogram, "KL divergence in nats of the first token behind a restore from the computed one.", None, _NATS
    ),
}


PARTS = ("gauges", "counters", "observations")


class ManthanStats(KVConnectorStats):
    """Statistics for /metrics.

    data: has the keys PARTS. Gauges and counters are numbers by metric and label value. Observations are lists by
    metric. `aggregate` keeps the later gauges, adds up the counters, and joins the lists.
    """

    def reset(self) -> None:
        self.data = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> "ManthanStats":
        gauges, counters, observations = (dict(self.data.get(part, {})) for part in PARTS)
        later_gauges, more_counters, more_observations = (other.data.get(part, {}) for part in PARTS)
        for name, values in more_counters.items():
            counters[name] = dict(collections.Counter(counters.get(name, {})) + collections.Counter(values))
        for name, observed in more_observations.items():
            observations[name] = [*observations.get(name, ()), *observed]
        return ManthanStats(data=dict(zip(PARTS, (gauges | later_gauges, counters, observations), strict=True)))

    def reduce(self) -> dict[str, int | float]:
        totals = {name: sum(values.values()) for name, values in self.data.get("counters", {}).items() if values}
        return {f"Manthan {name.replace('_', ' ')}": total for name, total in totals.items()}


class ManthanPromMetrics(KVConnectorPromMetrics):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        kinds = {Gauge: self._gauge_cls, Counter: self._counter_cls, Histogram: self._histogram_cls}
        self._metrics = {}
        for name, metric in METRICS.items():
            extra: dict[str, Any] = {"buckets": metric.buckets} if metric.buckets else {}
            if metric.kind is Gauge:
                extra["multiprocess_mode"] = "mostrecent"
            labels = [*self._labelnames, *([metric.label] if metric.label else [])]
            self._metrics[name] = kinds[metric.kind](
                name=f"vllm:manthan_{name}", documentation=metric.text, labelnames=labels, **extra
            )
            if metric.kind is not Gauge:  # a series begins at 0, else rate() misses the first event
                for engine in self.per_engine_labelvalues.values():
                    for value in metric.values if metric.label else ("",):
                        self._child(name, engine, value)

    def _child(self, name: str, engine: list[object], label: str) -> Any:
        return self._metrics[name].labels(*engine, *([label] if METRICS[name].label else []))

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        engine = self.per_engine_labelvalues[engine_idx]
        gauges, counters, observations = (transfer_stats_data.get(part, {}) for part in PARTS)
        for name, values in gauges.items():
            for label, value in values.items():
                self._child(name, engine, label).set(value)
        for name, values in counters.items():
            for label, value in values.items():
                self._child(name, engine, label).inc(value)
        for name, observed in observations.items():
            for value in observed:
                self._child(name, engine, "").observe(value)
