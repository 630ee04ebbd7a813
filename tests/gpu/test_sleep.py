"""vLLM's sleep mode on a GPU, where memory really goes: that of the KV cache is unmapped, and comes back at the same
addresses with whatever was there."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gpu_ways import WAYS
from sleeper import MOMENTS, asked_again, asked_again_of_other_weights, converse, sleep, wake
from vllm_engine import Engine, running


@pytest.fixture(scope="module", params=WAYS, ids=str)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    options = {"blocks": 131, "idle": 0.2} | WAYS[request.param]
    yield from running(**options, flags={"enable_sleep_mode": True})


@pytest.fixture(autouse=True)
def afresh(engine: Engine) -> None:
    engine.run(engine.llm.wake_up())
    engine.start_afresh()


def free_memory(worker: Any) -> int:
    return torch.cuda.mem_get_info()[0]


def garble(worker: Any) -> None:
    """What is in the cache's memory after a sleep is anybody's."""
    for cache in worker.model_runner.kv_caches:
        cache.fill_(torch.nan)


def test_what_was_cold_is_restored_after_a_sleep(engine: Engine) -> None:
    told = converse(engine, 6)
    local, free = engine.metric("prefix_cache_hits_total"), engine.on_worker(free_memory)
    sleep(engine)
    assert engine.on_worker(free_memory) > free
    wake(engine)
    engine.on_worker(garble)
    for (_, answer), found in zip(told, asked_again(engine, told), strict=True):
        assert found >= 0.95 * (answer.full_blocks - 1) * 32
    assert engine.metric("prefix_cache_hits_total") == local
    assert engine.failures() == 0


def test_three_sleeps_in_parts(engine: Engine) -> None:
    told = converse(engine)
    for _ in range(3):
        sleep(engine)
        wake(engine, "weights")
        wake(engine, "kv_cache")
        engine.on_worker(garble)
        assert min(asked_again(engine, told)) > 400


@pytest.mark.parametrize("moment", MOMENTS)
def test_codes_of_other_weights_are_dropped(engine: Engine, moment: str) -> None:
    assert asked_again_of_other_weights(engine, moment) == [0]


def test_level_2_drops_all(engine: Engine) -> None:
    told = converse(engine)
    sleep(engine, 2)
    wake(engine, "weights")
    engine.run(engine.llm.collective_rpc("reload_weights"))
    wake(engine, "kv_cache")
    assert asked_again(engine, told) == [0, 0, 0]
