"""Conversations in processes of their own; see group_sessions.py."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HELPERS = Path(__file__).parent
ALL = 100_000
"""More first tokens than any session has: all are kept exact."""
EXACT = {
    "idle_after_s": 0.4,
    "min_tokens": 64,
    "codec": {"name": "k3v3", "sink_tokens": ALL},
    "cold_store": {"max_bytes": "128MiB"},
}


def run(
    model: str,
    manthan: dict[str, Any] | None,
    batched: int = 2048,
    prompts: Any = None,
    adapter: str | None = None,
    **engine: Any,
) -> tuple[list[Any], str]:
    """The turns of a conversation, and the log. engine: options of vLLM's."""
    job = {"model": model, "manthan": manthan, "batched_tokens": batched, "prompts": prompts}
    return told("group_sessions.py", job | {"adapter": adapter, "engine": engine})


def told(script: str, job: dict[str, Any]) -> tuple[list[Any], str]:
    """What a script of this folder says of a job, and the log."""
    env = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, HELPERS / script], input=json.dumps(job), env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("[{"))
    return json.loads(line), done.stderr + done.stdout
