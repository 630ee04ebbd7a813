"""Tensor parallelism on two GPUs: each rank keeps its own shard, and a session goes cold and returns on both."""

from typing import Any

import pytest
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm_engine import Engine, Table, running

pytestmark = pytest.mark.gpus(2)


def tier(worker: Any) -> tuple[str, int, int]:
    path = get_kv_transfer_group().worker.engine
    return str(path._device), next(iter(path.codecs.values())).layout.heads, path.tiers.used


@pytest.mark.parametrize("kind", ["host", "device"])
def test_a_session_goes_cold_and_returns_on_both(kind: str) -> None:
    store = {"kind": kind, "max_bytes": "64MiB"}
    for engine in running(blocks=131, ranks=2, idle=0.3, tiers=store):
        check(engine)


def check(engine: Engine) -> None:
    tables = [Table(seed) for seed in range(4)]
    for n, table in enumerate(tables):
        prompt, right = table.question(0)
        assert engine.ask(prompt, f"duo {n}").text == right
    engine.wait_until_cold(4)
    ranks = engine.on_workers(tier)
    assert [device for device, _, _ in ranks] == ["cuda:0", "cuda:1"]
    assert [heads for _, heads, _ in ranks] == [1, 1]
    assert ranks[0][2] == ranks[1][2] > 0
    for n, table in enumerate(tables):
        prompt, right = table.question(2)
        answer = engine.ask(prompt, f"duo {n}")
        assert answer.text == right
        assert answer.cached_tokens >= 0.95 * (answer.full_blocks - 1) * 32
    assert engine.failures() == 0
