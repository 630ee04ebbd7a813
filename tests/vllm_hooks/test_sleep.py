"""vLLM's sleep mode: compressed blocks stay while the weights do. The CPU build gives no memory away, but tells
everybody the same; tests/gpu/test_sleep.py has a GPU that does."""

import asyncio
from collections.abc import Iterator

import pytest
from scripts import run_script
from sleeper import MOMENTS, asked_again, asked_again_of_other_weights, converse, sleep, wake
from vllm_engine import Answer, Engine, Table


@pytest.fixture(autouse=True)
def awake(sweeping_engine: Engine) -> Iterator[None]:
    """It is awake for others again, whatever a test has left."""
    yield
    sweeping_engine.run(sweeping_engine.llm.wake_up())


def test_what_was_cold_is_restored_after(engine: Engine) -> None:
    told = converse(engine)
    local = engine.metric("prefix_cache_hits_total")
    sleep(engine)
    assert engine.run(engine.llm.is_sleeping())
    wake(engine)
    for (_, answer), found in zip(told, asked_again(engine, told), strict=True):
        assert found >= 0.95 * (answer.full_blocks - 1) * 32
    assert engine.metric("prefix_cache_hits_total") == local  # all of it was lost, and came out of the cold store


def test_what_was_cold_stays_over_two_sleeps_in_parts(engine: Engine) -> None:
    told = converse(engine)
    sleep(engine)
    wake(engine, "weights")
    wake(engine, "kv_cache")
    sleep(engine)
    wake(engine)
    assert min(asked_again(engine, told)) > 400


@pytest.mark.parametrize("moment", MOMENTS)
def test_codes_of_other_weights_are_dropped(engine: Engine, moment: str) -> None:
    assert asked_again_of_other_weights(engine, moment) == [0]


@pytest.mark.parametrize(
    "how",
    [
        "level 2",
        *[pytest.param(how, marks=pytest.mark.slow) for how in ("a pause that clears the cache", "a reset meanwhile")],
    ],
)
def test_other_resets_drop_all(engine: Engine, how: str) -> None:
    told = converse(engine)
    if how == "level 2":
        sleep(engine, 2)
    elif how == "a pause that clears the cache":
        engine.run(engine.llm.pause_generation(mode="abort", clear_cache=True))
        engine.run(engine.llm.resume_generation())
    else:
        sleep(engine)
        assert engine.reset(cold=True)
    wake(engine)
    assert asked_again(engine, told) == [0, 0, 0]


def test_an_answer_that_is_cut_off_by_a_sleep_goes_on_after_it(engine: Engine) -> None:
    prompt, _ = Table(710).question(2)
    whole = engine.ask(prompt, "uncut", max_tokens=100)
    engine.start_afresh()
    failures = engine.failures()

    async def interrupted() -> Answer:
        running = asyncio.ensure_future(engine.generate(prompt, "cut", 100))
        while not engine.sessions("active"):
            await asyncio.sleep(0.01)
        await engine.llm.sleep(1, "keep")
        assert not running.done()
        await engine.llm.wake_up()
        return await running

    assert engine.run(interrupted()).text == whole.text
    assert engine.failures() == failures


@pytest.mark.slow
def test_an_engine_in_its_caller_s_process_comes_to_rest_amid_an_encoding() -> None:
    """The blocks whose encoding had begun are saved; those of other sessions are not."""
    told, _ = run_script("sessions.py", {"scenario": "nap"})
    assert told == {"steps": False, "held": False, "restored": [6, 0, 0]}
