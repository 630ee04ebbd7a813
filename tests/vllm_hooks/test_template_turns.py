"""A hybrid whose chat template drops thinking: requests go on where the last prompt of the same text ended."""

from pathlib import Path

import group_models
import pytest
from conversation import ALL
from scripts import run_script

COMPUTED = 0.1
"""Most of a prompt that is computed anew."""


@pytest.mark.slow
def test_nine_tenths_of_a_prompt_are_not_computed_after_thinking_was_dropped(tmp_path: Path) -> None:
    """A turn's first prompt has lost the thinking of the turn before, which two prompts went on from."""
    manthan = {
        "idle": {"after_s": 3600, "min_tokens": 64},
        "codec": {"name": "wht-5x", "guard": False, "sink_tokens": ALL},
        "tiers": {"max_bytes": "512MiB"},
        "api": False,
    }
    model = group_models.made("qwen3-next-small-blocks", tmp_path / "model")
    job = {"model": model, "manthan": manthan, "prompts": None, "turns": 20, "tools": 2, "blocks": 800, "engine": {}}
    ours, _ = run_script("template_turns.py", job)
    hot, _ = run_script("template_turns.py", job | {"manthan": None, "prompts": [each["prompt"] for each in ours]})
    for what in ("cached", "tokens"):  # what begins at another token rounds otherwise
        assert [each[what] for each in ours] == [each[what] for each in hot], what
    computed = [1 - each["cached"] / len(each["prompt"]) for each in ours[1:]]
    print(f"computed anew: at most {max(computed):.1%}, {sum(computed) / len(computed):.1%} in the mean")
    assert max(computed) < COMPUTED
