"""What tests of profiles from traffic do inside the worker of an engine; see `Engine.on_worker`."""

from typing import Any


def hasten(worker: Any) -> None:
    """Have 2,000 tokens make a profile, at once, and 16 blocks a verdict, however slow the codec is."""
    import os

    from manthan.vllm_hooks.worker import guard
    from manthan.vllm_hooks.worker.half import running_half

    os.setpriority = lambda *priority: None  # on a busy machine the lowest one would wait for long
    guard.BATCHES, half = 1, running_half()
    half.guard._prompts._left = 0
    half.calibrator.every, half.calibrator.wanted = 1, 2000
