"""Exact tokens in a real engine: which of them come back bit for bit, and what their blocks take in the store."""

from typing import Any

import pytest
from scripts import run_sessions
from vllm_engine import BLOCK

from manthan.codec.block import BlockFormat, BlockShape
from manthan.manager.tiers.arena import room

SINK = 4
CODEC = "k3v3"
"""Of fixed rate: what a block takes is known."""
FORM = BlockFormat(CODEC, BlockShape(4, 2, BLOCK, 128), bytes(16))


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """A session that goes cold and returns three times, longer each time."""
    return run_sessions(["grow"], {"name": CODEC, "sink_tokens": SINK})


def exact_of(blocks: int) -> list[int]:
    """How many tokens of each block of a session are exact."""
    return [SINK] + [0] * (blocks - 1)


def sizes_of(exact: list[int]) -> list[int]:
    return [FORM.max_nbytes(tokens) for tokens in exact]


def test_the_first_tokens_come_back_bit_for_bit_and_no_others(report: dict[str, Any]) -> None:
    first = report["rounds"][0]
    assert first["restored"] == len(first["exact"]) > 16
    assert first["exact"] == exact_of(first["restored"])
    assert first["same"] == list(range(SINK))


def test_what_was_restored_is_the_same_from_then_on(report: dict[str, Any]) -> None:
    assert len(report["rounds"]) == 3
    for last, now in zip(report["rounds"], report["rounds"][1:], strict=False):
        old, blocks = last["restored"], now["restored"]
        assert blocks == len(now["exact"]) >= old + 4
        assert now["same"][: old * BLOCK] == list(range(old * BLOCK))
        assert not set(now["same"]) & set(range(old * BLOCK, blocks * BLOCK)), "what was computed since is coded"


def test_what_is_stored_is_what_the_manager_counts(report: dict[str, Any]) -> None:
    for now in report["rounds"]:
        assert now["exact_blocks"] == 1
        assert now["sizes"] == sizes_of(now["exact"])
        assert now["cold_bytes"] == now["used"] == sum(map(room, now["sizes"]))


def test_every_answer_is_right_and_every_load_succeeds(report: dict[str, Any]) -> None:
    assert report["right"] == [True] * 4
    assert report["failures"] == []
