"""When the engine takes its next step: at once where a restore waits for it, and with vLLM's pause otherwise."""

from typing import Any

import pytest
from vllm.v1.engine.core import DPEngineCoreProc, EngineCoreProc

from manthan.vllm_hooks.compat import press_on


def core(kind: type, presses: list[bool], runs: bool) -> Any:
    """An engine core of which nothing is there but the steps that vLLM chooses between when it has started."""

    class Core(kind):  # type: ignore[misc]
        def __init__(self) -> None:
            press_on(lambda: presses.pop(0))

        def step(self) -> Any:
            return "outputs", runs

        step_with_batch_queue = step

    return Core()


@pytest.mark.parametrize("runs", [True, False])
def test_a_step_that_is_followed_at_once_says_that_the_model_was_run(runs: bool) -> None:
    """Which is what vLLM's loop asks before it pauses."""
    made = core(EngineCoreProc, [True, False, True], runs)
    assert made.step_with_batch_queue() == ("outputs", True)
    assert made.step() == ("outputs", runs) if not runs else ("outputs", True)


def test_engines_of_data_parallelism_are_left_as_they_are() -> None:
    """They agree with each other on who has run the model."""
    assert core(DPEngineCoreProc, [True], False).step() == ("outputs", False)
