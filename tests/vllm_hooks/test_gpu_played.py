"""The GPU's path on a real engine that runs on the CPU, where torch and numpy play CUDA's part: sessions of models with
several KV cache groups, whose blocks are kept as bytes, but for states and latents. (The CPU's attention lays no other
vector out as a GPU's does.)"""

import json
from pathlib import Path
from typing import Any

import group_models
import pytest
from draft_model import proposed
from latent_model import make_latent_model
from scripts import run_script

SCRIPT = "path_sessions.py"
NOISE = 0.0125
"""Of latents that come back, in energy, at most."""
BATCHED = {"falcon-h1": {"max_num_batched_tokens": 256}}
"""vLLM's CPU build takes Mamba2 in no more at once than fits into a block."""
STATES = {"qwen3-next": {"mamba_ssm_cache_dtype": "float32"}}
"""As larger models have it."""


def run(family: str, folder: Path, what: str, coded: bool = False, **codec: Any) -> dict[str, Any]:
    """What becomes of a session. family: with the method of a draft behind it, if there is one. coded: or else as with
    a cache that only vLLM can read. codec: its settings."""
    is_latent, proposes = family == "latents", {}
    if " " in family:
        model, proposes = proposed(family, folder)
    else:
        model = make_latent_model(folder) if is_latent else group_models.made(family, folder)
    vllm = {"num_gpu_blocks_override": 1024, **BATCHED.get(family, {}), **STATES.get(family, {}), **proposes}
    manthan = {"cold_store": {"kind": "host", "max_bytes": "128MiB"}, "codec": codec}
    job = {"model": model, "what": what, "manthan": manthan, "vllm": vllm, "gpu": True, "latents": is_latent}
    job["coded"] = coded
    out, _ = run_script(SCRIPT, job)
    report: dict[str, Any] = json.loads(out)
    assert report["path"] == "GpuPath"
    return report


@pytest.mark.parametrize(
    "family",
    [
        "gpt-oss",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3-next", "gemma3", "falcon-h1", "latents")),
    ],
)
def test_what_is_kept_as_bytes_gives_what_the_hot_cache_gives(family: str, tmp_path: Path) -> None:
    said = run(family, tmp_path, "come_back")
    assert said["hot"]["cached"] == said["prompt"] // said["block"] * said["block"]
    assert said["cold"] == said["again"] == said["hot"]
    assert said["zeros"]["first"] != said["hot"]["first"], "the answer is made of the cache"
    assert said["causes"] == []
    assert all(name == "exact" and blocks > 0 for name, blocks, _ in said["stored"].values())


@pytest.mark.parametrize(
    ("family", "codec", "made"),
    [
        ("latents", {"name": "wht-4x", "guard": False}, {"wht-4x"}),
        pytest.param("qwen3-next", {"state": "int8"}, {"exact", "state-int8"}, marks=pytest.mark.slow),
    ],
)
def test_latents_and_states_that_are_coded_change_little(
    family: str, codec: dict[str, Any], made: set[str], tmp_path: Path
) -> None:
    """And that once: what returned is not encoded again."""
    said = run(family, tmp_path, "come_back", coded=family == "latents", **codec)
    assert said["hot"]["cached"] == said["cold"]["cached"] == said["again"]["cached"] > 500
    assert said["causes"] == []
    assert {name for name, *_ in said["stored"].values()} == made
    assert said["cold"] == said["again"]
    assert said["cold"]["first"] != said["hot"]["first"], "something is lost"
    restored = said["noise"][: said["prompt"] // said["block"]]
    assert max(restored) < NOISE
    assert (max(restored) > 0) == (family == "latents"), "attention's blocks are exact beside states"


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["tiny-llama eagle", "tiny-llama draft_model", "gemma3 eagle", "qwen3-next mtp", "qwen3-next ngram"]
)
def test_a_draft_s_layers_are_kept_with_the_model_s(kind: str, tmp_path: Path) -> None:
    said = run(kind, tmp_path, "come_back")
    again = not kind.endswith(("ngram", "draft_model"))  # the last block found
    assert said["hot"]["cached"] == (said["prompt"] // said["block"] - again) * said["block"]
    assert said["cold"] == said["again"] == said["hot"]
    assert said["zeros"]["first"] != said["hot"]["first"], "the answer is made of the cache"
    assert said["causes"] == []
    assert said["hot"]["accepted"] > 0 or not kind.startswith("tiny-llama")


@pytest.mark.slow
@pytest.mark.parametrize(("family", "groups"), [("qwen3-next", 4), ("latents", 1)])
def test_what_is_damaged_in_any_group_is_computed_anew(family: str, groups: int, tmp_path: Path) -> None:
    said = run(family, tmp_path, "be_damaged", coded=family == "latents", name="wht-4x", guard=False)
    assert len(said["damaged"]) == groups
    assert said["causes"] == ["checksum"] * groups
    assert all(answer == said["computed"] for answer in said["damaged"].values())
