"""Latents (MLA): read and written as the backend does, and sessions of a real engine that go cold and return."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import profiles
import pytest
import torch
from latent_model import INDEX, LATENT, LAYERS, TURNED, VOCAB, make_latent_model
from scripts import run_script
from vllm.config import CacheConfig
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec

from manthan.codec.base import Dtype
from manthan.codec.calibration import ProfileBuilder
from manthan.manager.calibration.model import ModelReader
from manthan.manager.config.profiles import profile_path
from manthan.manager.config.resolve import ConfigError
from manthan.vllm_hooks.groups import Groups, KvCacheGroup, groups_of
from manthan.vllm_hooks.memory import block_format, block_shape
from manthan.vllm_hooks.support import Latents
from manthan.vllm_hooks.transfer_config import from_vllm_config
from manthan.vllm_hooks.worker.engine_cpu import PagedMemory
from manthan.vllm_hooks.worker.layout import probe_layers

BLOCK, BLOCKS, FILLED = 16, 8, 21
SPEC = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=LATENT + TURNED, dtype=torch.bfloat16)
NAMES = tuple(f"layer-{n}" for n in range(LAYERS))
GROUP = KvCacheGroup(0, SPEC, LAYERS, NAMES, latent=LATENT)
SHAPE = block_shape(GROUP)
LATENTS = Latents(LATENT, TURNED)
NOISE = 0.0125
"""Of the latents that come back, in energy, next to what they differ in: the default's bound in this test."""

# ---- blocks of a paged cache


def paged() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    caches = {name: torch.zeros(BLOCKS, 1, BLOCK, LATENT + TURNED, dtype=torch.bfloat16) for name in NAMES}
    return caches, {name: SimpleNamespace(impl=CPUMLAImpl.__new__(CPUMLAImpl)) for name in caches}


@pytest.mark.parametrize("is_host", [True, False])
def test_a_block_is_read_and_written_as_the_backend_does(is_host: bool) -> None:
    caches, modules = paged()
    layers = probe_layers(caches, modules, BLOCKS, SHAPE)
    assert not any(cache.any() for cache in caches.values()), "probing leaves nothing behind"
    latents, turned = torch.randn(LAYERS, BLOCK, LATENT).bfloat16(), torch.randn(LAYERS, BLOCK, 1, TURNED).bfloat16()
    slots = 3 * BLOCK + torch.arange(BLOCK)
    for n, (name, module) in enumerate(modules.items()):
        module.impl.do_kv_cache_update(latents[n], turned[n], caches[name], slots, "auto", None)
    read = PagedMemory(SHAPE, layers)
    read._is_host = is_host
    keys, pieces = (torch.from_numpy(part).view(torch.bfloat16) for part in read.gather(3))
    assert torch.equal(keys, turned.transpose(1, 2))
    assert torch.equal(pieces.transpose(1, 2).reshape(LAYERS, BLOCK, LATENT), latents)
    read.scatter(5, *read.gather(3))
    assert all(torch.equal(cache[5], cache[3]) for cache in caches.values())
    assert not any(cache[[0, 1, 2, 4, 6, 7]].any() for cache in caches.values())


class Fp8Impl:
    """Writes latents as vLLM's kernel for GPUs does."""

    def do_kv_cache_update(self, latents: Any, keys: Any, cache: Any, slots: Any, dtype: str, scale: Any) -> None:
        assert dtype == "fp8"
        rows = cache.view(torch.float8_e4m3fn).view(-1, LATENT + TURNED)
        both = torch.cat([latents, keys.squeeze(1)], 1).float() / scale
        rows.view(torch.uint8)[slots] = both.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


@pytest.mark.parametrize("is_host", [True, False])
@pytest.mark.parametrize("scale", [1.0, 0.03, 2.0])
def test_a_block_of_fp8_is_found_whatever_the_scale(scale: float, is_host: bool) -> None:
    spec = replace(SPEC, dtype=torch.uint8, cache_dtype_str="fp8")
    group = groups_of(KVCacheConfig(8, [], [KVCacheGroupSpec(list(NAMES), spec)]), latents=LATENTS).main
    shape = block_shape(group)
    assert (shape.dtype, shape.latent, shape.head_dim) == (Dtype.FLOAT8_E4M3, LATENT, TURNED)
    caches = {name: torch.zeros(BLOCKS, 1, BLOCK, LATENT + TURNED, dtype=torch.uint8) for name in NAMES}
    module = SimpleNamespace(impl=Fp8Impl(), kv_cache_dtype="fp8", _k_scale=torch.tensor(scale))
    layers = probe_layers(caches, dict.fromkeys(caches, module), BLOCKS, shape)
    assert not any(cache.any() for cache in caches.values())
    for cache in caches.values():
        cache[3] = torch.randint(0, 0x7F, cache[3].shape)
    read = PagedMemory(shape, layers)
    read._is_host = is_host
    turned, pieces = read.gather(3)
    for n, cache in enumerate(caches.values()):
        assert np.array_equal(cache[3, 0, :, LATENT:].numpy(), turned[n, 0])
        assert np.array_equal(cache[3, 0, :, :LATENT].numpy(), pieces[n].swapaxes(0, 1).reshape(BLOCK, LATENT))
    read.scatter(5, turned, pieces)
    assert all(torch.equal(cache[5], cache[3]) for cache in caches.values())


@pytest.mark.parametrize(
    ("spec", "dtype", "is_coded"),
    [
        (SPEC, "auto", True),
        (replace(SPEC, dtype=torch.uint8, cache_dtype_str="fp8"), "fp8", True),
        (replace(SPEC, dtype=torch.uint8), "fp8_e5m2", True),
        (SPEC, "fp8", False),
        (replace(SPEC, dtype=torch.uint8), "auto", False),
        (replace(SPEC, dtype=torch.uint8, cache_dtype_str="fp8_ds_mla", state_content_bytes=656), "fp8_ds_mla", True),
        (replace(SPEC, dtype=torch.uint8, cache_dtype_str="fp8_ds_mla", state_content_bytes=656), "fp8", True),
        (replace(SPEC, dtype=torch.uint8, cache_dtype_str="fp8_ds_mla", state_content_bytes=640), "fp8_ds_mla", False),
        (replace(SPEC, dtype=torch.uint8, cache_dtype_str="nvfp4_ds_mla", state_content_bytes=352), "auto", False),
        (replace(SPEC, head_size=2 * LATENT), "auto", False),
    ],
    ids=str,
)
def test_latents_in_bf16_or_fp8_are_coded(spec: Any, dtype: Any, is_coded: bool) -> None:
    """Also fp8_ds_mla, whose dtype vLLM's workers and its scheduler name differently."""
    config = KVCacheConfig(8, [], [KVCacheGroupSpec(list(NAMES), spec)])
    assert groups_of(config, CacheConfig(cache_dtype=dtype), LATENTS).main.is_packed is not is_coded
    assert groups_of(config).main.is_packed, "no latents are known of"


def test_latents_are_a_group() -> None:
    assert groups_of(KVCacheConfig(8, [], [KVCacheGroupSpec(list(NAMES), SPEC)]), latents=LATENTS) == Groups(GROUP, [])


# ---- a real engine


@pytest.fixture(scope="module")
def coded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    job = {
        "scenario": "latents",
        "model": make_latent_model(tmp_path_factory.mktemp("latents")),
        "manthan": {"idle": {"after_s": 3600, "min_tokens": 64}},
    }
    report, log = run_script("sessions.py", job)
    return dict(report) | {"log": log}


def test_the_default_keeps_rope_s_part_and_the_first_tokens_and_bounds_the_noise(coded: dict[str, Any]) -> None:
    """In the finest codec: the guard has no verdict yet."""
    assert coded["failures"] == []
    assert coded["hot"]["found"] == [FILLED, 0]
    assert coded["cold"]["found"] == coded["zeros"]["found"] == [0, FILLED]
    assert coded["zeros"]["answer"] != coded["cold"]["answer"], "the answer is made of the cache"
    assert coded["kept"] == [True]
    assert coded["same_tokens"] == [0, 1, 2, 3]
    assert 0 < coded["noise"] < NOISE
    assert coded["sections"] == [
        [["KEYS", "exact", 0, 16], ["LATENT", "exact", 0, 4], ["LATENT", "wht-4x", 4, 12]],
        [["KEYS", "exact", 0, 16], ["LATENT", "wht-4x", 0, 16]],
    ]


def test_index_keys_come_back_with_latents_out_of_one_block(coded: dict[str, Any], tmp_path: Path) -> None:
    """They are kept as bytes, in a section of the same size in each block."""
    job = {
        "scenario": "latents",
        "index": True,
        "model": make_latent_model(tmp_path),
        "manthan": {"idle": {"after_s": 3600, "min_tokens": 64}},
    }
    found, _ = run_script("sessions.py", job)
    assert found["failures"] == []
    assert found["cold"]["found"] == [0, FILLED]
    assert found["kept"] == [True, True]
    assert 0 < found["noise"] < NOISE
    raw = ["RAW", "exact", 0, BLOCK]
    assert found["sections"] == [[raw, *block] for block in coded["sections"]]
    more = LAYERS * BLOCK * INDEX + 64
    assert [size - more for size in found["sizes"][:2]] == coded["sizes"][:2]
    assert found["zeros"]["answer"] != found["cold"]["answer"]


@pytest.mark.parametrize("index", [pytest.param(False, marks=pytest.mark.slow), True])
def test_layers_that_cannot_be_probed_are_bytes(index: bool, tmp_path: Path) -> None:
    """With their index. The scheduler hears of it, too."""
    job = {
        "scenario": "latents",
        "index": index,
        "hidden": True,
        "model": make_latent_model(tmp_path),
        "manthan": {"idle": {"after_s": 3600, "min_tokens": 64}},
    }
    found, log = run_script("sessions.py", job)
    assert found["failures"] == []
    assert found["cold"] == {"answer": found["hot"]["answer"], "found": [0, FILLED]}
    assert found["kept"] == [True]
    assert {tuple(section[:2]) for block in found["sections"] for section in block} == {("RAW", "exact")}
    assert "KV cache group 0 is stored as bytes, because its layout cannot be found: AttributeError: do_kv" in log


def test_the_log_says_what_a_token_takes(coded: dict[str, Any]) -> None:
    form = block_format("wht-5x", GROUP)
    token = -(-form.expected_nbytes(0) // 256) * 256 // BLOCK
    ratio = LAYERS * 2 * (LATENT + TURNED) / token
    assert f"codec wht-5x ({ratio:.2f}x for " in coded["log"]
    assert f", {token} bytes a token)" in coded["log"]
    assert "keys are coded as they are after RoPE" not in coded["log"]


@pytest.mark.slow
def test_a_profile_of_latents_is_used_if_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` does not look for one, and one of keys and values is refused. All ranks have the same latents."""
    from vllm import EngineArgs

    from manthan.vllm_hooks import kv_transfer_config
    from manthan.vllm_hooks.settled import settle_codec

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = make_latent_model(tmp_path)
    config = EngineArgs(model, skip_tokenizer_init=True).create_engine_config()
    made, path = profiles.built_of_latents(), tmp_path / "p"
    made.save(path)
    made.save(profile_path(model))

    def settled(**codec: Any) -> tuple[str, str]:
        config.kv_transfer_config = kv_transfer_config(codec=codec)
        settle_codec(config)
        codec = from_vllm_config(config).codec
        return codec.name, codec.profile

    assert settled(name="auto") == ("wht-5x", "")
    assert settled(name="auto", profile=str(path)) == ("klt-8x", str(path))
    assert settled(name="klt-5x") == ("klt-5x", str(profile_path(model)))
    config.parallel_config.tensor_parallel_size = 2
    assert settled(name="klt-12x") == ("klt-12x", str(profile_path(model)))
    profiles.built(rope=None).save(path)
    with pytest.raises(ConfigError, match=r"is of keys and values, but .* caches latents of 512 numbers: run `manthan"):
        settled(name="klt-8x", profile=str(path))


@pytest.mark.slow
def test_a_session_returns_by_way_of_a_profile(coded: dict[str, Any], tmp_path: Path) -> None:
    """The profile is its own model's. Its blocks are smaller than the finest codec's, and the noise is bounded."""
    folder, path = tmp_path / "model", tmp_path / "p"
    folder.mkdir()
    model = make_latent_model(folder)
    reader, rng = ModelReader(model, "cpu"), np.random.default_rng(0)
    builder = ProfileBuilder(reader.info("fisher", ""))
    reader.read(builder, [rng.integers(10, VOCAB, 512).tolist() for _ in range(3)], True, lambda: None)
    builder.finish().save(path)
    job = {
        "scenario": "latents",
        "model": model,
        "manthan": {
            "idle": {"after_s": 3600, "min_tokens": 64},
            "codec": {"name": "klt-5x", "profile": str(path), "guard": False},
        },
    }
    found, _ = run_script("sessions.py", job)
    assert found["failures"] == []
    assert found["cold"]["found"] == found["zeros"]["found"] == [0, FILLED]
    assert found["kept"] == [True]
    assert found["same_tokens"] == [0, 1, 2, 3]
    assert found["sections"][1] == [["KEYS", "exact", 0, 16], ["LATENT", "klt-5x", 0, 16]]
    assert sum(found["sizes"]) < 0.9 * sum(coded["sizes"])
    assert 0 < found["noise"] < 0.2, "random latents have no directions of their own"
