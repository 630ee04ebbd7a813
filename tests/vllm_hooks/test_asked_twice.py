"""A small task asked twice, and restored in between: answers and bytes are those of an engine that kept all.

The prompts begin alike, so that a part of each is resident when the rest of it is restored.
"""

import random
from typing import Any, NamedTuple

import group_models
import pytest
from conversation import ALL
from scripts import run_script

pytestmark = pytest.mark.slow
HEAD, TAILS = 300, (401, 500, 300, 600)
"""Tokens that prompts have in common, and of each besides. Two prompts end with a chunk of Llama 4's attention."""
MANTHAN = {
    "idle": {"after_s": 3600, "min_tokens": 64},
    "codec": {"name": "wht-5x", "sink_tokens": ALL, "guard": False},
    "tiers": {"max_bytes": "128MiB"},
}
"""Nothing is saved before somebody asks for it, or overwrites it next."""
BATCHED = {"falcon-h1": 128}
"""vLLM's CPU build takes Mamba2 in no more at once than fits into a block."""
POOLS = {"gpt-oss": 240, "llama4": 320, "mistral": 150, "qwen3-next": 64, "falcon-h1": 48}
"""Blocks of a pool that a dozen other prompts overwrite."""


class Asked(NamedTuple):
    """Turns of the second time: of an engine that has restored all, and of one that has kept all.

    full: numbers of the KV cache groups with full attention. ours_first, hot_first: the answers of the first time.
    """

    ours: list[dict[str, Any]]
    hot: list[dict[str, Any]]
    full: list[int]
    ours_first: list[list[int]]
    hot_first: list[list[int]]


def ways() -> list[Any]:
    """Families, and whether others overwrite the pool between the two times, instead of a reset."""
    reset = [(family, False) for family in (*POOLS, "gemma3", "gemma4")]
    found = [*reset, *((family, True) for family in POOLS)]
    return [pytest.param(way, id=f"{way[0]}-{'overwritten' if way[1] else 'reset'}") for way in found]


@pytest.fixture(scope="module", params=ways())
def asked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Asked:
    family, overwrites = request.param
    chance = random.Random(1)
    head, *tails = ([chance.randrange(10, 1000) for _ in range(tokens)] for tokens in (HEAD, *TAILS))
    job = {
        "model": group_models.made(family, tmp_path_factory.mktemp("model")),
        "batched_tokens": BATCHED.get(family, 2048),
        "prompts": [head + tail for tail in tails],
        "overwrites": overwrites,
    }
    pool = {"num_gpu_blocks_override": POOLS[family]} if overwrites else {}
    ours, _ = run_script("asked_twice.py", job | {"manthan": MANTHAN, "engine": pool})
    hot, _ = run_script("asked_twice.py", job | {"manthan": None, "engine": {}})
    return Asked(ours["turns"], hot["turns"], hot["full"], ours["first"], hot["first"])


def test_answers_are_those_of_an_engine_that_kept_all(asked: Asked) -> None:
    for name in ("tokens", "logprobs", "cached"):
        assert [turn[name] for turn in asked.ours] == [turn[name] for turn in asked.hot], name
    assert asked.ours_first == asked.hot_first
    assert len({tuple(turn["tokens"]) for turn in asked.ours}) == len(TAILS)
    assert asked.ours[0]["restored"] == asked.ours[0]["cached"] > HEAD
    assert all(0 < turn["restored"] <= turn["cached"] for turn in asked.ours)
    assert not any(turn["restored"] for turn in asked.hot)


def test_blocks_have_the_bytes_that_an_engine_has_which_kept_all(asked: Asked) -> None:
    """Of windows and states those are restored that are needed; with full attention, all."""
    for ours, hot in zip(asked.ours, asked.hot, strict=True):
        restored, kept = ours["blocks"], hot["blocks"]
        assert restored.items() <= kept.items()
        assert {name for name in kept.keys() - restored.keys() if int(name.split()[0]) in asked.full} == set()
    assert groups_of(asked.ours) == groups_of(asked.hot)


def groups_of(turns: list[dict[str, Any]]) -> set[str]:
    return {name.split()[0] for turn in turns for name in turn["blocks"]}
