"""RoPE by a model's configuration against Transformers' own modules, and undone."""

from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers import GPTNeoXConfig, LlamaConfig  # noqa: E402
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb  # noqa: E402

from manthan.codec.rope import Rope  # noqa: E402

PLACES = np.array([0, 1, 2, 17, 100, 1000, 4000], np.int64)


def llama(kind, head_dim=64, **parameters):
    rope = {"rope_type": kind, "rope_theta": 10000.0, **parameters}
    return LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=16384,
        rope_parameters=rope,
    )


def theirs(module, places=PLACES):
    """Cosines and sines [positions, pairs], their factor in them."""
    cos, sin = module(torch.zeros(1, 1, 1), torch.tensor(places)[None])
    pairs = cos.shape[2] // 2
    return cos[0, :, :pairs].numpy(), sin[0, :, :pairs].numpy()


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_part_of_a_head_may_be_turned(share):
    config = GPTNeoXConfig(
        hidden_size=512,
        num_attention_heads=4,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": share},
    )
    rope = Rope.of_config(config, 128)
    for ours, wanted in zip(rope.tables(PLACES), theirs(GPTNeoXRotaryEmbedding(config)), strict=True):
        assert ours == pytest.approx(wanted, abs=2e-3)


def test_keys_are_turned_as_the_model_does_it():
    config, keys = llama("default"), torch.randn((1, 3, len(PLACES), 64), generator=torch.Generator().manual_seed(0))
    cos, sin = LlamaRotaryEmbedding(config)(keys, torch.tensor(PLACES)[None])
    _, wanted = apply_rotary_pos_emb(keys, keys, cos, sin)
    rope = Rope.of_config(config, 64)
    turned = rope.turn(keys[0].numpy(), PLACES)
    assert turned == pytest.approx(wanted[0].numpy(), abs=5e-3)
    assert rope.turn_back(turned, PLACES) == pytest.approx(keys[0].numpy(), abs=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("turned", [64, 24])
def test_what_is_turned_can_be_turned_back(turned, interleaved):
    rope = Rope(tuple(10000.0 ** (-np.arange(0, turned, 2) / turned)), 1.3, interleaved)
    x = np.random.default_rng(0).standard_normal((2, len(PLACES), 64)).astype(np.float32)
    there = rope.turn(x, PLACES)
    assert there[..., turned:] == pytest.approx(x[..., turned:])
    assert (there[:, 0, :turned]) == pytest.approx(1.3 * x[:, 0, :turned], abs=1e-6)  # at the first position
    assert rope.turn_back(there, PLACES) == pytest.approx(x, abs=1e-5)
    pair = np.array([0, 1] if interleaved else [0, turned // 2])
    assert np.linalg.norm(there[..., pair], axis=-1) == pytest.approx(
        1.3 * np.linalg.norm(x[..., pair], axis=-1), rel=1e-5
    )


@pytest.mark.parametrize(
    "config",
    [
        llama("dynamic", factor=2.0),
        SimpleNamespace(),
        SimpleNamespace(rope_parameters=None),
        SimpleNamespace(
            rope_parameters={"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e4}}
        ),
        SimpleNamespace(rope_parameters={"rope_type": "longrope", "rope_theta": 1e4}),
        SimpleNamespace(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [16, 24, 24]}),
    ],
    ids=["dynamic", "none", "null", "by layer", "by length", "by kind of input"],
)
def test_what_is_not_understood_is_none(config):
    assert Rope.of_config(config, 64) is None


def test_each_kind_of_layer_has_its_own():
    config = transformers.Gemma4TextConfig(head_dim=64, global_head_dim=128)
    local = Rope.of_config(config, 64, "sliding_attention")
    assert local.frequencies == pytest.approx(10_000.0 ** -(np.arange(32) / 32))
    whole = Rope.of_config(config, 128, "full_attention")
    assert whole.frequencies[:16] == pytest.approx(1_000_000.0 ** -(np.arange(16) / 64))
    assert whole.frequencies[16:] == (0.0,) * 48
