"""An engine in this process, stepped by its caller, whose prefix cache is reset while a request runs and sessions are
encoded or loaded.

Run as a script; on standard output, what came of it.
"""

import json
import os
import time
from typing import Any

from nap import slow
from stepped_engine import SteppedEngine
from vllm import SamplingParams

PROMPTS = [[(7 * at + 31 * n) % 190 + 10 for at in range(320)] for n in range(3)]


class Stepped(SteppedEngine):
    def begin(self, n: int) -> str:
        name = f"running-{len(self.requests)}"
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
        self.engine.add_request(name, {"prompt_token_ids": PROMPTS[n]}, params, session_id=f"session-{n}")
        return name

    def take(self, steps: int) -> list[int]:
        """Take steps, as many as that or to the end; the tokens of the answer so far."""
        answer: list[int] = []
        while steps and self.engine.has_unfinished_requests():
            for output in self.engine.step():
                answer = list(output.outputs[0].token_ids)
            steps -= 1
        return answer

    def reset(self) -> bool:
        """What is computed next is computed from nothing."""
        return self.engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True)


def main() -> None:
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints
    stepped = Stepped(100, idle_after_s=600, min_tokens=64, codec={"guard": False})
    stepped.begin(0)
    undisturbed = stepped.take(-1)
    for n in range(3):
        stepped.ask(PROMPTS[n], f"session-{n}", 8)
    core: Any = stepped.engine.engine_core.engine_core
    was_reset, answers = [], []
    slow(stepped)
    stepped.begin(0)
    stepped.take(10)
    was_reset.append(stepped.reset())
    answers.append(stepped.take(-1))
    stepped.half.manager.relieve(100, time.monotonic())
    while stepped.half.has_work:
        stepped.engine.step()
    stepped.begin(0)  # is restored
    stepped.engine.step()
    was_reset.append(stepped.reset())
    answers.append(stepped.take(-1))
    was_reset.append(stepped.reset())
    left = core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() - 99
    with report:
        json.dump({"was_reset": was_reset, "answers": answers, "undisturbed": undisturbed, "left": left}, report)


if __name__ == "__main__":
    main()
