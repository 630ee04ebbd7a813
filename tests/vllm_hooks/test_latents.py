"""Latents (MLA): read and written as the backend does, and sessions of a real engine that go cold and return."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from latent_model import INDEX, LATENT, LAYERS, TURNED, make_latent_model
from scripts import run_script
from vllm.config import CacheConfig
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec

from manthan.manager.config.resolve import ConfigError
from manthan.vllm_hooks.groups import Groups, KvCacheGroup, groups_of
from manthan.vllm_hooks.memory import block_format, block_shape
from manthan.vllm_hooks.worker.blocks import HostMemory, LatentMemory
from manthan.vllm_hooks.worker.layout import probe_layers

BLOCK, BLOCKS, FILLED = 16, 8, 21
SPEC = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=LATENT + TURNED, dtype=torch.bfloat16)
NAMES = tuple(f"layer-{n}" for n in range(LAYERS))
GROUP = KvCacheGroup(0, SPEC, LAYERS, NAMES, latent=LATENT)
SHAPE = block_shape(GROUP)
NOISE = 0.0125
"""Of the latents that come back, in energy, beside what they differ in: the default's bound in this test."""

# ---- blocks of a paged cache


def paged() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    caches = {name: torch.zeros(BLOCKS, 1, BLOCK, LATENT + TURNED, dtype=torch.bfloat16) for name in NAMES}
    return caches, {name: SimpleNamespace(impl=CPUMLAImpl.__new__(CPUMLAImpl)) for name in caches}


@pytest.mark.parametrize("memory", [HostMemory, LatentMemory])
def test_a_block_is_read_and_written_as_the_backend_does(memory: type) -> None:
    caches, modules = paged()
    layers = probe_layers(caches, modules, BLOCKS, SHAPE)
    assert not any(cache.any() for cache in caches.values()), "probing leaves nothing behind"
    latents, turned = torch.randn(LAYERS, BLOCK, LATENT).bfloat16(), torch.randn(LAYERS, BLOCK, 1, TURNED).bfloat16()
    slots = 3 * BLOCK + torch.arange(BLOCK)
    for n, (name, module) in enumerate(modules.items()):
        module.impl.do_kv_cache_update(latents[n], turned[n], caches[name], slots, "auto", None)
    read = memory(layers, SHAPE)
    keys, pieces = (torch.from_numpy(part).view(torch.bfloat16) for part in read.gather(3))
    assert torch.equal(keys, turned.transpose(1, 2))
    assert torch.equal(pieces.transpose(1, 2).reshape(LAYERS, BLOCK, LATENT), latents)
    read.scatter(5, *read.gather(3))
    assert all(torch.equal(cache[5], cache[3]) for cache in caches.values())
    assert not any(cache[[0, 1, 2, 4, 6, 7]].any() for cache in caches.values())


def test_latents_of_another_kind_are_bytes() -> None:
    groups = [KVCacheGroupSpec(list(NAMES), SPEC)]
    assert groups_of(KVCacheConfig(8, [], groups), latent=LATENT) == Groups(GROUP, [])
    assert groups_of(KVCacheConfig(8, [], groups), CacheConfig(cache_dtype="fp8"), LATENT).main.is_packed
    assert groups_of(KVCacheConfig(8, [], groups)).main.is_packed


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


def test_the_log_says_what_a_token_takes(coded: dict[str, Any]) -> None:
    form = block_format("wht-5x", GROUP)
    token = -(-form.expected_nbytes(0) // 256) * 256 // BLOCK
    ratio = LAYERS * 2 * (LATENT + TURNED) / token
    assert f"codec wht-5x ({ratio:.2f}x for " in coded["log"]
    assert f", {token} bytes a token)" in coded["log"]
    assert "keys are coded as they are after RoPE" not in coded["log"]


def test_calibrated_codecs_are_refused(tmp_path: Path) -> None:
    from vllm import EngineArgs

    from manthan.vllm_hooks import kv_transfer_config
    from manthan.vllm_hooks.settled import settle_codec

    model = make_latent_model(tmp_path, with_weights=False)
    config = EngineArgs(model, skip_tokenizer_init=True).create_engine_config()
    settle = partial(settle_codec, config)
    config.kv_transfer_config = kv_transfer_config(codec={"name": "klt-8x"})
    with pytest.raises(
        ConfigError, match=r"^codec.name is klt-8x, but .* its latents take no profile: use auto, wht-5x"
    ):
        settle()
    config.kv_transfer_config = kv_transfer_config(codec={"name": "auto", "profile": str(tmp_path / "p")})
    with pytest.raises(ConfigError, match=r"^codec.profile is .* its latents take no profile"):
        settle()
