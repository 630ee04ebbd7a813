"""Models with several KV cache groups: what happens to blocks beside the chains' costs a recompute, never an answer."""

import json
from pathlib import Path
from typing import Any

import group_models
import pytest
from draft_model import proposed
from scripts import run_script

pytestmark = pytest.mark.slow
ALL = 100_000
"""More first tokens than any session has: all are kept exact."""
MANTHAN = {
    "idle_after_s": 3600,
    "min_tokens": 64,
    "codec": {"name": "k3v3", "sink_tokens": ALL, "guard": False},
    "cold_store": {"max_bytes": "256MiB"},
}
FAMILIES = {"gpt-oss": "float32", "qwen3-next": "bfloat16"}
"""With their dtype: vLLM's CPU build computes states in bf16 only, where answers may depend on how the prompt came."""
LEAST = {"qwen3-next mtp": 480}
"""Tokens of a returning session that come from Manthan: 500 but for MTP, whose states stand every 160 tokens."""
ONCE = ("unreadable", "missing", "corrupted")
"""Faults that a load meets."""


class Ran:
    """What an engine with Manthan told of all faults, and one without it, asked the same prompts one by one."""

    def __init__(self, family: str, folder: Path) -> None:
        self.least = LEAST.get(family, 500)
        name, _, method = family.partition(" ")
        model, options = proposed(family, folder) if method else (group_models.made(name, folder), {})
        job = {"model": model, "batched_tokens": 2048, "engine": {"dtype": FAMILIES[name], **options}}
        self.faults: dict[str, Any] = run(job | {"manthan": MANTHAN, "prompts": None})
        self.turns = [turn for found in self.faults.values() for turn in found["turns"]]
        prompts = [[turn["prompt"], len(turn["tokens"]), *turn.get("interrupted", [])] for turn in self.turns]
        self.plain: list[list[list[int]]] = run(job | {"manthan": None, "prompts": prompts})


def run(job: dict[str, Any]) -> Any:
    out, _ = run_script("group_faults.py", job, OMP_NUM_THREADS="1")
    return json.loads(out.splitlines()[-1])


@pytest.fixture(scope="module", params=["gpt-oss", "qwen3-next", "gpt-oss eagle", "qwen3-next mtp"])
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return Ran(request.param, tmp_path_factory.mktemp("model"))


def test_answers_are_those_of_vllm_alone(ran: Ran) -> None:
    """Hot or anew; and in any of the ways where bf16 rounds otherwise. One that was preempted is computed with what it
    had answered already."""
    for turn, answers in zip(ran.turns, ran.plain, strict=True):
        assert turn["tokens"] in answers
    assert [len(answers) for answers in ran.plain].count(3) == 1, "one was preempted"
    assert len({tuple(hot) for hot, *_ in ran.plain}) > len(ran.plain) // 2


@pytest.mark.parametrize(("fault", "cause"), list(zip(ONCE, ("internal", "missing", "checksum"), strict=True)))
def test_a_load_that_fails_is_told_under_its_cause_and_computed(ran: Ran, fault: str, cause: str) -> None:
    found = ran.faults[fault]
    assert set(found["causes"]) == {cause}
    *failed, again = found["restored"]
    assert failed
    assert all((good, beside) == (0, 0) for good, _, beside in failed), "nothing of it is used"
    assert again[0] == again[1] > 0
    assert again[2] > 0
    assert found["turns"][2]["cached"] >= ran.least


def test_an_aborted_request_s_load_leaves_the_session_as_it_was(ran: Ran) -> None:
    found = ran.faults["aborted"]
    assert found["causes"] == []
    assert [good for good, *_ in found["restored"]] == [blocks for _, blocks, _ in found["restored"]]
    assert found["turns"][-1]["cached"] >= ran.least


def test_with_the_chain_hot_and_the_windows_lost_what_is_cold_is_restored(ran: Ran) -> None:
    found = ran.faults["windows_lost"]
    _, grown, again = (turn["cached"] for turn in found["turns"])
    assert again == grown >= ran.least, "up to where the session was cold, not to the end of what is hot"
    assert found["restored"][0] == found["restored"][1]


def test_who_is_preempted_and_finds_no_windows_is_restored_again(ran: Ran) -> None:
    found = ran.faults["preempted"]
    assert found["causes"] == []
    assert len(found["restored"]) == 3
    assert all(good == blocks > 0 for good, blocks, _ in found["restored"])


def test_nothing_is_left_behind_and_what_is_told_is_what_is_there(ran: Ran) -> None:
    for found in ran.faults.values():
        assert found["free"], "blocks are held"
        assert found["cold_bytes"] == found["stored"] > 0
        assert 2 * found["sessions"] >= found["anchors"] >= found["sessions"] > 0
        assert found["ratio"] == pytest.approx(1, abs=0.02)  # all is exact
