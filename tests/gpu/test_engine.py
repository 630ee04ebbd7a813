"""The real engine on a GPU: sessions go cold and return in every tier, eager and with CUDA graphs."""

import random
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import gpu_worker
import pytest
from gpu_ways import WAYS
from vllm_engine import Engine, Table, running


@pytest.fixture(scope="module", params=WAYS, ids=str)
def way(request: pytest.FixtureRequest) -> Iterator[tuple[str, Engine]]:
    options = {"blocks": 131, "idle": 0.3} | WAYS[request.param]
    for engine in running(**options):
        yield request.param, engine


def gpu_memory(worker: Any) -> int:
    import torch

    return torch.cuda.memory_allocated()


def test_every_session_returns_with_the_right_answer(way: tuple[str, Engine]) -> None:
    name, engine = way
    assert engine.on_worker(gpu_worker.engine_name) == ("CpuEngine" if name == "numpy" else "CudaEngine")
    tables = [Table(seed) for seed in range(6)]
    for n, table in enumerate(tables):
        prompt, right = table.question(0)
        assert engine.ask(prompt, f"{name} {n}").text == right
    engine.wait_until_cold(6)
    restored = engine.metric("manthan_restored_blocks_total")
    right = 0
    for n, table in enumerate(tables):
        for index in range(1, 5):
            prompt, wanted = table.question(index)
            answer = engine.ask(prompt, f"{name} {n}")
            right += answer.text == wanted
            assert answer.cached_tokens >= 0.95 * (answer.full_blocks - 1) * 32
    assert right == 24  # recall 1.00
    assert engine.metric("manthan_restored_blocks_total") >= restored + 6 * 16
    assert engine.failures() == 0


def test_the_device_spills_to_the_host(way: tuple[str, Engine]) -> None:
    name, engine = way
    if name != "device and host":
        pytest.skip("one tier")
    engine.start_afresh()
    tables = [Table(100 + seed) for seed in range(6)]
    for n, table in enumerate(tables):
        engine.ask(table.question(0)[0], f"spill {n}")
    engine.wait_until_cold(6)
    tiers = engine.on_worker(gpu_worker.tiers)
    assert tiers["device"][:2] == (60, 0)
    assert tiers["host"][0] >= 6 * 17 - 60
    for n, table in enumerate(tables):
        prompt, right = table.question(3)
        assert engine.ask(prompt, f"spill {n}").text == right
    assert engine.failures() == 0


def is_right(engine: Engine, table: Table, index: int) -> bool:
    """Whether the model finds an entry with exact KV: asked one after another, a table stays hot."""
    prompt, right = table.question(index)
    return bool(engine.ask(prompt).text == right)


def test_a_thousand_returns_under_load_leave_nothing_behind(way: tuple[str, Engine]) -> None:
    """20 sessions on a pool with room for seven, six requests at a time; all that they took is given back."""
    name, engine = way
    engine.start_afresh()
    rng, tables = random.Random(1), [Table(200 + seed) for seed in range(20)]
    sure = [[i for i in range(16) if is_right(engine, table, i)] for table in tables]
    assert sum(map(len, sure)) >= 312  # the model itself is wrong now and then
    evictions, restores = (engine.metric(f"manthan_{what}_total") for what in ("evictions", "restores"))
    failures, memory, wrong, asked = engine.failures(), engine.on_worker(gpu_memory), [], 0
    running_now: list[tuple[Future[Any], str]] = []
    rounds = 1000 if name.startswith("device,") else 200
    while engine.metric("manthan_restores_total") - restores < rounds:
        assert asked < 6 * rounds
        table = rng.choice(tables)
        prompt, right = table.question(rng.choice(sure[tables.index(table)]))
        running_now.append((engine.start(engine.generate(prompt, f"load {tables.index(table)}")), right))
        asked += 1
        if len(running_now) == 6:
            future, right = running_now.pop(0)
            wrong += [answer.text for answer in [future.result(timeout=120)] if answer.text != right]
    wrong += [right for future, right in running_now if future.result(timeout=120).text != right]
    assert wrong == []
    assert engine.failures() == failures
    assert engine.metric("manthan_evictions_total") - evictions >= rounds / 4
    engine.start_afresh()
    if name != "numpy":
        assert all(blocks == 0 and free == size for blocks, free, size in engine.on_worker(gpu_worker.tiers).values())
    assert engine.on_worker(gpu_memory) <= memory + (1 << 20)
    assert engine.ask(Table(1).question(1)[0]).text == Table(1).question(1)[1]


def test_damaged_codes_are_recomputed(way: tuple[str, Engine]) -> None:
    name, engine = way
    if name == "numpy":
        pytest.skip("the same store as on the CPU")
    engine.start_afresh()
    prompt, right = Table(50).question(5)
    engine.ask(prompt, "damaged")
    engine.wait_until_cold(1)
    engine.on_worker(gpu_worker.damage)
    before = engine.metric("manthan_failures_total", cause="checksum")
    assert engine.ask(prompt, "damaged").text == right
    engine.wait(lambda: engine.metric("manthan_failures_total", cause="checksum") == before + 1, "a counted failure")
