"""Prefetches on a GPU, in every tier: right answers, and no block that is read before it is decoded."""

import asyncio
import random
from collections.abc import Iterator

import gpu_worker
import pytest
from gpu_ways import WAYS
from vllm_engine import Engine, Table, running


@pytest.fixture(scope="module", params=WAYS, ids=str)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    options = {"blocks": 131, "idle": 1.0}
    yield from running(**options | WAYS[request.param])


@pytest.fixture(autouse=True)
def _afresh(engine: Engine) -> None:
    engine.start_afresh()


def total(engine: Engine, name: str) -> float:
    return engine.metric(f"manthan_{name}_total")


def test_expected_sessions_are_resident_again_and_right(engine: Engine) -> None:
    tables = [Table(300 + seed) for seed in range(5)]
    before = {name: total(engine, name) for name in ("prefetches", "restores", "prefetch_hits")}
    for n, table in enumerate(tables):
        engine.ask(table.question(0)[0], f"chat {n}")
    engine.wait_until_cold(5)
    engine.ask("x", prefetch=[f"chat {n}" for n in range(5)])
    engine.wait(lambda: total(engine, "prefetches") == before["prefetches"] + 5, "five prefetches")
    for n, table in enumerate(tables):
        prompt, right = table.question(4)
        answer = engine.ask(prompt, f"chat {n}")
        assert answer.text == right
        assert answer.cached_tokens >= (answer.full_blocks - 1) * 32
    assert total(engine, "restores") == before["restores"]
    engine.wait(lambda: total(engine, "prefetch_hits") == before["prefetch_hits"] + 5, "five hits")


def test_requests_that_come_at_once_read_what_was_decoded(engine: Engine) -> None:
    """Requests follow so soon that some wait for their prefetch, some find it done, and some load themselves."""
    rng, tables = random.Random(2), [Table(340 + seed) for seed in range(12)]
    sure = [[i for i in range(16) if engine.ask(t.question(i)[0]).text == t.question(i)[1]] for t in tables]
    engine.start_afresh()
    for n, table in enumerate(tables):
        engine.ask(table.question(0)[0], f"load {n}")
    prefetches, failures, wrong = total(engine, "prefetches"), engine.failures(), []
    for _ in range(40):
        chosen = rng.sample(range(12), 3)
        engine.ask("x", prefetch=[f"load {n}" for n in chosen])
        engine.run(asyncio.sleep(rng.choice([0, 0.002, 0.01, 0.5])))
        futures = []
        for n in chosen:
            prompt, right = tables[n].question(rng.choice(sure[n]))
            futures.append((engine.start(engine.generate(prompt, f"load {n}")), right))
        wrong += [answer.text for future, right in futures if (answer := future.result(60)).text != right]
        if rng.random() < 0.4:
            engine.wait(lambda: not any(map(engine.sessions, ("active", "idle"))), "cold sessions")
            engine.empty_pool()
    assert wrong == []
    assert total(engine, "prefetches") > prefetches + 10
    assert engine.failures() == failures
    engine.start_afresh()
    assert engine.on_worker(gpu_worker.stored) == 0
