"""An engine in this process, stepped by its caller, that sleeps or is reset while sessions are encoded or loaded.

Run as a script: on standard input, a job: "nap" or "reset"; on standard output, what came of it.
"""

import time
from typing import Any

from evicted import evict
from scripts import answer
from stepped_engine import SteppedEngine
from vllm import SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group

PROMPTS = [[(7 * at + 31 * n) % 190 + 10 for at in range(320)] for n in range(3)]


class Stepped(SteppedEngine):
    def __init__(self) -> None:
        super().__init__(100, idle={"after_s": 600, "min_tokens": 64}, codec={"guard": False})
        self.core: Any = self.engine.engine_core.engine_core

    def ask_all(self) -> list[int]:
        """How many blocks of each prompt were restored."""
        for n, prompt in enumerate(PROMPTS):
            self.ask(prompt, f"session-{n}", 8)
        return [request["found"][1] for request in self.requests[-len(PROMPTS) :]]

    def slow(self) -> None:
        """Encoding takes a while from now on, and one session is amid it."""
        for blocks in get_kv_transfer_group().worker.engine.blocks.values():
            encode = blocks.encode

            def later(*args: Any, encode: Any = encode) -> Any:
                time.sleep(0.2)
                return encode(*args)

            blocks.encode = later
        evict(self.half, list(self.half.manager.table.by_id.values())[:1])
        self.engine.step()

    def begin(self) -> None:
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
        name = f"running-{len(self.requests)}"
        self.engine.add_request(name, {"prompt_token_ids": PROMPTS[0]}, params, session_id="session-0")

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


def nap(stepped: Stepped) -> dict[str, Any]:
    stepped.ask_all()
    stepped.slow()
    stepped.core.sleep(1)
    asleep = {"steps": stepped.core.scheduler.has_requests(), "held": stepped.half.driver.holds_blocks}
    stepped.core.wake_up()
    return {"restored": stepped.ask_all(), **asleep}


def resets(stepped: Stepped) -> dict[str, Any]:
    """While a request runs and a session is encoded; while one is loaded; and when all has ended."""
    stepped.begin()
    undisturbed = stepped.take(-1)
    stepped.ask_all()
    was_reset, answers = [], []
    stepped.slow()
    stepped.begin()
    stepped.take(10)
    was_reset.append(stepped.reset())
    answers.append(stepped.take(-1))
    evict(stepped.half)
    while stepped.half.has_work:
        stepped.engine.step()
    stepped.begin()  # is restored
    stepped.engine.step()
    was_reset.append(stepped.reset())
    answers.append(stepped.take(-1))
    was_reset.append(stepped.reset())
    left = stepped.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() - 99
    return {"was_reset": was_reset, "answers": answers, "undisturbed": undisturbed, "left": left}


def main(what: str) -> Any:
    return resets(Stepped()) if what == "reset" else nap(Stepped())


if __name__ == "__main__":
    answer(main)
