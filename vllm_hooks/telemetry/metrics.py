"""Metrics: collected on the scheduler's side, carried by vLLM's stats, and shown at /metrics as vllm:manthan_…"""

import collections
from collections.abc import Iterable
from typing import Any, NamedTuple

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from manthan.manager.events import DropCause
from manthan.manager.session.hints import Hints

BUCKETS = {
    "seconds": (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
    "bytes": tuple(float(4**power) for power in range(5, 18)),  # 1 KiB to 16 GiB
    "divergence": (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.25, 1.0, 3.0, 10.0),  # in nats
}
"""Upper bounds of a histogram's buckets, by the last word of the histogram's name."""
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
    """Metric of /metrics. label: name of its own label. values: a counter's known values of the label."""

    kind: type[Gauge] | type[Counter] | type[Histogram]
    text: str
    label: str | None = None
    values: tuple[str, ...] = ()


GAUGES = {
    "sessions": "Sessions by state: active, idle, cold.",
    "hot_bytes": "KV bytes of sessions and requests that are not saved, in full attention.",
    "resume_points": "Completely saved resume points, in models with sliding windows or states.",
    "cold_bytes": "Bytes of compressed blocks in the tiers, of all KV cache groups, as its budget counts them.",
    "exact_blocks": "Cold blocks stored with all or some of their tokens exact, whatever their mark.",
    "cold_budget_bytes": "The cold store's budget in bytes.",
    "held_requests": "Waiting requests that a later one has passed.",
    "held_seconds": "Seconds that the first of these requests has waited.",
    "cold_store_up": "1 if the cold store answers, 0 while Redis is down.",
    "codec_noise": "Noise of the configured codec in this model's KV: logits, the worst layer's logits, values.",
    "codec_fallback": "1 if the guard found the configured codec unfaithful or slow, and a finer one is used, else 0.",
    "compression_ratio": "Pool bytes of cold blocks, on all ranks, over their compressed bytes.",
}
COUNTERS = {
    "evictions": "Sessions that went cold.",
    "restores": "Requests that had blocks restored.",
    "prefetches": "Sessions restored before their request came.",
    "prefetched_blocks": "Blocks restored before their request came.",
    "prefetch_hits": "Prefetched sessions whose request found them resident.",
    "encoded_blocks": "Blocks encoded into the cold store, of all KV cache groups.",
    "encodings": "Blocks handed to the encoder, by the origin of their KV in the pool, whatever the codec.",
    "lossy_tokens": "Cached tokens of prompts that were decoded, or computed behind decoded ones.",
    "rechecks": "Lossy restores that were computed anew while the server was idle.",
    "recheck_same_token": "Of these, those whose likeliest first token is the same.",
    "restored_blocks": "Blocks restored from the cold store, of all KV cache groups.",
    "restored_levels": "Lossy blocks of calibrated codecs restored for requests, by level.",
    "dropped_blocks": "Blocks dropped from the cold store, by cause.",
    "trimmed_blocks": "Blocks cut in the cold store, by the level that is left.",
    "overwritten_blocks": "Blocks overwritten in the pool before they were encoded, and needed since.",
    "given_up_blocks": "Blocks not saved, because all blocks in the full tiers are worth more to the policy.",
    "failures": "Blocks that could not be stored or restored, by cause.",
    "errors": "Exceptions of Manthan's that were caught at its boundary to vLLM, by call.",
    "lookups": "Prompts looked up in a shared store: found, nothing, unanswered.",
    "hints": "Hints that requests gave, by hint.",
    "pins_refused": "Pins refused for want of room: tiers.pinned_share.",
}
HISTOGRAMS = {
    "encode_seconds": "Time to encode and store a block.",
    "restore_seconds": "Time to fetch and decode a restore.",
    "restore_bytes": "Encoded bytes of a restore.",
    "encode_bytes": "Bytes of compressed blocks that an eviction made.",
    "recheck_divergence": "KL divergence in nats of the first token behind a restore from the computed one.",
}
LABELS: dict[str, tuple[str, Iterable[str]]] = {
    "sessions": ("state", ()),
    "codec_noise": ("of", ()),
    "encodings": ("mark", ("exact", "derived", "decoded")),
    "restored_levels": ("level", "01234"),
    "dropped_blocks": ("cause", DropCause),
    "trimmed_blocks": ("level", "0123"),
    "failures": ("cause", FAILURE_CAUSES),
    "errors": ("call", CALLS),
    "lookups": ("outcome", ("found", "nothing", "unanswered")),
    "hints": ("hint", Hints.model_fields),
}
METRICS = {
    name: _Metric(kind, text, label, tuple(values))
    for kind, texts in ((Gauge, GAUGES), (Counter, COUNTERS), (Histogram, HISTOGRAMS))
    for name, text in texts.items()
    for label, values in [LABELS.get(name, (None, ()))]
}
PARTS = ("gauges", "counters", "observations")


class ManthanStats(KVConnectorStats):
    """Statistics for /metrics. data: by PARTS, numbers by metric and label value; observations are lists by metric.

    `aggregate` keeps the later gauges, adds up the counters, and joins the lists.
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
            extra: dict[str, Any] = {"multiprocess_mode": "mostrecent"} if metric.kind is Gauge else {}
            if metric.kind is Histogram:
                extra["buckets"] = BUCKETS[name.rpartition("_")[2]]
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
