"""Exact tokens on a GPU, in every tier: a session's first and last ones come back bit for bit."""

from collections.abc import Iterator

import gpu_worker
import pytest
from gpu_ways import FIXED_RATE, WAYS
from vllm_engine import BLOCK, Engine, Table, running

SINK, WINDOW = 4, 40
"""The beginning of a block of 32 tokens; two whole blocks."""


@pytest.fixture(scope="module", params=WAYS, ids=str)
def way(request: pytest.FixtureRequest) -> Iterator[tuple[str, Engine]]:
    codec = FIXED_RATE | {"sink_tokens": SINK, "window_tokens": WINDOW}  # its blocks' sizes are known
    options = {"blocks": 131, "idle_after_s": 2.0, "codec": codec}
    for engine in running(**WAYS[request.param] | options):
        yield request.param, engine


@pytest.fixture
def engine(way: tuple[str, Engine]) -> Engine:
    way[1].start_afresh()
    return way[1]


def total(engine: Engine, name: str, **labels: str) -> float:
    return engine.metric(f"manthan_{name}_total", **labels)


def digests(engine: Engine) -> tuple[set[str], set[str]]:
    """Of all blocks of the pool, and of their first tokens."""
    whole, sinks = engine.on_worker(gpu_worker.digests, BLOCK), engine.on_worker(gpu_worker.digests, SINK)
    return set(whole), set(sinks)


def go_and_return(engine: Engine, table: Table) -> tuple[int, int, int]:
    """A session goes cold and is asked again: how many of its blocks are the same, how many blocks' first tokens, and
    how many blocks of its end were not restored, since vLLM computes the last token anyway."""
    prompt, right = table.question(2)
    encoded, restored = total(engine, "encoded_blocks"), total(engine, "restored_blocks")
    assert engine.ask(prompt, "user").text == right
    before = digests(engine)
    assert engine.sessions("cold") == 0
    engine.wait_until_cold(1)
    encoded = int(total(engine, "encoded_blocks") - encoded)
    assert engine.metric("manthan_exact_blocks") == 3
    coded, sink, whole = (engine.on_worker(gpu_worker.room_of, exact) for exact in (0, SINK, BLOCK))
    wanted = (encoded - 3) * coded + sink + 2 * whole
    assert engine.metric("manthan_cold_bytes") == engine.on_worker(gpu_worker.stored) == wanted
    engine.on_worker(gpu_worker.wipe)
    empty = digests(engine)
    assert engine.ask(prompt, "user").text == right
    engine.wait(lambda: total(engine, "restored_blocks") > restored, "a restore")
    restored = int(total(engine, "restored_blocks") - restored)
    assert restored >= encoded - 1 > 15
    same = [len((now & then) - none) for now, then, none in zip(digests(engine), before, empty, strict=True)]
    return same[0], same[1], encoded - restored


def test_the_first_and_the_last_tokens_come_back_bit_for_bit(engine: Engine) -> None:
    blocks, beginnings, computed = go_and_return(engine, Table(1))
    assert blocks == 2 - computed  # the window; what was computed anew differs: it saw other keys
    assert beginnings == 3 - computed
    assert engine.failures() == 0


@pytest.mark.parametrize("exact", [SINK, BLOCK])
def test_damaged_blocks_are_recomputed(engine: Engine, exact: int) -> None:
    prompt, right = Table(2).question(5)
    before = total(engine, "failures", cause="checksum")
    assert engine.ask(prompt, "damaged").text == right
    engine.wait_until_cold(1)
    engine.on_worker(gpu_worker.damage, exact)
    assert engine.ask(prompt, "damaged").text == right
    engine.wait(lambda: total(engine, "failures", cause="checksum") == before + 1, "a counted failure")


def test_sessions_that_come_and_go_are_right_and_leave_nothing_behind(engine: Engine) -> None:
    failures = engine.failures()
    tables = [Table(10 + seed) for seed in range(5)]
    for _ in range(3):
        for n, table in enumerate(tables):
            for index in (2, 14):
                prompt, right = table.question(index)
                assert engine.ask(prompt, f"user {n}").text == right
        engine.wait(lambda: not any(map(engine.sessions, ("hot", "idle", "evicting"))), "only cold sessions")
        assert engine.metric("manthan_exact_blocks") >= 5 * 2
    assert engine.failures() == failures
    engine.wait(lambda: engine.on_worker(gpu_worker.in_flight) == 0, "an end of all that is under way")
    engine.wait(
        lambda: engine.metric("manthan_cold_bytes") == engine.on_worker(gpu_worker.stored),
        "agreement on what is stored",
    )
    engine.start_afresh()
    assert engine.on_worker(gpu_worker.stored) == 0
