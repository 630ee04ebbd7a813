"""What happens between two looks at the statistics is added up."""

from manthan.vllm_hooks.connector import ManthanConnector
from manthan.vllm_hooks.telemetry.metrics import ManthanStats


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
