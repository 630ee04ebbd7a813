"""The GPU's path on a real engine that runs on the CPU, where torch and numpy play CUDA's part: sessions of models with
several KV cache groups, and of those whose blocks are kept as bytes."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import group_models
import pytest
from latent_model import make_latent_model

SCRIPT = Path(__file__).parents[1] / "helpers" / "path_sessions.py"
EXACT = {"name": "k3v3", "sink_tokens": 100_000, "guard": False}
BATCHED = {"falcon-h1": {"max_num_batched_tokens": 256}}
"""vLLM's CPU build takes Mamba2 in no more at once than fits into a block."""
slow = pytest.mark.slow


def run(family: str, folder: Path, what: str, *, as_bytes: bool, **manthan: Any) -> dict[str, Any]:
    """What becomes of a session. as_bytes: as with a cache of fp8."""
    is_latent = family == "latents"
    model = make_latent_model(folder) if is_latent else group_models.made(family, folder)
    vllm = {"num_gpu_blocks_override": 512, **BATCHED.get(family, {})}
    manthan["cold_store"] = {"kind": "host", "max_bytes": "128MiB"}
    job = {"model": model, "what": what, "manthan": manthan, "vllm": vllm, "gpu": as_bytes, "latents": is_latent}
    env = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, SCRIPT], input=json.dumps(job), env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["path"] == "GpuPath"
    return report


@pytest.mark.parametrize(
    ("family", "as_bytes"),
    [
        ("gpt-oss", True),
        ("qwen3-next", False),
        pytest.param("gemma3", True, marks=slow),
        pytest.param("gpt-oss", False, marks=slow),
        pytest.param("falcon-h1", True, marks=slow),
        pytest.param("latents", True, marks=slow),
    ],
)
def test_what_is_exact_gives_what_the_hot_cache_gives(family: str, as_bytes: bool, tmp_path: Path) -> None:
    """As bytes, or in a codec whose tokens are all kept exact."""
    said = run(family, tmp_path, "come_back", as_bytes=as_bytes, codec=EXACT)
    assert said["hot"]["cached"] == said["prompt"] // said["block"] * said["block"]
    assert said["cold"] == said["again"] == said["hot"]
    assert said["zeros"]["first"] != said["hot"]["first"], "the answer is made of the cache"
    assert said["causes"] == []
    assert all(blocks > 0 for _, blocks, _ in said["stored"].values())
    states = {"exact"} if family == "qwen3-next" else set()
    assert {name for name, *_ in said["stored"].values()} == ({"exact"} if as_bytes else {"k3v3"} | states)


@pytest.mark.parametrize(
    "family", ["qwen3-next", pytest.param("gemma3", marks=slow), pytest.param("gpt-oss", marks=slow)]
)
def test_the_default_codec_changes_little(family: str, tmp_path: Path) -> None:
    said = run(family, tmp_path, "come_back", as_bytes=False, codec={"guard": False})
    assert said["hot"]["cached"] == said["cold"]["cached"] > 500
    assert said["cold"] == said["again"] != said["hot"]
    assert all(map(math.isfinite, [*said["cold"]["first"].values(), *said["cold"]["logprobs"]]))
    assert "wht-5x" in {name for name, *_ in said["stored"].values()}


@pytest.mark.parametrize(("family", "as_bytes"), [("gpt-oss", False), pytest.param("qwen3-next", True, marks=slow)])
def test_what_is_damaged_in_any_group_is_computed_anew(family: str, as_bytes: bool, tmp_path: Path) -> None:
    said = run(family, tmp_path, "be_damaged", as_bytes=as_bytes, codec=EXACT)
    assert len(said["damaged"]) > 1
    assert said["causes"] == ["checksum"] * len(said["damaged"])
    assert all(answer == said["computed"] for answer in said["damaged"].values())
