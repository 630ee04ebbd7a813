"""What operators ask of METRICS, and when they want to be told, in PromQL.

docs/metrics.md, the Grafana board and the alert rules of deploy/ are made of it (`make docs`).

Windows are written `[10m]` where the board may choose its own, and otherwise where the question is about a longer time.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Query(NamedTuple):
    """series: PromQL by what its lines are called, where {{LABEL}} stands for the value of a label.

    unit: as Grafana names it.
    """

    title: str
    question: str
    unit: str
    series: Mapping[str, str]


class Alert(NamedTuple):
    """It fires when `value` has met `condition` for so long. value, condition: PromQL. lasts: 0m for at once.

    summary: what is the matter, and what to do.
    """

    name: str
    value: str
    condition: str
    lasts: str
    severity: str
    summary: str

    @property
    def expression(self) -> str:
        return f"{self.value} {self.condition}"


def _quantiles(histogram: str) -> dict[str, str]:
    return {
        f"p{percent}": f"histogram_quantile({percent / 100}, sum by (le) (rate({histogram}_bucket[10m])))"
        for percent in (50, 95)
    }


QUERIES: Mapping[str, tuple[Query, ...]] = {
    "Sessions": (
        Query(
            "Sessions by state",
            "How many sessions are kept, and where?",
            "short",
            {"{{state}}": "sum by (state) (vllm:manthan_sessions)"},
        ),
        Query(
            "Cold store",
            "How full is the cold store?",
            "percentunit",
            {"{{instance}}": "vllm:manthan_cold_bytes / vllm:manthan_cold_budget_bytes"},
        ),
        Query(
            "Codes, and what they stand for",
            "How much bf16 do the codes stand for?",
            "bytes",
            {
                "codes": "sum(vllm:manthan_cold_bytes)",
                "in bf16": "sum(vllm:manthan_cold_bytes * vllm:manthan_compression_ratio)",
            },
        ),
        Query(
            "KV pool in use",
            "How much of vLLM's KV pool do running requests hold? What is idle counts as free there.",
            "percentunit",
            {"{{instance}}": "vllm:kv_cache_usage_perc"},
        ),
    ),
    "What it saves": (
        Query(
            "Restored instead of computed",
            "What share of prompt tokens beyond the prefix cache was restored instead of computed?",
            "percentunit",
            {
                "{{instance}}": "rate(vllm:external_prefix_cache_hits_total[10m]) "
                "/ rate(vllm:external_prefix_cache_queries_total[10m])"
            },
        ),
        Query(
            "Evictions and restores",
            "How often do sessions go cold, and come back?",
            "ops",
            {
                "evictions": "sum(rate(vllm:manthan_evictions_total[10m]))",
                "restores": "sum(rate(vllm:manthan_restores_total[10m]))",
            },
        ),
        Query(
            "Time to first token",
            "How long do users wait for the first token, all requests together?",
            "s",
            _quantiles("vllm:time_to_first_token_seconds"),
        ),
        Query(
            "Time of a restore",
            "How long does a restore take?",
            "s",
            _quantiles("vllm:manthan_restore_seconds"),
        ),
        Query(
            "Size of a restore",
            "How large is a restore, as codes?",
            "bytes",
            {"{{instance}}": "rate(vllm:manthan_restore_bytes_sum[10m]) / rate(vllm:manthan_restore_bytes_count[10m])"},
        ),
        Query(
            "Prefetches that hit",
            "How often does a prefetch hit?",
            "percentunit",
            {"{{instance}}": "rate(vllm:manthan_prefetch_hits_total[1h]) / rate(vllm:manthan_prefetches_total[1h])"},
        ),
    ),
    "What goes wrong": (
        Query(
            "Dropped for want of room",
            "How many blocks leave before anybody asks for them again? Near 1: the cold store turns over faster than "
            "sessions return.",
            "percentunit",
            {
                "{{instance}}": 'rate(vllm:manthan_dropped_blocks_total{cause="budget"}[1h]) '
                "/ ignoring(cause) rate(vllm:manthan_encoded_blocks_total[1h])"
            },
        ),
        Query(
            "Failures by cause",
            "What fails, and why?",
            "ops",
            {"{{cause}}": "sum by (cause) (rate(vllm:manthan_failures_total[10m]))"},
        ),
        Query(
            "Cold store answers",
            "Does the cold store answer? 0: sessions that return are recomputed.",
            "short",
            {"{{instance}}": "vllm:manthan_cold_store_up"},
        ),
    ),
}
"""By the row of the board."""

ALERTS = (
    Alert(
        "ManthanStoreDown",
        "vllm:manthan_cold_store_up",
        "== 0",
        "2m",
        "warning",
        "The cold store does not answer; returning sessions are recomputed.",
    ),
    Alert(
        "ManthanDamagedCodes",
        'sum without (cause) (increase(vllm:manthan_failures_total{cause=~"checksum|size|magic|truncated"}[15m]))',
        "> 0",
        "0m",
        "warning",
        "Codes came back other than they were written. Look at the store and the machine's memory.",
    ),
    Alert(
        "ManthanCannotStore",
        'sum without (cause) (rate(vllm:manthan_failures_total{cause=~"store.*|disk|encode"}[10m]))',
        "> 1",
        "10m",
        "warning",
        "Blocks cannot be stored; sessions stay hot or are lost.",
    ),
    Alert(
        "ManthanTurnsOver",
        'rate(vllm:manthan_dropped_blocks_total{cause="budget"}[1h]) '
        "/ ignoring(cause) rate(vllm:manthan_encoded_blocks_total[1h])",
        "> 0.5",
        "1h",
        "info",
        "Half of what is encoded is dropped for want of room: raise cold_store.max_bytes.",
    ),
    Alert(
        "ManthanPinsRefused",
        "increase(vllm:manthan_pins_refused_total[1h])",
        "> 0",
        "0m",
        "info",
        "Pinned sessions use up quotas.pinned_share.",
    ),
)
