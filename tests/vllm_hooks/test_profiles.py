"""Codecs that take a profile: what an engine settles on before it starts, and sessions of a real one that return."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import fake_cuda
import numpy as np
import pytest
import torch
from scripts import run_sessions
from talks import GROUP, Talks
from typer.testing import CliRunner
from vllm import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm_engine import BLOCK, MODEL, Engine, Table

from manthan.codec.model import ModelFacts
from manthan.codec.profile import DIVERGENCES, Profile
from manthan.manager.cli import app
from manthan.manager.config.model import CodecConfig
from manthan.manager.config.profiles import profile_path
from manthan.manager.config.resolve import ConfigError
from manthan.manager.session.blocks import HIGH, MemoryShape
from manthan.manager.session.table import Shares
from manthan.vllm_hooks import kv_transfer_config
from manthan.vllm_hooks.fingerprint import fingerprint
from manthan.vllm_hooks.groups import Groups, KvCacheGroup
from manthan.vllm_hooks.memory import Shards, group_shape, memory_shapes
from manthan.vllm_hooks.settled import DIGEST, settle_codec, settled_profile
from manthan.vllm_hooks.support import UnsupportedError
from manthan.vllm_hooks.transfer_config import from_vllm_config, settings
from manthan.vllm_hooks.worker.half import paged_codec

BF16_BLOCK = 2 * 2 * 4 * 2 * 128 * 32
"""Of the tiny model."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where profiles are looked for."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def configured(model: str = MODEL, **codec: Any) -> Any:
    """vLLM's configuration, as far as it can be had without an engine."""
    transfer = kv_transfer_config(codec=codec)
    return EngineArgs(model, kv_transfer_config=transfer, max_model_len=1024).create_engine_config()


def group(layers: int = 4) -> KvCacheGroup:
    return KvCacheGroup(
        0, FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=128, dtype=torch.bfloat16), layers
    )


# -- before the engine starts -------------------------------------------------------------------------


def test_the_profile_goes_to_all_processes_by_path_and_digest(tiny_profile: Path, cache: Path) -> None:
    made = Profile.load(tiny_profile)
    named = configured(name="klt-8x", profile=str(tiny_profile))
    assert from_vllm_config(named).codec == CodecConfig(name="klt-8x", profile=str(tiny_profile))
    assert settings(named)[DIGEST] == made.digest
    found = settled_profile(named)
    assert found is not None
    assert found.digest == made.digest
    made.save(profile_path(MODEL))
    auto = configured(name="auto")
    assert from_vllm_config(auto).codec == CodecConfig(name="klt-8x", profile=str(profile_path(MODEL)))


def test_what_is_settled_stays_so_unless_the_model_is_another(tiny_profile: Path, cache: Path) -> None:
    """vLLM may check a configuration twice; and a KVTransferConfig may be used for two models."""
    config = configured(name="auto")
    assert from_vllm_config(config).codec.name == "wht-5x"
    settle_codec(config)
    assert from_vllm_config(config).codec.name == "wht-5x"
    assert settled_profile(config) is None
    Profile.load(tiny_profile).save(profile_path(MODEL))
    settle_codec(config)
    assert from_vllm_config(config).codec.name == "klt-8x"


def test_a_profile_that_changes_while_the_engine_starts_is_refused(tiny_profile: Path, tmp_path: Path) -> None:
    path = tmp_path / "p.safetensors"
    shutil.copy(tiny_profile, path)
    config = configured(name="klt-8x", profile=str(path))
    made = Profile.load(path)
    Profile.of(replace(made.info, text="another"), made.ranks).save(path)
    with pytest.raises(ConfigError, match="was changed while the engine started: start the engine again"):
        settled_profile(config)
    path.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        settled_profile(config)


@pytest.mark.invariant(
    12,
    "vllm_hooks/fingerprint.py",
    'parts["profile"] = facts.profile.digest',
    'parts["profile"] = facts.profile.info.model',
)
def test_another_profile_is_another_fingerprint(tiny_profile: Path, tmp_path: Path) -> None:
    made = Profile.load(tiny_profile)
    other = Profile.of(replace(made.info, text="another"), made.ranks)
    other.save(tmp_path / "other")
    configs = [configured(name="klt-8x", profile=str(path)) for path in (tiny_profile, tmp_path / "other")]
    rope = made.info.rope
    marks = {fingerprint(configs[0], group(), "klt-8x", "", ModelFacts(rope, each)) for each in (made, other, None)}
    assert len(marks) == 3


def test_what_is_reserved_and_what_is_expected(tiny_profile: Path) -> None:
    """A bound is above what is expected, and no more than that of the codec without a profile."""
    profile, codec = Profile.load(tiny_profile), CodecConfig(name="klt-8x", sink_tokens=4)
    shape = group_shape(codec, group(), Shards(1), profile)
    centred = group_shape(CodecConfig(name="wht-5x", sink_tokens=4), group(), Shards(1))
    assert shape.pool_nbytes / shape.cold_nbytes > 8
    assert centred.pool_nbytes / centred.cold_nbytes == pytest.approx(4.88, abs=0.01)
    for exact in (0, 4):
        assert shape.cold_nbytes < shape.bounds[exact] <= centred.bounds[exact]
    codecs = [CodecConfig(name=name) for name in ("klt-20x", "klt-8x", "klt-exact")]
    on = (Shards(1, can_trim=can_trim) for can_trim in (True, False))
    shapes = [group_shape(each, group(), shards, profile) for shards in on for each in codecs]
    assert [(each.levels, each.level) for each in shapes] == [(1, 0), (3, 0), (5, 0), (1, 0), (1, 2), (1, 4)]
    assert (centred.levels, centred.level) == (1, HIGH)
    with pytest.raises(ConfigError, match="is of 4 layers, but 3 have a KV cache of their own"):
        group_shape(codec, group(3), Shards(1), profile)


def test_the_budget_cuts_what_costs_least_by_the_profile(tiny_profile: Path) -> None:
    """If the profile tells no divergences, what costs least is that of no model in particular."""
    made, codec = Profile.load(tiny_profile), CodecConfig(name="klt-exact", sink_tokens=4)

    def shape(profile: Profile) -> MemoryShape:
        [first, *others] = memory_shapes(codec, Groups(group()), Shards(1), profile)
        assert all(each.levels == first.levels for each in others), "earlier blocks are cut when the guard has refused"
        return first

    def left(*divergences: float) -> list[int]:
        told = Profile.of(replace(made.info, divergences=divergences), made.ranks)
        of_blocks = {0: replace(GROUP, bounds={0: 60, 16: 500}, levels=5)}
        talks = Talks(1, blocks=100, shape=replace(shape(told), groups=of_blocks), shares=Shares(heads=0.0))
        talks.manager.budget_nbytes, talks.parts = 180, (5, 8, 12, 20, 60)
        talks.go_cold(*"abcde")
        rows = [session.rows for session in talks.manager.table.by_id.values()]
        return [int(level) for of_session in rows for level in talks.manager.blocks.level[of_session]]

    assert left() == left(*DIVERGENCES[:-1]) == [3, 3, 3, 4, 4]
    assert left(0.9, 0.8, 0.7, 0.69) == [2, 2, 2, 4, 4]
    assert [each.divergence for each in shape(made).levels] == [*made.info.divergences, 0.0]
    assert [each.ratio for each in shape(made).levels] == [16 / bits for bits in made.info.bits]


def test_a_codec_without_a_gpu_version_is_refused() -> None:
    codec = fake_cuda.varying_codec("klt-exact")
    with pytest.raises(UnsupportedError, match=r"^codec klt-exact has no GPU version: use wht-5x, .*klt-5x, k3v3, or"):
        paged_codec(codec.layout, codec.format)


# -- an engine ----------------------------------------------------------------------------------------


def test_a_session_returns_by_way_of_a_profile(tiny_profile: Path, tmp_path: Path) -> None:
    """Three times. Its compressed blocks are as small as they should be, and as the books say."""
    found = run_sessions(["profile", "grow"], {"name": "klt-8x", "profile": str(tiny_profile)}, str(tmp_path))
    assert found["profile"] == Profile.load(tiny_profile).digest
    assert found["right"] == [True] * 4
    assert found["failures"] == []
    assert found["rounds"][0]["same"] == [0, 1, 2, 3], "the exact tokens, and no others"
    for last, now in pairwise(found["rounds"]):
        old = BLOCK * last["restored"]
        assert now["same"][:old] == list(range(old)), "what was restored is not encoded again"
        assert not set(now["same"]) & set(range(old, BLOCK * now["restored"]))
    for now in found["rounds"]:
        assert now["restored"] == len(now["exact"]) > 16
        assert now["exact"] == [4] + [0] * (len(now["exact"]) - 1)
        assert BF16_BLOCK / np.mean(now["sizes"][1:]) > 6.5  # the first has exact tokens
        assert now["cold_bytes"] == now["used"]


def test_a_session_returns_at_each_level_that_its_blocks_are_cut_to(tiny_profile: Path, tmp_path: Path) -> None:
    found = run_sessions(["shrink"], {"name": "klt-exact", "profile": str(tiny_profile)}, str(tmp_path))
    assert found["right"] == [True] * 6
    assert found["failures"] == []
    rounds = found["rounds"]
    assert [each["levels"] for each in rounds] == [[each["level"]] * len(each["levels"]) for each in rounds]
    assert all(each["restored"] >= len(each["levels"]) > 5 for each in rounds)
    assert rounds[0]["error"] == 0
    assert all(one["error"] < coarser["error"] for one, coarser in pairwise(rounds))
    assert all(each["cold_bytes"] == each["used"] for each in rounds)


@pytest.mark.slow
def test_two_ranks_have_their_parts_of_a_profile(tiny_profile: Path, tmp_path: Path, start_engine: Any) -> None:
    whole = tmp_path / "two"
    words = ["calibrate", MODEL, "--tokens", "4096", "--out", str(whole), "--tensor-parallel-size", "2"]
    assert CliRunner().invoke(app, words).exit_code == 0
    with pytest.raises(ConfigError, match="is for 1 tensor-parallel ranks, and there are 2"):
        next(start_engine(blocks=131, ranks=2, codec={"name": "klt-8x", "profile": str(tiny_profile)}))
    engines: Iterator[Engine] = start_engine(
        blocks=131,
        ranks=2,
        idle=0.5,
        tiers={"max_bytes": "64MiB"},
        codec={"name": "klt-8x", "sink_tokens": 4, "profile": str(whole)},
    )
    for engine in engines:
        prompt, right = Table(5).question(3)
        assert engine.ask(prompt, "duo").text == right
        engine.wait_until_cold(1)
        answer = engine.ask(prompt, "duo")
        assert (answer.text, answer.cached_tokens) == (right, (answer.prompt_tokens - 1) // 32 * 32)
        assert engine.failures() == 0
