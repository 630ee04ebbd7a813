"""Sessions that fall idle go cold by themselves, and come back right."""

from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group


def flip_a_byte(worker: Any, position: int) -> int:
    """Change one byte of one stored block; returns how many blocks there are."""
    store = get_kv_transfer_group().worker.path.store
    blocks = list(store._blocks)
    group, key = blocks[len(blocks) // 2]
    damaged = next(store.read(group, [key]))
    damaged[position] ^= 0x10
    assert store.put_all(group, {key: damaged}) == {}
    return len(blocks)


def stored_blocks(worker: Any) -> int:
    return len(get_kv_transfer_group().worker.path.store._blocks)


def note_threads(worker: Any) -> None:
    """From now on, the store notes which threads read and write it."""
    import threading

    store = get_kv_transfer_group().worker.path.store
    store.threads = set()

    def noting(name: str) -> Any:
        call = getattr(type(store), name)

        def wrapper(*args: Any) -> Any:
            store.threads.add(f"{name} on {threading.current_thread().name}")
            return call(store, *args)

        return wrapper

    store.read, store.put_all = noting("read"), noting("put_all")


def noted_threads(worker: Any) -> list[str]:
    return sorted(get_kv_transfer_group().worker.path.store.threads)


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
    assert engine.metric("manthan_cold_bytes") >= cold  # codes are kept while a session is hot again


def test_a_shared_system_prompt_is_stored_once(engine, table) -> None:
    head = table(100).text
    prompts = [table(seed, head).question(3) for seed in range(200, 203)]
    answers = [engine.ask(prompt, f"tenant-{n}") for n, (prompt, _) in enumerate(prompts)]
    engine.wait_until_cold(3)
    shared = answers[1].cached_tokens // 32
    assert shared > 10
    each = [(answer.prompt_tokens + 3) // 32 for answer in answers]  # the last token's KV is not computed
    assert engine.on_worker(stored_blocks) == sum(each) - 2 * shared
    for n, (prompt, right) in enumerate(prompts):
        assert engine.ask(prompt, f"tenant-{n}").text == right


def test_twenty_returns_encode_nothing_again_and_answer_alike(engine, table) -> None:
    prompt, right = table(7).question(9)
    first = engine.ask(prompt, "regular")
    engine.wait_until_cold(1)
    encoded, evictions = engine.metric("manthan_encoded_blocks_total"), engine.metric("manthan_evictions_total")
    for cycle in range(20):
        answer = engine.ask(prompt, "regular")
        assert answer.text == first.text == right
        assert answer.cached_tokens == (answer.prompt_tokens - 1) // 32 * 32
        engine.wait_until_cold(1)
        assert engine.metric("manthan_evictions_total") == evictions + cycle + 1
    assert engine.metric("manthan_encoded_blocks_total") == encoded


def test_a_damaged_block_is_recomputed(engine, table) -> None:
    prompt, right = table(8).question(13)
    whole = engine.ask(prompt, "unlucky")
    for position in (0, 9, 60, 150, 20_000):
        engine.wait_until_cold(1)
        failures = engine.failures()
        stored = engine.on_worker(flip_a_byte, position)
        answer = engine.ask(prompt, "unlucky")
        assert answer.text == right
        assert answer.prompt_tokens == whole.prompt_tokens
        assert engine.failures() == failures + 1
        engine.wait_until_cold(1)
        assert engine.on_worker(stored_blocks) == stored  # computed anew, it was stored anew


def test_sessions_are_found_without_an_id(engine, table) -> None:
    t = table(10)
    prompt, right = t.question(11)
    first = engine.ask(prompt)
    engine.wait_until_cold(1)
    more, right_too = t.question(12)
    follow_up = f"{prompt}{right}\n{more.removeprefix(t.text)}"
    answer = engine.ask(follow_up)
    assert answer.text == right_too
    assert answer.cached_tokens >= first.prompt_tokens // 32 * 32
    engine.wait_until_cold(1)  # it went on with the session that it extends


def test_short_sessions_are_left_alone(engine) -> None:
    evictions = engine.metric("manthan_evictions_total")
    engine.ask("bac = 4821\nassert bac == ", "short")
    engine.ask("bac = 4821\nassert bac == ", "short")
    assert engine.sessions("hot") + engine.sessions("idle") + engine.sessions("cold") == 0
    assert engine.metric("manthan_evictions_total") == evictions


def test_the_model_s_thread_neither_reads_nor_writes_the_store(engine, table) -> None:
    engine.on_worker(note_threads)
    prompt, right = table(11).question(1)
    engine.ask(prompt, "threads")
    engine.wait_until_cold(1)
    assert engine.ask(prompt, "threads").text == right
    assert engine.on_worker(noted_threads) == ["put_all on manthan-encode-0", "read on manthan-restore-0"]
