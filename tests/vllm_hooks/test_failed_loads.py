"""Loads that fail whole, as those of models with several KV cache groups do: vLLM asks again, and hangs on nothing."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import stored_codes
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm_engine import BLOCK, Engine


@pytest.fixture
def failing_whole(engine: Engine) -> Iterator[Engine]:
    engine.on_worker(fail_whole, True)
    yield engine
    engine.on_worker(fail_whole, False)


def fail_whole(worker: Any, whole: bool) -> None:
    """From now on, loads do; and it is noted what vLLM is told of them."""
    path = get_kv_transfer_group().worker.path
    path.fails_whole = whole
    if not whole:
        for name in ("take_failed_loads", "take_failed_blocks"):
            delattr(path, name)
        return
    path.told = {"take_failed_loads": [], "take_failed_blocks": []}

    def noting(name: str) -> Any:
        def take() -> Any:
            taken = getattr(type(path), name)(path)
            path.told[name] += taken
            return taken

        return take

    for name in path.told:
        setattr(path, name, noting(name))


def told(worker: Any) -> tuple[int, int]:
    """Of how many loads, and of how many blocks, vLLM was told that they have failed."""
    noted = get_kv_transfer_group().worker.path.told
    return len(noted["take_failed_loads"]), len(noted["take_failed_blocks"])


@pytest.mark.parametrize(
    ("spoil", "cause", "depth"), [(stored_codes.damage, "checksum", 5), (stored_codes.lose, "missing", -1)]
)
def test_what_is_good_is_loaded_once_more_and_the_rest_is_computed(
    failing_whole: Engine, table, spoil: Callable[..., None], cause: str, depth: int
) -> None:
    engine = failing_whole
    prompt, right = table(400).question(6)
    engine.ask(prompt, "unlucky")
    engine.wait_until_cold(1)
    blocks = engine.on_worker(stored_codes.count)
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
    assert engine.on_worker(stored_codes.count) == blocks
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
    engine.on_worker(stored_codes.damage, 3)
    with stored_codes.gate(engine):
        asked = [engine.start(engine.generate(prompt, "unlucky")) for _ in range(2)]
        engine.wait(lambda: engine.on_worker(stored_codes.at_gate) >= 1, "a load")
        assert engine.ask(other[0], "other").text == other[1]
        asked[0].cancel()
    assert asked[1].result(60).text == right
    engine.wait_until_cold(2)
    engine.wait(lambda: engine.metric("kv_cache_usage_perc") == 0, "an empty pool")
    assert engine.ask(prompt, "unlucky").text == right
    assert engine.reset()  # which vLLM refuses while any block is referenced
