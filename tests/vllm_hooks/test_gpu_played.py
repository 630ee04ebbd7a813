"""Models with several KV cache groups on the real engine, whose worker does as on a GPU: sessions go cold, and
return as if they had stayed hot."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import group_models
import pytest

SCRIPT = Path(__file__).parents[1] / "helpers" / "group_sessions.py"
BATCHED = {"falcon-h1": 256}


def run(**job: Any) -> tuple[list[Any], str]:
    """The turns of a conversation, and the log."""
    env = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, SCRIPT], input=json.dumps(job), env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    told = next(line for line in done.stdout.splitlines() if line.startswith("[{"))
    return json.loads(told), done.stderr + done.stdout


@pytest.mark.parametrize(
    ("family", "as_bytes"),
    [
        ("gpt-oss", True),
        pytest.param("qwen3-next", True, marks=pytest.mark.slow),
        pytest.param("gemma3", True, marks=pytest.mark.slow),
        ("qwen3-next", False),
        pytest.param("gpt-oss", False, marks=pytest.mark.slow),
        pytest.param("falcon-h1", False, marks=pytest.mark.slow),
    ],
)
def test_a_session_returns_as_if_it_had_stayed_hot(family: str, as_bytes: bool, tmp_path: Path) -> None:
    """as_bytes: as with a cache of fp8; else in a codec whose tokens are all kept exact."""
    model, batched = group_models.made(family, tmp_path / "model"), BATCHED.get(family, 2048)
    manthan = {
        "idle_after_s": 0.4,
        "min_tokens": 64,
        "codec": {"name": "k3v3", "sink_tokens": 100_000},
        "cold_store": {"max_bytes": "128MiB"},
    }
    ours, log = run(model=model, manthan=manthan, batched_tokens=batched, prompts=None, gpu=as_bytes)
    prompts = [turn["prompt"] for turn in ours]
    hot, _ = run(model=model, manthan=None, batched_tokens=batched, prompts=prompts)
    assert f"codec {'exact' if as_bytes else 'k3v3'}" in log
    assert len(re.findall(r"restored (\d+) of \1 blocks", log)) >= 2  # the last is told of with the next step
    assert [turn["cached"] for turn in ours] == [turn["cached"] for turn in hot]
    assert all(turn["cached"] > 500 for turn in ours[1:])
    assert [turn["tokens"] for turn in ours] == [turn["tokens"] for turn in hot]
    assert [turn["logprobs"] for turn in ours] == [turn["logprobs"] for turn in hot]
