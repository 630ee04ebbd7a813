"""Two ranks: each keeps its own heads, or its own layers, and a block is cold when both have said so."""

from collections.abc import Iterator
from typing import Any

import pytest
from vllm.distributed.kv_transfer import get_kv_transfer_group

BOTH = pytest.mark.parametrize("rank", [0, 1])


@pytest.fixture(scope="module", params=["tensor", pytest.param("pipeline", marks=pytest.mark.slow)])
def pair(request: pytest.FixtureRequest, start_engine: Any) -> Iterator[Any]:
    """The stages of the pipeline have three layers and one."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "pipeline":
            patch.setenv("VLLM_PP_LAYER_PARTITION", "3,1")
        yield from start_pair(start_engine, request.param)


def start_pair(start_engine: Any, kind: str) -> Iterator[Any]:
    engines = start_engine(
        blocks=131,
        flags={f"{kind}_parallel_size": 2},
        idle=0.5,
        tiers={"max_bytes": "64MiB"},
        codec={"sink_tokens": 4},
    )
    for engine in engines:
        if kind == "pipeline":
            engine.on_workers(get_ready)
        yield engine


def get_ready(worker: Any) -> None:
    """Make room for what the stage before sends. vLLM's CPU build does so in a warm-up that eager engines leave out."""
    runner = worker.model_runner
    if worker.rank:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            runner.max_num_tokens, runner.dtype, runner.device
        )


def stored(worker: Any) -> tuple[int, int, int]:
    """How many blocks, and bytes of how many."""
    store = get_kv_transfer_group().worker.engine.store
    return len(store._blocks), store.used, store.max_bytes


def rooms(worker: Any) -> dict[Any, int]:
    """What each block takes."""
    store = get_kv_transfer_group().worker.engine.store
    return {name: store.room(kept.nbytes) for name, kept in store._blocks.items()}


def flip_a_byte(worker: Any, rank: int) -> None:
    if worker.rank == rank:
        store = get_kv_transfer_group().worker.engine.store
        group, key = list(store._blocks)[3]
        [codes] = store.read(group, [key])
        codes[5000] ^= 1
        assert store.put_all(group, {key: codes}) == {}


def break_store(worker: Any, rank: int) -> None:
    def put_all(group: int, blocks: Any, tenant: str = "") -> None:
        raise OSError("this rank's store is on fire")

    if worker.rank == rank:
        get_kv_transfer_group().worker.engine.store.put_all = put_all


def test_a_session_goes_cold_on_both_ranks_and_returns(pair, table) -> None:
    prompt, right = table(1).question(3)
    assert pair.ask(prompt, "duo").text == right
    pair.wait_until_cold(1)
    (*_, budget), (*_, budget_too) = pair.on_workers(stored)
    assert budget + budget_too == 64 << 20
    sizes, sizes_too = pair.on_workers(rooms)
    assert sizes.keys() == sizes_too.keys() > set()
    most = [max(sizes[name], sizes_too[name]) for name in sizes]
    assert pair.metric("manthan_cold_bytes") == 2 * sum(most), "as much as where it takes most, on both"
    answer = pair.ask(prompt, "duo")
    assert (answer.text, answer.cached_tokens) == (right, (answer.prompt_tokens - 1) // 32 * 32)


def test_damage_on_one_rank_is_enough_to_recompute(pair, table) -> None:
    pair.start_afresh()
    prompt, right = table(2).question(3)
    pair.ask(prompt, "duo")
    pair.wait_until_cold(1)
    failures = pair.failures()
    pair.on_workers(flip_a_byte, 0)
    assert pair.ask(prompt, "duo").text == right
    assert pair.failures() == failures + 1
    pair.wait_until_cold(1)
    assert len({blocks for blocks, *_ in pair.on_workers(stored)}) == 1


@BOTH
def test_a_block_that_one_rank_cannot_store_stays_hot(pair, table, rank: int) -> None:
    pair.start_afresh()
    pair.on_workers(break_store, rank)
    prompt, right = table(3).question(3)
    failures, evictions = pair.failures(), pair.metric("manthan_evictions_total")
    pair.ask(prompt, "duo")
    pair.wait(lambda: pair.failures() > failures, "a failure")
    pair.wait_until_quiet()
    answer = pair.ask(prompt, "duo")
    assert (answer.text, answer.cached_tokens) == (right, (answer.prompt_tokens - 1) // 32 * 32)
    assert pair.metric("manthan_evictions_total") == evictions
