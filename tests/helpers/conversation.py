"""Conversations in processes of their own; see group_sessions.py."""

import json
from typing import Any

from scripts import run_script

ALL = 100_000
"""More first tokens than any session has: all are kept exact."""
EXACT = {
    "idle": 0.4,
    "idle.min_tokens": 64,
    "codec": {"name": "k3v3", "sink_tokens": ALL},
    "tiers": {"max_bytes": "128MiB"},
}


def run(
    model: str,
    manthan: dict[str, Any] | None,
    batched: int = 2048,
    prompts: Any = None,
    adapter: str | None = None,
    harm: bool = False,
    **engine: Any,
) -> tuple[list[Any], str]:
    """The turns of a conversation, and the log. engine: options of vLLM's."""
    job = {"model": model, "manthan": manthan, "batched_tokens": batched, "prompts": prompts}
    return told("group_sessions.py", job | {"adapter": adapter, "harm": harm, "engine": engine})


def told(script: str, job: dict[str, Any]) -> tuple[list[Any], str]:
    """What a script of this folder says of a job, and the log."""
    out, err = run_script(script, job)
    line = next(line for line in out.splitlines() if line.startswith("[{"))
    return json.loads(line), err + out
