"""An engine in this process, stepped by its caller, that sleeps while sessions are being encoded.

Run as a script: on standard input, whether there is time for that; on standard output, what came of it.
"""

import json
import os
import sys
import time
from typing import Any

from stepped_engine import SteppedEngine

from manthan.vllm_hooks import scheduler_half

PROMPTS = [[(7 * at + 31 * n) % 190 + 10 for at in range(320)] for n in range(3)]


def ask(stepped: SteppedEngine) -> list[int]:
    """How many blocks of each prompt were restored."""
    for n, prompt in enumerate(PROMPTS):
        stepped.ask(prompt, f"session-{n}", 8)
    return [request["found"][1] for request in stepped.requests[-len(PROMPTS) :]]


def main() -> None:
    has_time = json.load(sys.stdin)
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints
    stepped = SteppedEngine(100, idle_after_s=600, min_tokens=64, codec={"guard": False})
    ask(stepped)
    if not has_time:
        scheduler_half.BEDTIME_S = -1.0  # it is over before anything begins
    core: Any = stepped.engine.engine_core.engine_core
    slow(stepped)
    core.sleep(1)
    asleep = {"steps": core.scheduler.has_requests(), "held": stepped.half.driver.holds_blocks}
    core.wake_up()
    with report:
        json.dump({"restored": ask(stepped), **asleep}, report)


def slow(stepped: SteppedEngine) -> None:
    """Encoding takes a while, so that sessions are amid it when the engine is told to sleep."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    for blocks in get_kv_transfer_group().worker.path.blocks.values():
        encode_all = blocks.encode_all

        def later(*args: Any, encode_all: Any = encode_all) -> Any:
            time.sleep(0.2)
            return encode_all(*args)

        blocks.encode_all = later
    stepped.half.manager.relieve(1, time.monotonic())  # one session is
    stepped.engine.step()


if __name__ == "__main__":
    main()
