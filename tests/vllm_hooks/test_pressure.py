"""More sessions than the pool holds: saved before they are overwritten, within the cold store's budget."""

from collections.abc import Iterable
from typing import Any

import pytest
from vllm.distributed.kv_transfer import get_kv_transfer_group

SESSIONS = 5  # of 18 blocks each, where the pool has 69


def store_figures(worker: Any) -> tuple[int, int, int]:
    """Peak and present bytes of the worker's store, and its budget."""
    store = get_kv_transfer_group().worker.engine.store
    return store.peak, store.used, store.max_bytes


def broken_store(worker: Any) -> None:
    """From now on nothing can be put."""

    def put_all(group: int, blocks: Any, tenant: str = "") -> None:
        raise OSError("the store is on fire")

    get_kv_transfer_group().worker.engine.store.put_all = put_all


def encoded(engine: Any) -> float:
    """Blocks that were put into the store since the engine was started."""
    return engine.metric("manthan_encoded_blocks_total")


def wait_until_saved(engine: Any, blocks: float) -> None:
    """Until so many blocks were encoded since the engine was started, or the store is nearly full, which takes more
    only where the pool has need of room."""
    budget = engine.on_worker(store_figures)[2]
    engine.wait(
        lambda: encoded(engine) >= blocks or engine.metric("manthan_cold_bytes") > 0.8 * budget,
        "a session that is saved",
    )
    engine.wait_until_quiet()


def test_sessions_are_saved_before_they_are_overwritten(crowded, table) -> None:
    tables, blocks = [table(seed) for seed in range(SESSIONS)], encoded(crowded)
    for number, t in enumerate(tables):
        prompt, right = t.question(2)
        answer = crowded.ask(prompt, f"user-{number}")
        assert answer.text == right
        blocks += (answer.prompt_tokens + 3) // 32  # the last token's KV is not computed
        crowded.wait(lambda: encoded(crowded) >= blocks, "what is to be saved")  # noqa: B023
    crowded.wait_until_quiet()
    assert crowded.sessions("cold") + crowded.sessions("idle") == SESSIONS
    names = ("manthan_restored_blocks_total", "manthan_overwritten_blocks_total")
    before = [crowded.metric(name) for name in names]
    for number, t in enumerate(tables):  # the one to come back next is always the one that went first
        prompt, right = t.question(14)
        answer = crowded.ask(prompt, f"user-{number}")
        assert answer.text == right
        assert answer.cached_tokens >= 0.95 * (answer.full_blocks - 1) * 32
    restored, overwritten = (crowded.metric(name) - value for name, value in zip(names, before, strict=True))
    assert restored >= (SESSIONS - 3) * 17  # for which the pool had no room
    assert overwritten == 0


def test_the_budget_is_never_exceeded_and_the_oldest_goes_first(crowded, table) -> None:
    blocks = encoded(crowded)
    for seed in range(30, 30 + 12):  # 12 sessions, where pool and store together hold about 10
        prompt, right = table(seed).question(2)
        answer = crowded.ask(prompt, f"user-{seed}")
        assert answer.text == right
        blocks += (answer.prompt_tokens + 3) // 32
        wait_until_saved(crowded, blocks)
    peak, used, budget = crowded.on_worker(store_figures)
    assert 0.8 * budget < used <= peak <= budget
    assert crowded.metric("manthan_dropped_blocks_total", cause="budget") > 0
    prompt, right = table(30 + 10).question(2)
    assert crowded.ask(prompt, "user-40").cached_tokens > 0
    prompt, right = table(30).question(2)
    answer = crowded.ask(prompt, "user-30")
    assert answer.text == right
    assert answer.cached_tokens == 0


def test_a_store_that_fails_costs_a_recompute_only(crowded, table) -> None:
    crowded.on_worker(broken_store)
    tables = [table(seed) for seed in range(80, 80 + SESSIONS)]
    for question in range(2):
        for number, t in enumerate(tables):
            prompt, right = t.question(question)
            assert crowded.ask(prompt, f"user-{number}").text == right
    crowded.wait_until_quiet()
    assert crowded.metric("manthan_failures_total", cause="internal") > 0
    assert crowded.on_worker(store_figures)[1] == 0


def ask_others(engine: Any, table: Any, seeds: Iterable[int]) -> None:
    """Have other sessions fill pool and store, each of which is saved."""
    for seed in seeds:
        blocks = encoded(engine)
        answer = engine.ask(table(seed).question(0)[0], f"other-{seed}")
        wait_until_saved(engine, blocks + (answer.prompt_tokens + 3) // 32)


@pytest.mark.parametrize(
    "hints",
    [{"parent_session_id": "planner"}, pytest.param({}, marks=pytest.mark.slow)],
    ids=["a child", "another session"],
)
def test_a_parent_that_waits_has_the_head_still_when_its_child_is_released(
    crowded: Any, table: Any, hints: dict[str, str]
) -> None:
    """The child is asked again and again, until others' blocks have taken the parent's tail."""
    head = table(200)
    plan, task = (head.text + table(seed).text for seed in (201, 202))
    first = crowded.ask(plan, "planner")
    for at in range(4):
        crowded.ask(f"{task}# {at}", "worker", **hints)
        ask_others(crowded, table, range(210 + 4 * at, 214 + 4 * at))
    crowded.ask(f"{task}# done", "worker", release=True, **hints)
    crowded.wait_until_quiet()
    crowded.empty_pool()
    again = crowded.ask(plan, "planner")
    shared = again.prompt_tokens // 2 // 32 - 1
    assert again.text == first.text
    assert (again.cached_tokens // 32 >= shared) is bool(hints)


@pytest.mark.parametrize("seconds", [600, pytest.param(None, marks=pytest.mark.slow)])
def test_a_range_of_tokens_stays_while_others_take_the_rest(crowded: Any, table: Any, seconds: float | None) -> None:
    """Behind the range, the session is as any other."""
    prompt, right = table(300).question(3)
    kept = 8 * 32
    hints = {} if seconds is None else {"keep": [{"from": 32, "to": kept, "seconds": seconds}]}
    assert crowded.ask(prompt, "keeper", **hints).text == right
    ask_others(crowded, table, range(310, 322))
    crowded.empty_pool()
    again = crowded.ask(prompt, "keeper")
    assert (again.text, again.cached_tokens) == (right, 0 if seconds is None else kept)


@pytest.mark.slow
def test_answers_are_not_saved_while_every_prompt_leaves_them_out(crowded: Any, table: Any) -> None:
    """Turns leave out 64 tokens each. One that keeps them ends it, also for the tests behind this one."""

    def blocks_saved(seed: int) -> float:
        before = encoded(crowded)
        answer = crowded.ask(table(seed).question(0)[0], f"once-{seed}", max_tokens=100)
        crowded.wait(lambda: crowded.sessions("idle") == crowded.sessions("active") == 0, "all is saved")
        saved = encoded(crowded) - before - answer.prompt_tokens // 32
        crowded.reset(cold=True)  # a full store would leave the next session in the pool
        return saved

    assert blocks_saved(400) >= 3
    prompt = ""
    for at in range(24):
        prompt += f"# said {at}\n" * 8
        crowded.ask(prompt, "thinker", max_tokens=64)
    crowded.wait(lambda: crowded.sessions("idle") == 0, "it is saved")
    assert blocks_saved(402) == 0
    answer = crowded.ask(prompt, "keeper", max_tokens=64)
    crowded.ask(f"{prompt}{answer.text} and on", "keeper")
    crowded.wait(lambda: crowded.sessions("idle") == 0, "it is saved")
    assert blocks_saved(403) >= 3
