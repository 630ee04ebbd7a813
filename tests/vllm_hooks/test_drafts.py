"""Speculative decoding with a draft: the draft's KV goes cold and returns with the model's."""

import re
from pathlib import Path
from typing import Any

import pytest
from conversation import EXACT, run
from draft_model import LAYERS, TINY, make_draft
from tokenizers import Tokenizer
from vllm_engine import Table

TURNS = 4


def prompts() -> list[list[int]]:
    """A table, and more and more questions in it, with answers."""
    tokenizer, table = Tokenizer.from_file(str(TINY / "tokenizer.json")), Table(7)
    text, made = table.text, []
    for name, value in list(table.values.items())[:TURNS]:
        text += f"assert {name} == "
        made.append(tokenizer.encode(text).ids)
        text += f"{value}\n"
    return made


def proposing(**options: Any) -> dict[str, Any]:
    return {"speculative_config": {"num_speculative_tokens": 3, **options}}


@pytest.fixture(scope="module")
def eagle(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return proposing(method="eagle", model=make_draft(tmp_path_factory.mktemp("draft")))


def test_what_a_draft_proposes_is_as_right_after_a_return(eagle: dict[str, Any]) -> None:
    ours, log = run(str(TINY), EXACT, 2048, prompts(), **eagle)
    hot, _ = run(str(TINY), None, 2048, prompts(), **eagle)
    plain, _ = run(str(TINY), None, 2048, prompts())
    assert len(re.findall(r"restored (\d+) of \1 blocks", log)) >= 2  # the last is told of with the next step
    assert [turn["tokens"] for turn in ours] == [turn["tokens"] for turn in plain]
    assert [turn["cached"] for turn in ours] == [turn["cached"] for turn in hot]
    assert [turn["accepted"] for turn in ours] == [turn["accepted"] for turn in hot]
    assert all(turn["cached"] > 500 and turn["accepted"] >= 10 for turn in ours[1:])
