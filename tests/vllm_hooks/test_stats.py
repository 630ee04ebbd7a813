"""What happens between two looks at the statistics is added up."""

import functools
from types import SimpleNamespace

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from manthan.vllm_hooks.connector import ManthanConnector
from manthan.vllm_hooks.telemetry.metrics import ManthanPromMetrics, ManthanStats


def test_counters_add_up_observations_queue_up_and_the_last_gauge_counts() -> None:
    first = ManthanStats(
        data={
            "gauges": {"sessions": {"cold": 1}, "cold_bytes": {"": 5}},
            "counters": {"restores": {"": 1}, "failures": {"checksum": 1}},
            "observations": {"restore_seconds": [0.1]},
        }
    )
    second = ManthanConnector.build_kv_connector_stats(
        {
            "gauges": {"sessions": {"cold": 2}},
            "counters": {"failures": {"checksum": 2, "missing": 1}, "evictions": {"": 4}},
            "observations": {"restore_seconds": [0.2, 0.3], "encode_seconds": [0.4]},
        }
    )
    both = first.aggregate(second)
    assert both.data == {
        "gauges": {"sessions": {"cold": 2}, "cold_bytes": {"": 5}},
        "counters": {"restores": {"": 1}, "failures": {"checksum": 3, "missing": 1}, "evictions": {"": 4}},
        "observations": {"restore_seconds": [0.1, 0.2, 0.3], "encode_seconds": [0.4]},
    }
    assert both.reduce() == {"Manthan restores": 1, "Manthan failures": 4, "Manthan evictions": 4}
    assert not both.is_empty()
    assert ManthanConnector.build_kv_connector_stats().is_empty()


def test_what_counts_begins_at_zero() -> None:
    """By every label value that is known; so the first event is an increase. A gauge at 0 would say what is not so."""
    registry = CollectorRegistry()
    kinds = {kind: functools.partial(kind, registry=registry) for kind in (Gauge, Counter, Histogram)}
    prom = ManthanPromMetrics(
        SimpleNamespace(kv_transfer_config=None), kinds, ["model_name", "engine"], {0: ["m", "0"]}
    )
    samples = [sample for family in registry.collect() for sample in family.samples]
    assert {sample.value for sample in samples if not sample.name.endswith("_created")} == {0}
    counters = {(sample.name, *sample.labels.values()) for sample in samples}
    assert ("vllm:manthan_failures_total", "m", "0", "checksum") in counters
    assert ("vllm:manthan_dropped_blocks_total", "m", "0", "budget") in counters
    assert ("vllm:manthan_evictions_total", "m", "0") in counters
    assert ("vllm:manthan_restore_seconds_count", "m", "0") in counters
    assert not [name for name, *_ in counters if name == "vllm:manthan_cold_store_up"]
    prom.observe({"gauges": {"cold_store_up": {"": 1.0}}, "counters": {"failures": {"checksum": 2, "new": 1}}})
    labels = {"model_name": "m", "engine": "0"}
    assert registry.get_sample_value("vllm:manthan_cold_store_up", labels) == 1
    assert registry.get_sample_value("vllm:manthan_failures_total", labels | {"cause": "checksum"}) == 2
    assert registry.get_sample_value("vllm:manthan_failures_total", labels | {"cause": "new"}) == 1
