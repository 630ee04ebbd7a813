"""Metrics: collected by the scheduler half, carried in vLLM's stats, shown on /metrics as vllm:manthan_…"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import prometheus_client
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from manthan.manager.sessions.hints import Hints
from manthan.manager.sessions.manager import SessionMemoryManager
from manthan.manager.sessions.session import Drop, Eviction, Outcome, SessionState
from manthan.manager.sessions.table import MemoryShape
from manthan.vllm_hooks.messages import LoadResult, SpillResult

_SECONDS = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
)
_BYTES = tuple(float(4**power) for power in range(5, 18))  # 1 KiB to 16 GiB


class _Metric(NamedTuple):
    kind: type[prometheus_client.Gauge] | type[prometheus_client.Counter] | type[prometheus_client.Histogram]
    text: str
    label: str | None = None
    buckets: tuple[float, ...] = ()


METRICS: dict[str, _Metric] = {
    "sessions": _Metric(prometheus_client.Gauge, "Sessions by state: hot, idle, evicting, cold.", "state"),
    "hot_bytes": _Metric(prometheus_client.Gauge, "KV bytes of sessions that are hot or idle."),
    "cold_bytes": _Metric(prometheus_client.Gauge, "Bytes of codes, and of exact copies, in the cold store."),
    "exact_blocks": _Metric(prometheus_client.Gauge, "Cold blocks that have an exact copy beside their codes."),
    "cold_budget_bytes": _Metric(prometheus_client.Gauge, "The cold store's budget in bytes."),
    "cold_store_up": _Metric(prometheus_client.Gauge, "Whether the cold store answers: 1, or 0 while Redis is down."),
    "compression_ratio": _Metric(prometheus_client.Gauge, "Bytes of a block in the pool over its encoded bytes."),
    "evictions": _Metric(prometheus_client.Counter, "Sessions that went cold."),
    "restores": _Metric(prometheus_client.Counter, "Requests that had blocks restored."),
    "prefetches": _Metric(prometheus_client.Counter, "Sessions restored before their request came."),
    "prefetched_blocks": _Metric(prometheus_client.Counter, "Blocks restored before their request came."),
    "prefetch_hits": _Metric(prometheus_client.Counter, "Prefetched sessions whose request found them hot."),
    "encoded_blocks": _Metric(prometheus_client.Counter, "Blocks encoded into the cold store."),
    "restored_blocks": _Metric(prometheus_client.Counter, "Blocks restored from the cold store."),
    "dropped_blocks": _Metric(prometheus_client.Counter, "Blocks dropped from the cold store, by cause.", "cause"),
    "failures": _Metric(prometheus_client.Counter, "Blocks that could not be stored or restored, by cause.", "cause"),
    "lookups": _Metric(
        prometheus_client.Counter, "Prompts looked up in a shared store: found, nothing, unanswered.", "outcome"
    ),
    "hints": _Metric(prometheus_client.Counter, "Hints that requests gave, by hint.", "hint"),
    "pins_refused": _Metric(prometheus_client.Counter, "Pins refused for want of room: quotas.pinned_share."),
    "encode_seconds": _Metric(prometheus_client.Histogram, "Time to encode and store a block.", None, _SECONDS),
    "restore_seconds": _Metric(prometheus_client.Histogram, "Time to fetch and decode a restore.", None, _SECONDS),
    "restore_bytes": _Metric(prometheus_client.Histogram, "Encoded bytes of a restore.", None, _BYTES),
    "encode_bytes": _Metric(prometheus_client.Histogram, "Bytes of the codes that an eviction made.", None, _BYTES),
}


class ManthanStats(KVConnectorStats):
    """`data`: gauges (the last value counts) and counters (added up) as name to label to number; observations."""

    def reset(self) -> None:
        self.data = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> "ManthanStats":
        def both(part: str) -> tuple[dict[str, Any], dict[str, Any]]:
            return self.data.get(part, {}), other.data.get(part, {})

        gauges, later_gauges = both("gauges")
        counters, more_counters = both("counters")
        observations, more_observations = both("observations")
        return ManthanStats(
            data={
                "gauges": gauges | later_gauges,
                "counters": {
                    name: dict(Counter(counters.get(name, {})) + Counter(more_counters.get(name, {})))
                    for name in counters | more_counters
                },
                "observations": {
                    name: [*observations.get(name, ()), *more_observations.get(name, ())]
                    for name in observations | more_observations
                },
            }
        )

    def reduce(self) -> dict[str, int | float]:
        totals = {name: sum(values.values()) for name, values in self.data.get("counters", {}).items() if values}
        return {f"Manthan {name.replace('_', ' ')}": total for name, total in totals.items()}


class StatsRecorder:
    """Counts what happens in the scheduler half until vLLM fetches it."""

    def __init__(self, manager: SessionMemoryManager, shape: MemoryShape) -> None:
        self._manager, self._shape = manager, shape
        self._counters: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._observations: defaultdict[str, list[float]] = defaultdict(list)
        self.store_is_up = True
        self._sent_gauges: dict[str, dict[str, float]] = {}

    def evicted(self, eviction: Eviction) -> None:
        self._counters["evictions"][""] += 1
        self._observations["encode_bytes"].append(eviction.encoded * self._shape.cold_nbytes)

    def spilled(self, answers: Sequence[SpillResult]) -> None:
        self._counters["encoded_blocks"][""] += 1
        self._observations["encode_seconds"].append(max(answer.seconds for answer in answers))

    def spill_failed(self, causes: Iterable[str]) -> None:
        self._counters["failures"].update(causes)

    def copies_failed(self, causes: Iterable[str]) -> None:
        """Exact copies that could not be stored or restored; their blocks have codes."""
        self._counters["failures"].update(f"exact_{cause}" for cause in causes)

    def restored(self, answers: Sequence[LoadResult], blocks: int, failures: Iterable[str]) -> None:
        self._counters["restores"][""] += 1
        self._counters["restored_blocks"][""] += blocks
        self._counters["failures"].update(failures)
        self._observations["restore_seconds"].append(max(answer.seconds for answer in answers))
        self._observations["restore_bytes"].append(sum(answer.nbytes for answer in answers))

    def prefetched(self, blocks: int, failures: Iterable[str]) -> None:
        self._counters["prefetches"][""] += 1
        self._counters["prefetched_blocks"][""] += blocks
        self._counters["failures"].update(failures)

    def prefetch_hit(self) -> None:
        self._counters["prefetch_hits"][""] += 1

    def looked_up(self, outcome: str) -> None:
        self._counters["lookups"][outcome] += 1

    def hinted(self, hints: Hints) -> None:
        if hints.given:
            self._counters["hints"].update(hints.given)

    def answered(self, outcome: Outcome | None) -> None:
        if outcome is not None and outcome.refused:
            self._counters["pins_refused"][""] += 1

    def dropped(self, drop: Drop) -> None:
        self._counters["dropped_blocks"][str(drop.cause)] += len(drop.keys)

    def take(self) -> ManthanStats | None:
        """What happened since the last call, or None if nothing did."""
        gauges = self._gauges()
        if not self._counters and gauges == self._sent_gauges:
            return None
        data = {
            "gauges": gauges,
            "counters": {name: dict(values) for name, values in self._counters.items() if values},
            "observations": dict(self._observations),
        }
        self._sent_gauges = gauges
        self._counters, self._observations = defaultdict(Counter), defaultdict(list)
        return ManthanStats(data=data)

    def _gauges(self) -> dict[str, dict[str, float]]:
        manager, shape = self._manager, self._shape
        return {
            "sessions": {str(state): manager.table.states[state] for state in SessionState},
            "hot_bytes": {"": manager.blocks.hot * shape.hot_nbytes},
            "cold_bytes": {
                "": (manager.blocks.cold + shape.exact_parts * manager.blocks.copied) * shape.cold_nbytes,
            },
            "exact_blocks": {"": manager.blocks.copied},
            "cold_budget_bytes": {"": manager.capacity_blocks * shape.cold_nbytes},
            "cold_store_up": {"": float(self.store_is_up)},
            "compression_ratio": {"": round(shape.hot_nbytes / shape.cold_nbytes, 4)},
        }


class ManthanPromMetrics(KVConnectorPromMetrics):
    """The Prometheus side, in the process that serves /metrics."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        kinds = {
            prometheus_client.Gauge: self._gauge_cls,
            prometheus_client.Counter: self._counter_cls,
            prometheus_client.Histogram: self._histogram_cls,
        }
        self._metrics = {}
        for name, metric in METRICS.items():
            extra = {"buckets": metric.buckets} if metric.buckets else {}
            if metric.kind is prometheus_client.Gauge:
                extra["multiprocess_mode"] = "mostrecent"
            labels = [*self._labelnames, *([metric.label] if metric.label else [])]
            self._metrics[name] = kinds[metric.kind](
                name=f"vllm:manthan_{name}", documentation=metric.text, labelnames=labels, **extra
            )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        engine = self.per_engine_labelvalues[engine_idx]

        def child(name: str, label: str) -> Any:
            return self._metrics[name].labels(*engine, *([label] if METRICS[name].label else []))

        for name, values in transfer_stats_data.get("gauges", {}).items():
            for label, value in values.items():
                child(name, label).set(value)
        for name, values in transfer_stats_data.get("counters", {}).items():
            for label, value in values.items():
                child(name, label).inc(value)
        for name, observed in transfer_stats_data.get("observations", {}).items():
            for value in observed:
                child(name, "").observe(value)
