"""A real vLLM engine in this process, stepped by hand: what it does to blocks, written down one by one.

Run as a script: a job as JSON on standard input, a report as JSON on standard output. After each step the threads that
encode and decode are waited for, so that a step sees what the one before has begun.
"""

import random
import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import vllm_engine  # sets the environment
from scripts import answer
from vllm import EngineArgs, SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

from manthan.manager.session.table import Session, SessionState
from manthan.vllm_hooks import kv_transfer_config, scheduler_half

ASYNC = "vllm.v1.core.sched.async_scheduler.AsyncScheduler"
PATIENCE_S = 300.0


def evict(half: Any, sessions: Iterable[Session] | None = None) -> None:
    """Have these sessions saved, or all, but for those of which a request runs.

    half: the engine's scheduler half.
    """
    for session in list(half.manager.table.by_id.values() if sessions is None else sessions):
        half.driver.steer("evict", session, time.monotonic())
    half.steered()


def evict_all(engine: Any, half: Any) -> None:
    """Step until all sessions are cold, and nothing of them is in the prefix cache."""
    until = time.monotonic() + PATIENCE_S
    evict(half)
    while half.has_work() or any(s.state is not SessionState.COLD for s in half.manager.table.by_id.values()):
        assert time.monotonic() < until, f"sessions do not go cold: {half.manager.table.by_id}"
        half._woken = True
        engine.step()
        time.sleep(0.002)
    assert half.pool._pool.reset_prefix_cache()


class SteppedEngine:
    """Requests one after the other, and after each of them steps until nothing is left to be done."""

    def __init__(
        self, blocks: int, vllm: dict[str, Any] | None = None, model: str = vllm_engine.MODEL, **manthan: Any
    ) -> None:
        """vllm: more of its arguments."""
        arguments: dict[str, Any] = {
            "block_size": vllm_engine.BLOCK,
            "num_gpu_blocks_override": blocks,
            "max_model_len": 2048,
            "enforce_eager": True,
            "gpu_memory_utilization": 0.5,  # of no meaning on the CPU
            "kv_transfer_config": kv_transfer_config(**manthan),
        }
        arguments |= vllm or {}
        self.block: int = arguments["block_size"]
        self.engine = LLMEngine.from_engine_args(EngineArgs(model, **arguments))
        self.core: Any = self.engine.engine_core.engine_core
        self.scheduler: Any = self.core.scheduler
        self.half = self.scheduler.connector.scheduler
        self.actions: list[list[Any]] = []
        self.requests: list[dict[str, Any]] = []
        self.found = [0, 0]
        self._watch()

    def _watch(self) -> None:
        """Note what the scheduler half tells the workers, and what became of each request."""
        half, step, allocated, finished = self.half, self.half.step, self.half.allocated, self.half.finished

        def noting_step(*args: Any) -> Any:
            metadata = step(*args)
            self.actions += [["drop", name.hex()] for drop in metadata.drops for name in drop.block_hashes]
            self.actions += [["store", name.hex()] for job in metadata.stores for name in job.block_hashes]
            return metadata

        def noting_allocated(request: Any, block_ids: Any, tokens: int) -> None:
            first = half._resident.get(request.request_id)
            if first is not None:  # otherwise a load has ended, and it goes on
                more = tokens // self.block
                self.found = [first, more]
                self.actions += [["restore", name.hex()] for name in request.block_hashes[first : first + more]]
            allocated(request, block_ids, tokens)

        def noting_finished(request: Any, blocks: int) -> Any:
            full = min(blocks, request.num_computed_tokens // self.block)
            self.requests.append(
                {
                    "hashes": [name.hex() for name in request.block_hashes[:full]],
                    "input_tokens": request.num_prompt_tokens,
                    "output_tokens": request.num_output_tokens,
                    "session": request.session_id,
                    "found": self.found,
                }
            )
            return finished(request, blocks)

        half.step, half.allocated, half.finished = noting_step, noting_allocated, noting_finished

    @property
    def worker(self) -> Any:
        """The worker half."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group().worker

    def ask(self, tokens: list[int], session: str | None, answer_tokens: int, **more: Any) -> list[int]:
        """Return the tokens of the answer. more: arguments of vLLM's `add_request`."""
        params = SamplingParams(temperature=0, max_tokens=answer_tokens, ignore_eos=True, detokenize=False)
        name = f"request-{len(self.requests)}"
        self.engine.add_request(name, {"prompt_token_ids": tokens}, params, session_id=session, **more)
        answer: list[int] = []
        while self.engine.has_unfinished_requests() or self.half.has_work():
            for output in self.engine.step():
                answer = list(output.outputs[0].token_ids)
            self._wait_for_threads()
        return answer

    def _wait_for_threads(self) -> None:
        self.worker.engine.wait()


class ClockedEngine(SteppedEngine):
    """Its scheduler half reads a clock that stands still but for `rest`. Each step ends with the jobs that it began."""

    def __init__(self, blocks: int, **manthan: Any) -> None:
        super().__init__(blocks, None, **manthan)
        engine = self.worker.engine
        take_report = engine.take_report

        def report_of_all() -> Any:
            engine.wait()
            return take_report()

        engine.take_report = report_of_all
        self.now = time.monotonic()
        scheduler_half.time = SimpleNamespace(monotonic=lambda: self.now, time=time.time)  # type: ignore[assignment]
        self.half._sweeper.stop()  # steps that are due are taken by `rest`

    def rest(self, seconds: float) -> None:
        """Take the steps that are due by then, each in its time."""
        end = self.now + seconds
        while (due := self.half.driver.next_deadline) < end:
            self.now = max(self.now, due)
            self.half._woken = True
            while self.half.has_work():
                self.engine.step()
                self._wait_for_threads()
        self.now = end


def converse(engine: ClockedEngine, requests: int, seed: int, every_s: float) -> None:
    """Sessions, some with a shared beginning, that come back in random order, longer each time, until they are long."""
    rng = random.Random(seed)
    shared = [rng.randrange(10, 200) for _ in range(100)]
    texts: dict[str, list[int]] = {}
    names = [f"user-{number}" for number in range(14)]
    for number in range(requests):
        engine.rest(every_s)
        place = min(int(rng.expovariate(0.25)), len(names) - 1)
        name = names.pop(place)
        if len(texts.get(name, ())) > 600:
            name = f"user-{number + 100}"
        names.insert(0, name)
        text = texts.setdefault(name, list(shared) if rng.random() < 0.5 else [])
        text += [rng.randrange(10, 200) for _ in range(rng.randrange(20, 200))]
        text += engine.ask(text, name if rng.random() < 0.7 else None, rng.randrange(1, 80))


def main(job: Any) -> Any:
    engine = ClockedEngine(job["blocks"], **job["manthan"])
    engine.half.driver._bursts = job["bursts"]
    converse(engine, job["requests"], job["seed"], job["every_s"])
    cold_blocks = engine.half.manager.budget_nbytes // engine.half.manager.shape.cold_nbytes
    return {"actions": engine.actions, "requests": engine.requests, "cold_blocks": cold_blocks}


if __name__ == "__main__":
    answer(main)
