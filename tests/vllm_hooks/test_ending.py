"""How an answer ended, as policies are told it."""

from types import SimpleNamespace

import pytest
from vllm.v1.engine import FinishReason

from manthan.vllm_hooks.scheduler_half import _ending


@pytest.mark.parametrize(
    ("reason", "stop", "tokens", "ending"),
    [
        (FinishReason.STOP, None, [5, 7, 2], "[7]"),
        (FinishReason.STOP, 200012, [5, 200012], "200012"),
        (FinishReason.STOP, 0, [5, 0], "0"),
        (FinishReason.STOP, None, [2], "[]"),
        (FinishReason.LENGTH, None, [5, 7], ""),
        (FinishReason.ABORT, None, [], ""),
    ],
    ids=["token before the end of sequence", "stop token", "stop token 0", "nothing else", "cut off", "aborted"],
)
def test_a_call_of_a_tool_ends_unlike_a_text(
    reason: FinishReason, stop: int | None, tokens: list[int], ending: str
) -> None:
    request = SimpleNamespace(get_finished_reason=lambda: reason, stop_reason=stop, output_token_ids=tokens)
    assert _ending(request) == ending  # type: ignore[arg-type]
