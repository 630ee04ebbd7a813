"""Sessions that fall idle go cold by themselves and come back right, whatever their templates drop and loads fail."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import worker_store
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm_engine import BLOCK, Answer, Engine, Table

pytestmark = pytest.mark.usefixtures("sweeping_engine")


def note_threads(worker: Any) -> None:
    """From now on, the store notes which threads read and write it."""
    import threading

    store = get_kv_transfer_group().worker.engine.store
    store.threads = set()

    def noting(name: str) -> Any:
        call = getattr(type(store), name)

        def wrapper(*args: Any) -> Any:
            store.threads.add(f"{name} on {threading.current_thread().name}")
            return call(store, *args)

        return wrapper

    store.read, store.put_all = noting("read"), noting("put_all")


def noted_threads(worker: Any) -> list[str]:
    return sorted(get_kv_transfer_group().worker.engine.store.threads)


def test_sessions_go_cold_without_traffic_and_come_back_right(engine, table) -> None:
    tables = [table(seed) for seed in range(4)]
    for number, t in enumerate(tables):
        prompt, right = t.question(5)
        assert engine.ask(prompt, f"user-{number}").text == right
    engine.wait_until_cold(4)  # no request in between
    assert engine.metric("manthan_hot_bytes") == 0
    cold = engine.metric("manthan_cold_bytes")
    local, restored = engine.metric("prefix_cache_hits_total"), engine.metric("external_prefix_cache_hits_total")
    answers = []
    for number, t in enumerate(tables):
        prompt, right = t.question(10)
        answers.append(engine.ask(prompt, f"user-{number}"))
        assert answers[-1].text == right
    for answer in answers:
        assert answer.cached_tokens >= 0.95 * (answer.full_blocks - 1) * 32  # the last block holds the question
    assert engine.metric("prefix_cache_hits_total") == local  # the bf16 blocks were really gone
    assert engine.metric("external_prefix_cache_hits_total") - restored == sum(a.cached_tokens for a in answers)
    assert engine.metric("manthan_cold_bytes") >= cold  # compressed blocks are kept while a session is hot again


def test_a_saved_session_that_is_in_the_pool_returns_exact_and_loads_nothing(engine, table) -> None:
    prompt, right = table(21).question(5)
    first = engine.ask(prompt, "quick")
    engine.wait_until_cold(1, resident=True)
    names = ("external_prefix_cache_hits_total", "manthan_restored_blocks_total", "manthan_lossy_tokens_total")
    before = list(map(engine.metric, names))
    answer = engine.ask(prompt, "quick")
    assert answer.text == first.text == right
    assert answer.cached_tokens == (answer.prompt_tokens - 1) // BLOCK * BLOCK
    assert list(map(engine.metric, names)) == before
    engine.wait_until_cold(1)
    engine.ask(prompt, "quick")
    assert all(now > then for now, then in zip(map(engine.metric, names), before, strict=True)), "they count returns"


def test_a_half_empty_pool_overwrites_nothing(engine, table) -> None:
    """Each session is saved, and others that come after it take blocks that hold nothing."""
    questions = [table(seed).question(4) for seed in range(30, 33)]
    lost = engine.metric("manthan_overwritten_blocks_total")
    for turn in range(3):
        for number, (prompt, right) in enumerate(questions):
            answer = engine.ask(prompt, f"user-{number}")
            assert answer.text == right
            assert answer.cached_tokens == ((answer.prompt_tokens - 1) // BLOCK * BLOCK if turn else 0)
            engine.wait_until_quiet()
        engine.wait_until_cold(len(questions), resident=True)
    assert engine.metric("manthan_overwritten_blocks_total") == lost


def test_a_shared_system_prompt_is_stored_once(engine, table) -> None:
    head = table(100).text
    prompts = [table(seed, head).question(3) for seed in range(200, 203)]
    answers = [engine.ask(prompt, f"tenant-{n}") for n, (prompt, _) in enumerate(prompts)]
    engine.wait_until_cold(3)
    shared = answers[1].cached_tokens // 32
    assert shared > 10
    each = [(answer.prompt_tokens + 3) // 32 for answer in answers]  # the last token's KV is not computed
    assert engine.on_worker(worker_store.count) == sum(each) - 2 * shared
    for n, (prompt, right) in enumerate(prompts):
        assert engine.ask(prompt, f"tenant-{n}").text == right


def test_a_damaged_block_is_recomputed(engine, table) -> None:
    prompt, right = table(8).question(13)
    whole = engine.ask(prompt, "unlucky")
    for position in (0, 60, 20_000):
        engine.wait_until_cold(1)
        failures = engine.failures()
        stored = engine.on_worker(worker_store.count)
        engine.on_worker(worker_store.damage, stored // 2, position)
        answer = engine.ask(prompt, "unlucky")
        assert answer.text == right
        assert answer.prompt_tokens == whole.prompt_tokens
        assert engine.failures() == failures + 1
        engine.wait_until_cold(1)
        assert engine.on_worker(worker_store.count) == stored  # computed anew, it was stored anew


def test_the_model_s_thread_neither_reads_nor_writes_the_store(engine, table) -> None:
    engine.on_worker(note_threads)
    prompt, right = table(11).question(1)
    engine.ask(prompt, "threads")
    engine.wait_until_cold(1)
    assert engine.ask(prompt, "threads").text == right
    assert engine.on_worker(noted_threads) == ["put_all on manthan-encode-0", "read on manthan-restore-0"]


# -- chat templates that leave what the model thought out of the next prompt ------------------------------

THOUGHT_TOKENS = 70
"""What the model says in a turn: a right answer, and so much of which nothing comes back."""
TURNS = 4


def turns(engine: Engine, session: str | None) -> Iterator[tuple[Answer, int]]:
    """Each answer, and how many tokens the prompt before it had; only the value goes into the next prompt."""
    table, asked = Table(7), 0
    prompt = table.text
    for index, (name, value) in enumerate(list(table.values.items())[:TURNS]):
        prompt += f"assert {name} == "
        answer = engine.ask(prompt, session, max_tokens=THOUGHT_TOKENS)
        assert answer.text.startswith(value), index
        yield answer, asked
        asked = answer.prompt_tokens
        prompt += f"{value}\n"


def blocks_stored(engine: Engine) -> float:
    """Encoded and not dropped since the engine was started."""
    dropped = sum(
        engine.metric("manthan_dropped_blocks_total", cause=cause) for cause in ("abandoned", "reset", "budget")
    )
    return engine.metric("manthan_encoded_blocks_total") - dropped


def test_a_named_session_goes_on_and_keeps_nothing_else(engine: Engine) -> None:
    before, failures = blocks_stored(engine), engine.failures()
    for answer, asked in turns(engine, "chat"):
        kept = max(0, asked // BLOCK - 1) * BLOCK
        assert kept <= answer.cached_tokens <= asked
        engine.wait_until_cold(1)  # the same session, and no other
    total = answer.prompt_tokens + THOUGHT_TOKENS
    engine.wait(lambda: blocks_stored(engine) - before <= total // BLOCK, "only codes of the last turn's tokens")
    assert blocks_stored(engine) - before >= asked // BLOCK
    assert engine.failures() == failures


def test_without_a_name_it_may_be_somebody_else_who_is_served_exact_kv(engine: Engine) -> None:
    lossy = engine.metric("manthan_lossy_tokens_total")
    for turn, (answer, _) in zip(range(1, TURNS), turns(engine, None), strict=False):
        assert (answer.cached_tokens > 0) == (turn > 2)  # the head that two have shared is stored exact
        assert engine.metric("manthan_lossy_tokens_total") == lossy
        engine.wait(lambda: not any(map(engine.sessions, ("active", "idle"))), "rest")
        engine.empty_pool()
        assert engine.sessions("cold") == turn  # what may be somebody else's stays, until there is need of room


# -- loads that fail whole, as those of models with several KV cache groups do: vLLM asks again -------------


@pytest.fixture
def failing_whole(engine: Engine) -> Iterator[Engine]:
    engine.on_worker(fail_whole, True)
    yield engine
    engine.on_worker(fail_whole, False)


def fail_whole(worker: Any, whole: bool) -> None:
    """From now on, loads do; and it is noted what vLLM is told of them."""
    engine = get_kv_transfer_group().worker.engine
    engine._fails_whole = whole
    if not whole:
        del engine.take_ended
        return
    engine.told = [0, 0]

    def noting() -> Any:
        ended = type(engine).take_ended(engine)
        engine.told = [engine.told[0] + len(ended.failed), engine.told[1] + len(ended.bad_blocks)]
        return ended

    engine.take_ended = noting


def told(worker: Any) -> tuple[int, int]:
    """Of how many loads, and of how many blocks, vLLM was told that they have failed."""
    requests, blocks = get_kv_transfer_group().worker.engine.told
    return requests, blocks


@pytest.mark.parametrize(
    ("spoil", "cause", "depth"), [(worker_store.damage, "checksum", 5), (worker_store.lose, "missing", -1)]
)
def test_what_is_good_is_loaded_once_more_and_the_rest_is_computed(
    failing_whole: Engine, table, spoil: Callable[..., None], cause: str, depth: int
) -> None:
    engine = failing_whole
    prompt, right = table(400).question(6)
    engine.ask(prompt, "unlucky")
    engine.wait_until_cold(1)
    blocks = engine.on_worker(worker_store.count)
    good = depth % blocks
    totals = ("failures", "dropped_blocks", "encoded_blocks")
    labels = ({"cause": cause}, {"cause": "failed"}, {})

    def counted() -> list[float]:
        return [engine.metric(f"manthan_{name}_total", **of) for name, of in zip(totals, labels, strict=True)]

    before, failures = counted(), engine.failures()
    engine.on_worker(spoil, depth)
    answer = engine.ask(prompt, "unlucky")
    assert answer.text == right
    assert engine.on_worker(told) == (1, 0)
    engine.wait_until_cold(1)
    assert [now - then for now, then in zip(counted(), before, strict=True)] == [1, 1, 1]  # it is encoded anew
    assert engine.on_worker(worker_store.count) == blocks
    again = engine.ask(prompt, "unlucky")
    assert again.text == right
    assert again.cached_tokens == (again.prompt_tokens - 1) // BLOCK * BLOCK > good * BLOCK
    assert engine.on_worker(told) == (1, 0)
    assert engine.failures() == failures + 1


def test_others_are_served_and_an_aborted_request_leaves_nothing(failing_whole: Engine, table) -> None:
    engine = failing_whole
    (prompt, right), other = table(410).question(3), table(411).question(4)
    engine.ask(prompt, "unlucky")
    engine.wait_until_cold(1)
    engine.on_worker(worker_store.damage, 3)
    with worker_store.gate(engine):
        asked = [engine.start(engine.generate(prompt, "unlucky")) for _ in range(2)]
        engine.wait(lambda: engine.on_worker(worker_store.at_gate) >= 1, "a load")
        assert engine.ask(other[0], "other").text == other[1]
        asked[0].cancel()
    assert asked[1].result(60).text == right
    engine.wait_until_cold(2)
    engine.wait(lambda: engine.metric("kv_cache_usage_perc") == 0, "an empty pool")
    assert engine.ask(prompt, "unlucky").text == right
    assert engine.reset()  # which vLLM refuses while any block is referenced
