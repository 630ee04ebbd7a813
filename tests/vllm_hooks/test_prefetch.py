"""Sessions that are expected are hot before their request comes, and nobody is worse off for it."""

import asyncio
from typing import Any

import pytest
import worker_store
from vllm_engine import Engine

BACK_IN_S = 5.0
"""Long enough for a session to be cold by then."""
pytestmark = pytest.mark.usefixtures("sweeping_engine")


class Counters:
    """What was counted since the last look."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._before = {name: self._total(name) for name in ("prefetches", "prefetched_blocks", "prefetch_hits")}
        self._before |= {name: self._total(name) for name in ("restores", "evictions")}

    def _total(self, name: str) -> float:
        return self._engine.metric(f"manthan_{name}_total")

    def __getitem__(self, name: str) -> float:
        return self._total(name) - self._before[name]

    def wait_for(self, name: str, count: int) -> None:
        self._engine.wait(lambda: self[name] >= count, f"{count} {name}")
        assert self[name] == count


def go_cold(engine: Engine, prompts: dict[str, str]) -> None:
    for name, prompt in prompts.items():
        engine.ask(prompt, name)
    engine.wait_until_cold(len(prompts))


def stored_blocks(answer: Any) -> int:
    """Of a session that has this answer; the last token's KV is not computed."""
    return int(answer.prompt_tokens + 3) // 32


def is_whole(answer: Any) -> bool:
    """All that could be found of the prompt was; the last block may hold another question than before."""
    return bool(answer.cached_tokens >= (answer.full_blocks - 1) * 32)


def test_a_session_is_resident_again_before_its_request_comes(engine, table) -> None:
    (prompt, _), (again, right) = table(1).question(2), table(1).question(5)
    counters = Counters(engine)
    first = engine.ask(prompt, "alice", expect_return_s=BACK_IN_S)
    engine.wait_until_cold(1)
    assert engine.metric("manthan_hot_bytes") == 0
    engine.ask("x")  # after a reset nothing is begun until somebody asks
    counters.wait_for("prefetches", 1)  # none of hers in between
    answer = engine.ask(again, "alice")
    assert answer.text == right
    assert is_whole(answer)
    assert counters["restores"] == 0
    assert counters["prefetched_blocks"] == stored_blocks(first)
    counters.wait_for("prefetch_hits", 1)


def test_a_request_that_comes_meanwhile_waits_and_restores_nothing(engine, table) -> None:
    (prompt, _), (again, right) = table(40).question(0), table(40).question(3)
    go_cold(engine, {"alice": prompt})
    counters = Counters(engine)
    with worker_store.gate(engine):
        engine.ask("x", prefetch="alice")
        engine.wait(lambda: engine.on_worker(worker_store.at_gate) == 1, "a prefetch")
        early = engine.start(engine.generate(again, "alice"))
        assert engine.ask("y").text  # others are served
        assert not early.done()
        assert engine.on_worker(worker_store.at_gate) == 1
    answer = early.result(60)
    assert answer.text == right
    assert is_whole(answer)
    assert counters["restores"] == 0
    assert counters["prefetches"] == 1
    counters.wait_for("prefetch_hits", 1)


def test_restores_do_not_wait_behind_a_prefetch(engine, table) -> None:
    go_cold(engine, {"alice": table(50).question(0)[0], "bob": table(51).question(0)[0]})
    counters = Counters(engine)
    with worker_store.gate(engine):
        engine.ask("x", prefetch="alice")
        engine.wait(lambda: engine.on_worker(worker_store.at_gate) == 1, "a prefetch")
        other = engine.start(engine.generate(table(51).question(1)[0], "bob"))
        engine.wait(lambda: engine.on_worker(worker_store.at_gate) == 2, "a restore at the store beside it")
    assert other.result(60).text == table(51).question(1)[1]
    counters.wait_for("prefetches", 1)  # the slower of the two, now and then
    assert counters["restores"] == 1


def test_many_prefetches_beside_requests_leak_no_block(engine, table) -> None:
    tables = {f"user-{n}": table(80 + n) for n in range(6)}
    go_cold(engine, {name: t.question(0)[0] for name, t in tables.items()})
    counters, failures, wrong = Counters(engine), engine.failures(), []
    for number in range(1, 3):
        engine.wait(engine.reset, "an empty pool, so that at least one prefetch has room")
        names = list(tables)[number:] + list(tables)[:number]
        engine.ask("x", prefetch=names[:4])
        futures = [
            (engine.start(engine.generate(tables[name].question(number)[0], name)), tables[name].question(number)[1])
            for name in names[3:]
        ]
        aborted = engine.start(engine.generate(tables[names[0]].question(9)[0], names[0], max_tokens=400))
        engine.run(asyncio.sleep(0.05))
        aborted.cancel()
        wrong += [answer.text for future, right in futures if (answer := future.result(60)).text != right]
        engine.wait(lambda: not any(map(engine.sessions, ("active", "idle"))), "cold sessions")
        assert counters["prefetches"] >= number, "the first prefetch of a round has an empty pool"
    assert wrong == []
    assert engine.failures() == failures
    engine.wait(lambda: engine.metric("kv_cache_usage_perc") == 0, "an empty pool")
    assert engine.reset()  # which vLLM refuses while any block is referenced
