"""RoPE of the running model: its configuration against the modules that vLLM makes of it."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from logged import warnings
from transformers import Gemma3TextConfig, LlamaConfig
from vllm.model_executor.layers import rotary_embedding

from manthan.vllm_hooks.worker.rope import running_rope

PLACES = np.array([0, 1, 50, 3000], np.int64)
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 4096}
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": LLAMA3,
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 4096},
    "yarn of its own": {"factor": 4.0, "original_max_position_embeddings": 4096, "attention_factor": 1.5},
}
DYNAMIC: dict[str, dict[str, Any]] = {
    "ntk": {"factor": 2.0},
    "ntk of trained positions": {"factor": 2.0, "max_trained_positions": 4096},
    "ntk of alpha": {"alpha": 1000.0, "factor": 1.0},
}


@pytest.fixture(autouse=True)
def none_made(monkeypatch: pytest.MonkeyPatch, engine_config: None) -> None:
    """As in a process without a model."""
    monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", {})


def parameters(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_type": kind.split()[0], "rope_theta": 10000.0} | KINDS.get(kind, {}) | more


def vllm_config(rope: dict[str, Any] | None) -> Any:
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, head_dim=64, max_position_embeddings=16384, rope_parameters=rope
    )
    return SimpleNamespace(model_config=SimpleNamespace(hf_text_config=config))


def make(rope: dict[str, Any], dtype: torch.dtype = torch.bfloat16, neox: bool = True) -> torch.Tensor:
    """What a model's layers do; the cosines and sines."""
    return rotary_embedding.get_rope(64, 16384, neox, rope, dtype).cos_sin_cache


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", [*KINDS, *DYNAMIC])
def test_what_vllm_has_made_is_found(kind: str, dtype: torch.dtype, neox: bool) -> None:
    settings = parameters(kind) if kind in KINDS else parameters("dynamic", **DYNAMIC[kind])
    made = make(settings, dtype, neox)
    rope = running_rope(vllm_config(settings), 64)
    assert rope is not None
    assert rope.interleaved is not neox
    ours = np.concatenate(rope.tables(PLACES), axis=1) * rope.scale
    assert ours == pytest.approx(made[PLACES].float().numpy(), abs=0.01)


@pytest.mark.parametrize(
    ("made", "why"),
    [
        ([], "vLLM has made no RoPE"),
        ([{"rope_type": "default", "rope_theta": 500000.0}], "vLLM's RoPE differs from the model's configuration"),
        ([{"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}], "differs from the model"),
        ([parameters("default"), parameters("linear")], "2 kinds of RoPE"),
    ],
)
def test_what_is_not_understood_is_logged_once(made: list[dict[str, Any]], why: str) -> None:
    for rope in made:
        make(rope)
    with warnings() as lines:
        assert running_rope(vllm_config(parameters("default")), 64) is None
    assert len(lines) == 1
    assert "Manthan: keys are coded as they are after RoPE" in lines[0]
    assert why in lines[0]


LOCAL, GLOBAL = {"rope_type": "default", "rope_theta": 1e4}, {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}


def by_layer() -> Any:
    """Layers with windows of their own RoPE, all but the sixth and the twelfth."""
    config = Gemma3TextConfig(
        num_hidden_layers=12,
        head_dim=64,
        max_position_embeddings=16384,
        rope_parameters={"sliding_attention": LOCAL, "full_attention": GLOBAL},
    )
    return SimpleNamespace(model_config=SimpleNamespace(hf_text_config=config))


def names(*numbers: int) -> list[str]:
    return [f"language_model.model.layers.{number}.self_attn.attn" for number in numbers]


def test_each_kind_of_layer_has_its_own_rope() -> None:
    made = {"local": make(LOCAL), "global": make(GLOBAL)}
    for which, layers in {"local": names(0, 1, 6), "global": names(5, 11)}.items():
        rope = running_rope(by_layer(), 64, layers=layers)
        assert rope is not None
        assert np.concatenate(rope.tables(PLACES), axis=1) == pytest.approx(made[which][PLACES].float(), abs=0.01)
    with warnings() as lines:
        assert running_rope(by_layer(), 64, layers=names(4, 5)) is None
    assert "2 kinds" in lines[0] or "differs from the model" in lines[0]
