"""Multimodal prompts: an image is part of its blocks' keys, and its KV goes cold and returns with the others."""

from typing import Any

import pytest
from conversation import EXACT, told
from image_model import make_image_model

TEXT = "name = 4821\n" * 40
MORE = TEXT + "assert name == "
QUESTIONS = [(0, TEXT), (1, TEXT), (0, MORE), (1, MORE)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_image_model(tmp_path_factory.mktemp("model"))


def answers(model: str, manthan: dict[str, Any] | None) -> list[dict[str, Any]]:
    found, _ = told("image_sessions.py", {"model": model, "manthan": manthan, "questions": QUESTIONS})
    return found


@pytest.mark.slow
def test_two_images_in_the_same_place_share_nothing_and_both_return(model: str) -> None:
    ours, hot = answers(model, EXACT), answers(model, None)
    assert [each["cached"] for each in ours[:2]] == [0, 0]
    assert all(each["cached"] > 300 for each in ours[2:])
    assert [each["cached"] for each in ours] == [each["cached"] for each in hot]
    assert [each["tokens"] for each in ours] == [each["tokens"] for each in hot]
    assert [each["logprobs"] for each in ours] == [each["logprobs"] for each in hot]
    assert ours[0]["tokens"] != ours[1]["tokens"]
    assert ours[2]["tokens"] != ours[3]["tokens"]
