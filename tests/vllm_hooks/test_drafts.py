"""Speculative decoding: a draft's KV goes cold and returns with the model's, also with windows and states."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conversation import EXACT, run
from draft_model import TINY, make_draft, proposed, proposing
from vllm import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec

from manthan.manager.config.resolve import ConfigError
from manthan.vllm_hooks import kv_transfer_config
from manthan.vllm_hooks.fingerprint import namespace_of
from manthan.vllm_hooks.groups import Groups, KvCacheGroup
from manthan.vllm_hooks.support import blocks_computed_again, check_supported, has_draft
from manthan.vllm_hooks.transfer_config import from_vllm_config

SPEC = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=128, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def eagle(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return proposing(method="eagle", model=make_draft(tmp_path_factory.mktemp("draft")))


KINDS = [
    *("qwen3-next mtp", "glm mtp", "gpt-oss eagle", "gemma3 eagle", "mistral eagle", "gemma4-large eagle"),
    *("tiny-llama eagle3", "gpt-oss eagle3", "llama4 eagle3", "tiny-llama draft_model"),
    *("qwen3-next eagle3", "gemma4-large eagle3"),
    *("gpt-oss ngram", "llama4 ngram", "gemma3n ngram", "gemma4 ngram", "qwen3-next ngram", "qwen3-next eagle"),
]
"""Windows of one size and of several, chunks, states, and layers that share a cache."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_sessions_return_with_a_draft_as_if_they_had_stayed_hot(kind: str, tmp_path: Path) -> None:
    """From where vLLM goes on itself, with the very numbers."""
    model, options = proposed(kind, tmp_path)
    ours, log = run(model, EXACT, **options)
    hot, _ = run(model, None, prompts=[turn["prompt"] for turn in ours], **options)
    assert len(re.findall(r"restored (\d+) of \1 blocks", log)) >= 2
    for what in ("cached", "tokens", "logprobs", "accepted"):
        assert [turn[what] for turn in ours] == [turn[what] for turn in hot], what
    assert all(turn["cached"] > 450 for turn in ours[1:])
    assert set(map(tuple, ours[0]["losses"].values())) == {(0.0, 0.0)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt-oss eagle", "qwen3-next mtp"])
def test_a_prompt_that_ends_with_a_block_is_found_when_it_comes_again(kind: str, tmp_path: Path) -> None:
    """All but that block, as in vLLM, which leaves out the last token no more where it computes a block again."""
    model, options = proposed(kind, tmp_path)
    block = 160 if "qwen" in kind else 32
    prompt = [token % 991 + 10 for token in range(7, 7 + 640 * 7, 7)]
    ours, _ = run(model, EXACT, prompts=[prompt, prompt, prompt], **options)
    hot, _ = run(model, None, prompts=[prompt, prompt, prompt], **options)
    assert [turn["cached"] for turn in ours] == [turn["cached"] for turn in hot] == [0, 640 - block, 640 - block]
    assert [turn["tokens"] for turn in ours] == [turn["tokens"] for turn in hot]


@pytest.mark.slow
def test_blocks_of_several_sizes_lose_the_last_block_that_was_found(tmp_path: Path) -> None:
    """vLLM leaves out as many tokens as the largest block has. What is restored ends there or a smaller block later.

    In float32, because the last tokens that were found are computed in other pieces.
    """
    model, options = proposed("gemma4 eagle", tmp_path)
    options |= {"dtype": "float32"}
    ours, _ = run(model, EXACT, **options)
    own, _ = run(model, None, prompts=[turn["prompt"] for turn in ours], **options)
    assert [a["cached"] - b["cached"] for a, b in zip(ours[1:], own[1:], strict=True)] == [64, 0, 64]
    prompt, cached = ours[1]["prompt"], ours[1]["cached"]
    [_, hot], _ = run(model, None, prompts=[prompt[: cached + 70], prompt], **options)  # so that vLLM finds as much
    assert (hot["cached"], hot["tokens"]) == (cached, ours[1]["tokens"])
    assert ours[1]["logprobs"] == pytest.approx(hot["logprobs"], abs=1e-4)


def configured(options: dict[str, Any], **manthan: Any) -> Any:
    """vLLM's configuration, as far as it can be had without an engine."""
    transfer = kv_transfer_config(**manthan)
    return EngineArgs(str(TINY), max_model_len=1024, kv_transfer_config=transfer, **options).create_engine_config()


def test_one_block_is_computed_again_unless_vllm_is_told_otherwise(eagle: dict[str, Any]) -> None:
    """As vLLM does with its own prefix cache."""
    always = proposing(**eagle["speculative_config"], disable_eagle_block_drop=True)
    ngram = proposing(method="ngram", prompt_lookup_max=3)
    plain = proposing(method="draft_model", model=str(TINY))
    found = [configured(options) for options in (eagle, always, plain, ngram, {})]
    assert [blocks_computed_again(each) for each in found] == [1, 0, 0, 0, 0]
    assert [has_draft(each) for each in found] == [True, True, True, False, False]


def test_drafts_that_were_never_tried_are_refused(eagle: dict[str, Any]) -> None:
    config = configured(eagle)
    config.speculative_config.method = "dflash"
    with pytest.raises(ConfigError) as refused:
        check_supported(config)
    assert str(refused.value) == (
        "Manthan cannot be used here: --speculative-config has method dflash, whose draft's KV was never tried; use "
        "eagle, eagle3, mtp, draft_model, or ngram."
    )


def test_a_drafts_layers_take_no_profile(eagle: dict[str, Any], tmp_path: Path) -> None:
    assert from_vllm_config(configured(eagle)).codec.name == "wht-5x"
    for codec in ({"name": "klt-8x"}, {"profile": str(tmp_path / "p")}):
        with pytest.raises(ConfigError, match=r"but --speculative-config has a draft, .* use .*auto or wht-5x$"):
            configured(eagle, codec=codec)


def test_the_draft_decides_what_codes_mean(eagle: dict[str, Any], tmp_path: Path) -> None:
    """Another draft's KV of the same shape would be of no use."""

    def name(options: dict[str, Any]) -> str:
        config = configured(options)
        return namespace_of(config, from_vllm_config(config), Groups(KvCacheGroup(0, SPEC, 9)), "weights").name

    same = make_draft(tmp_path / "same")
    # The draft's weights are in the digest of all that is loaded.
    assert name(proposing(method="eagle", model=same)) == name(eagle) != name({})
