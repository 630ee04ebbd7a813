"""Models with several KV cache groups on the real engine: sessions go cold, and return as if they had stayed hot."""

import math
import random
import re
from pathlib import Path
from statistics import median
from typing import Any

import group_models
import pytest
import torch
from conversation import ALL, run
from lora_adapter import make_adapter
from nas_model import make_nas_model
from vllm_engine import Engine

BATCHED = {"falcon-h1": 128, "nemotron-h": 128, "granite": 128}
"""vLLM's CPU build takes Mamba2 in no more at once than fits into a block."""


def families() -> list[Any]:
    """`make test` tries one with windows and one with states."""
    fast = ("gpt-oss", "nemotron-h")
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in group_models.FAMILIES]


STATES = {"qwen3-next": 3, "qwen3-next-small-blocks": 3, "falcon-h1": 1, "nemotron-h": 2, "granite": 2}
"""Groups of states."""
WHT = {"name": "wht-5x", "guard": False}
WITHOUT_TOKENIZER = {"skip_tokenizer_init": True, "block_size": 16, "max_num_batched_tokens": 512}
LOCAL = 1e4 ** (-1 / 32)
GLOBAL = {"gemma3": 1e6 ** (-1 / 32), "gemma3n": 1e6 ** (-1 / 32), "gemma4": 1e6 ** (-1 / 64)}
"""The second pair's frequencies in layers with windows, and in those with full attention."""


def manthan(**codec: Any) -> dict[str, Any]:
    return {"idle": {"after_s": 0.4, "min_tokens": 64}, "codec": codec, "tiers": {"max_bytes": "128MiB"}}


@pytest.mark.parametrize("family", families())
def test_a_session_returns_as_if_it_had_stayed_hot(family: str, tmp_path: Path) -> None:
    ropes = returns_as_if_hot(group_models.made(family, tmp_path / "model"), BATCHED.get(family, 2048))
    if family in GLOBAL:
        seconds = {round(frequencies[1], 6) for frequencies in ropes.values()}
        assert seconds == {round(LOCAL, 6), round(GLOBAL[family], 6)}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama4", "gpt-oss", "qwen3-next-small-blocks"])
def test_a_part_of_it_is_resident_already(family: str, tmp_path: Path) -> None:
    """Some blocks of a prompt were found or loaded just before: of Llama 4's, up to the middle of a chunk."""
    returns_as_if_hot(group_models.made(family, tmp_path / "model"), 2048, warm=350)


@pytest.mark.slow
def test_blocks_that_slide_out_of_windows_push_out_no_saved_session(tmp_path: Path) -> None:
    """The pool has room for two sessions' blocks with full attention, and for one session's with windows."""
    engine = Engine(130, model=group_models.made("gpt-oss", tmp_path), flags=WITHOUT_TOKENIZER, idle=0.4)
    rng = random.Random(0)
    one, other = ([rng.randrange(10, 900) for _ in range(1500)] for _ in range(2))
    try:
        engine.run(engine.complete(one, "one", 4))
        engine.wait_until_cold(1, resident=True)
        engine.run(engine.complete(other, "other", 4))
        assert engine.run(engine.complete(one, "one", 4)).cached_tokens >= 1440
        assert engine.metric("manthan_restored_blocks_total") == 0
    finally:
        engine.stop()


@pytest.mark.slow
def test_states_push_out_no_session(tmp_path: Path) -> None:
    """The pool has room for five sessions. States of older ones, and in the middle of prompts, leave it in time."""
    engine = Engine(64, model=group_models.made("qwen3-next", tmp_path), flags=WITHOUT_TOKENIZER, idle=0.4)
    rng = random.Random(0)
    prompts = [[rng.randrange(10, 900) for _ in range(1500)] for _ in range(16)]
    try:
        for number, prompt in enumerate(prompts):
            engine.run(engine.complete(prompt, f"session {number}", 4))
            engine.wait_until_cold(number + 1, resident=True)
        for number in (13, 14, 15):
            assert engine.run(engine.complete(prompts[number], f"session {number}", 4)).cached_tokens >= 1280
        assert engine.metric("manthan_restored_blocks_total") == 0
    finally:
        engine.stop()


@pytest.mark.slow
def test_layers_of_several_shapes_are_bytes(tmp_path: Path) -> None:
    """Layers with different numbers of KV heads, all with full attention, have one group (Nemotron-NAS)."""
    ropes = returns_as_if_hot(make_nas_model(tmp_path), 2048, trust_remote_code=True)
    assert ropes == {"0": None}


@pytest.mark.slow
def test_without_the_hybrid_cache_manager(tmp_path: Path) -> None:
    """vLLM keeps the blocks of all tokens then, in one group: one like any other."""
    model = group_models.made("gemma3", tmp_path / "model")
    returns_as_if_hot(model, 2048, disable_hybrid_kv_cache_manager=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "unit", "warm"),
    [("qwen3-next", 32, 0), ("qwen3-next", 32, 360), ("falcon-h1", 16, 0), ("gemma4", 16, 0)],
)
def test_a_finer_unit_of_matching(family: str, unit: int, warm: int, tmp_path: Path) -> None:
    """A session that is restored goes on behind its last whole block, as in vLLM without that unit.

    With `warm` tokens, what is resident ends within a block, of which all is saved. The pieces in which a prompt is
    computed decide how numbers are rounded. Those of the first turn end as in vLLM with that unit.
    """
    model = group_models.made(family, tmp_path / "model")
    batched = BATCHED.get(family, 2048)
    ours, log = run(model, manthan(**WHT, sink_tokens=ALL), batched, warm=warm, prefix_match_unit=unit)
    prompts = [turn["prompt"] for turn in ours]
    whole, _ = run(model, None, batched, prompts)
    [first], _ = run(model, None, batched, prompts[:1], prefix_match_unit=unit)
    assert len(re.findall(r"restored (\d+) of \1 blocks", log)) >= 2
    assert [turn["cached"] for turn in ours] == [turn["cached"] for turn in whole]
    for what in ("tokens", "logprobs"):
        assert [turn[what] for turn in ours[:2]] == [first[what], whole[1][what]], what


@pytest.mark.slow
@pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="vLLM has fp8 KV on x86 with AVX-512 only")
@pytest.mark.parametrize("family", group_models.FAMILIES)
def test_numbers_of_fp8(family: str, tmp_path: Path) -> None:
    """Those of attention. States stay what they are."""
    returns_as_if_hot(group_models.made(family, tmp_path / "model"), BATCHED.get(family, 2048), kv_cache_dtype="fp8")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "gemma3-full", "mistral", "gemma4", "falcon-h1", "nemotron-h"])
def test_an_adapter(family: str, tmp_path: Path) -> None:
    """vLLM's CPU build has LoRA for models without experts."""
    model = group_models.made(family, tmp_path / "model")
    adapter, batched = make_adapter(tmp_path / "adapter", 1, model), BATCHED.get(family, 2048)
    engine = {"adapter": adapter, "enable_lora": True, "max_lora_rank": 8}
    ours, log = run(model, manthan(**WHT, sink_tokens=ALL), batched, **engine)
    hot, _ = run(model, None, batched, [turn["prompt"] for turn in ours], **engine)
    [without], _ = run(model, None, batched, [ours[0]["prompt"]])
    assert len(re.findall(r"restored (\d+) of \1 blocks", log)) >= 2
    for what in ("cached", "tokens", "logprobs"):
        assert [turn[what] for turn in ours] == [turn[what] for turn in hot], what
    assert all(turn["cached"] > 500 for turn in ours[1:])
    assert without["logprobs"] != ours[0]["logprobs"]


def returns_as_if_hot(model: str, batched: int, **engine: Any) -> dict[str, list[float]]:
    """With all tokens exact. Returns how keys are turned in each KV cache group, see the script."""
    ours, log = run(model, manthan(**WHT, sink_tokens=ALL), batched, **engine)
    hot, _ = run(model, None, batched, [turn["prompt"] for turn in ours], **engine)
    assert len(re.findall(r"restored (\d+) of \1 blocks", log)) >= 2  # the last is told of with the next step
    assert [turn["cached"] for turn in ours] == [turn["cached"] for turn in hot]
    assert all(turn["cached"] > 500 for turn in ours[1:])
    assert [turn["tokens"] for turn in ours] == [turn["tokens"] for turn in hot]
    assert [turn["logprobs"] for turn in ours] == [turn["logprobs"] for turn in hot]
    assert len({tuple(turn["tokens"]) for turn in ours}) == len(ours)
    ropes: dict[str, list[float]] = ours[0]["ropes"]
    return ropes


@pytest.mark.slow
@pytest.mark.parametrize(("family", "dtype"), [("gpt-oss", "float32"), ("qwen3-next", "bfloat16")])
def test_a_session_whose_windows_or_states_are_damaged_is_computed_anew(
    family: str, dtype: str, tmp_path: Path
) -> None:
    model = group_models.made(family, tmp_path / "model")
    ours, log = run(model, manthan(**WHT, sink_tokens=ALL), harm=True, dtype=dtype)
    [plain], _ = run(model, None, prompts=[ours[2]["prompt"]], dtype=dtype)
    assert [turn["cached"] > 500 for turn in ours] == [False, True, False, True]
    assert ours[2]["cached"] == 0, "nothing of it is used"
    assert (ours[2]["tokens"], ours[2]["logprobs"]) == (plain["tokens"], plain["logprobs"])
    assert re.search(r"restored 0 of \d+ blocks \(0 tokens\) .* could not be read \(checksum\)", log)


def change(ours: dict[str, Any], hot: dict[str, Any]) -> float:
    """The most by which a log-probability of a turn's answer is another, up to the first other token."""
    told, found, same = [turn[what] for what in ("tokens", "logprobs") for turn in (ours, hot)], 0.0, True
    for token, other, x, y in zip(*told, strict=True):
        found, same = max(found, abs(x - y) if same else 0.0), same and token == other
    return found


@pytest.mark.slow
@pytest.mark.parametrize("family", group_models.FAMILIES)
def test_the_default_codec_loses_as_much_in_every_group(family: str, tmp_path: Path) -> None:
    """What it loses of a normal distribution: keys and values of random weights have one. States lose nothing."""
    model, batched = group_models.made(family, tmp_path / "model"), BATCHED.get(family, 2048)
    ours, log = run(model, manthan(**WHT), batched, max_logprobs=-1)
    hot, _ = run(model, None, batched, [turn["prompt"] for turn in ours], max_logprobs=-1)
    assert len(re.findall(r"restored (\d+) of \1 blocks", log)) >= 2
    losses = list(ours[0]["losses"].values())
    states = losses.count([0, 0])
    assert states == STATES.get(family, 0)
    assert len(losses) == len(ours[0]["ropes"])
    for keys, values in [each for each in losses if each != [0, 0]]:
        assert 0.004 < keys < 0.0125  # less where they have much in common
        assert 0.04 < values < 0.06
    lost = max(divergence(a, b) for a, b in zip(ours[2:], hot[2:], strict=True))
    print(f"{family}: {losses}, KL {lost:.2g}")
    assert 0 < lost < 1, "random weights, whose answers hang on every number"


def divergence(ours: dict[str, Any], hot: dict[str, Any]) -> float:
    """KL of the first token of a turn's answer, in nats."""
    return sum(math.exp(y) * (y - x) for x, y in zip(ours["first"], hot["first"], strict=True))


def texts(count: int) -> list[list[int]]:
    """Prompts of `count` conversations, three of each."""
    chance = random.Random(3)
    whole = [[chance.randrange(10, 1000) for _ in range(900)] for _ in range(count)]
    return [text[:length] for text in whole for length in (700, 800, 900)]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3-next", "falcon-h1"])
def test_states_in_fewer_bits_lose_little(family: str, tmp_path: Path) -> None:
    """Those of float32, as Qwen3.5's are; the KV is exact.

    The median of 8 turns counts, because the least error may have a router with random weights choose other experts.
    """
    model, batched = group_models.made(family, tmp_path / "model"), BATCHED.get(family, 2048)
    vllm = {"mamba_ssm_cache_dtype": "float32", "max_logprobs": -1}
    prompts = texts(4)
    hot, _ = run(model, None, batched, prompts, **vllm)
    changes, divergences, sizes = {}, {}, list[float]()
    for state in ("exact", "bf16", "int8"):
        ours, log = run(model, manthan(name="k3v3", sink_tokens=ALL, state=state), batched, prompts, **vllm)
        assert len(re.findall(r"restored (\d+) of \1 blocks", log)) >= 7
        pairs = [pair for at, pair in enumerate(zip(ours, hot, strict=True)) if at % 3]
        changes[state] = sorted(change(a, b) for a, b in pairs)
        divergences[state] = sorted(divergence(a, b) for a, b in pairs)
        *_, size = re.findall(r"session anonymous-1 went cold .* to ([\d.]+[KM]iB)", log)
        sizes.append(float(size.removesuffix("MiB")))
        told = [f"{median(each):.2g}, {each[-1]:.2g} at most" for each in (divergences[state], changes[state])]
        print(f"{family}, {state}: {size}, KL {told[0]}; a log-probability {told[1]}")
    assert changes["exact"][-1] == divergences["exact"][-1] == 0
    assert (divergences["bf16"][-1] > 0) == (family == "falcon-h1")  # nothing with the kernel of the other
    assert median(changes["bf16"]) < 0.05
    assert median(divergences["bf16"]) < 1e-4
    assert 0 < median(changes["int8"]) < 0.05
    assert 0 < median(divergences["int8"]) < 2e-4
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == len(sizes)
