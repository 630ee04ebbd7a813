"""Conversations in processes of their own; see group_sessions.py."""

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
    warm: int = 0,
    questions: Any = None,
    **engine: Any,
) -> tuple[list[Any], str]:
    """Return the turns of a conversation, and the log. engine: options of vLLM's."""
    job = {"model": model, "manthan": manthan, "batched_tokens": batched, "prompts": prompts, "adapter": adapter}
    return run_script("group_sessions.py", job | {"harm": harm, "warm": warm, "questions": questions, "engine": engine})
