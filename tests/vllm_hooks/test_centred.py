"""Keys less their block's mean before RoPE in a real engine: its RoPE is found, and biased keys come back."""

import json
from typing import Any

import fake_cuda
import pytest
import torch
from biased_model import with_biased_keys
from scripts import run_script
from vllm import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm_engine import MODEL

from manthan.codec.gpu.torch_codec import TorchPagedCodec
from manthan.codec.model import ModelFacts
from manthan.codec.registry import takes_facts
from manthan.codec.rope import Rope
from manthan.vllm_hooks.fingerprint import fingerprint
from manthan.vllm_hooks.support import Group
from manthan.vllm_hooks.worker.half import paged_codec

SCRIPT = "exact_sessions.py"


def run(model: str, codec: str) -> dict[str, Any]:
    """A session that goes cold and returns three times."""
    manthan = {
        "min_tokens": 64,
        "idle_after_s": 3600,
        "codec": {"name": codec, "sink_tokens": 4},
        "cold_store": {"max_bytes": "64MiB"},
    }
    job = {"what": ["rope", "grow"], "blocks": 131, "manthan": manthan, "model": model}
    out, _ = run_script(SCRIPT, job)
    report: dict[str, Any] = json.loads(out)
    return report


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> str:
    return with_biased_keys(tmp_path_factory.mktemp("biased"))


def test_a_gpu_is_given_pytorchs_operations() -> None:
    """There are no CUDA kernels for it."""
    made = fake_cuda.paged_codec("k4v2c", facts=ModelFacts(Rope((1.0, 0.1))))
    assert type(paged_codec(made.layout, made.format)) is TorchPagedCodec


def test_codes_of_another_rope_are_not_read() -> None:
    """The fingerprint names the codec and the rope; codecs that ask for no place have none in it."""
    config = EngineArgs(MODEL).create_engine_config()
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=128, dtype=torch.bfloat16)
    ropes = [None, Rope((1.0, 0.1)), Rope((1.0, 0.2)), Rope((1.0, 0.1), interleaved=True)]
    marks = {fingerprint(config, Group(0, spec, 4), "k4v2c", facts=ModelFacts(rope)) for rope in ropes}
    assert len(marks) == 4
    assert takes_facts("k4v2c")
    assert not takes_facts("k3v3")


@pytest.mark.slow
def test_a_session_returns_by_way_of_the_models_own_rope() -> None:
    found = run(MODEL, "k4v2c")
    frequencies, interleaved = found["rope"]
    assert frequencies == pytest.approx([10000.0 ** (-pair / 64) for pair in range(64)])
    assert not interleaved
    assert found["right"] == [True] * 4
    assert found["failures"] == []
    assert all(now["restored"] > 16 for now in found["rounds"])


def test_a_session_of_a_model_with_biased_keys_returns(biased: str) -> None:
    found = run(biased, "k4v2c")
    assert found["rope"] is not None
    assert found["right"] == [True] * 4
    assert found["failures"] == []
