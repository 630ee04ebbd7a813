"""A real engine with several waiting requests, stepped by hand: in which order the scheduler gives them blocks.

Run as a script: a job as JSON on standard input, a report as JSON on standard output.
"""

import time
from typing import Any

from scripts import answer
from stepped_engine import ASYNC, SteppedEngine, evict
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

BOUND_S = 10.0
"""The bound that most engines here are given."""
STEP = 512
"""Tokens that a step computes."""


def prompt(seed: int, tokens: int = 600) -> list[int]:
    return [(7 * at + 31 * seed * at + seed) % 190 + 10 for at in range(tokens)]


class Waiting(SteppedEngine):
    """Requests by name. A scenario adds some at chosen times, with no step between, and serves them."""

    def __init__(self, policy: str, is_async: bool, talk: list[int] | None, **manthan: Any) -> None:
        """talk: what another engine has computed for the session; None for it to be computed here."""
        kind = ASYNC if is_async else None
        more = {"max_num_batched_tokens": STEP, "scheduling_policy": policy, "scheduler_cls": kind}
        more["dtype"] = "float32"  # answers do not depend on how a prompt is divided into steps
        super().__init__(100, more, idle={"after_s": 3600, "min_tokens": 64}, codec={"guard": False}, **manthan)
        self.admitted: list[str] = []
        self.answers: dict[str, list[int]] = {}
        self.base = time.time()
        allocated = self.half.allocated

        def noting(request: Any, *args: Any) -> None:
            if not request.num_computed_tokens:  # otherwise a load has ended, and it goes on
                self.admitted.append(request.request_id.rpartition("-")[0])
            allocated(request, *args)

        self.half.allocated = noting
        self.talk = talk or prompt(0)
        if talk is None:
            self.talk += self.ask(self.talk, "back", 8)
        self.admitted.clear()

    def add(self, name: str, tokens: list[int], after_s: float, priority: int = 0, **options: Any) -> None:
        params = SamplingParams(temperature=0, detokenize=False, **{"max_tokens": 4, "ignore_eos": True} | options)
        given = {"prompt_token_ids": tokens}, params, self.base + after_s
        self.engine.add_request(name, *given, priority=priority, session_id=name)

    def add_all(self, seed: int, returns_s: float) -> None:
        """Three first prompts, and the session's return that much after the first of them."""
        for at in range(3):
            self.add(f"first-{at}", prompt(seed + at), 0.1 * at)
        self.add("back", [*self.talk, *prompt(seed, 20)], returns_s)

    def step(self) -> None:
        for output in self.engine.step():
            self.answers[output.request_id] = list(output.outputs[0].token_ids)
        self._wait_for_threads()

    def serve(self) -> dict[str, Any]:
        """Serve all that wait; the order in which they got blocks, and the answers."""
        while self.engine.has_unfinished_requests():
            self.step()
        assert not self.scheduler.waiting
        report = {"admitted": self.admitted, "answers": self.answers}
        self.admitted, self.answers = [], {}
        return report

    def save(self) -> list[int]:
        """Save all blocks; the session's tokens."""
        evict(self.half)
        while self.half.has_work():
            self.step()
        return self.talk

    # -- scenarios ------------------------------------------------------------------------------------

    def resident(self) -> dict[str, Any]:
        self.add_all(10, 1.0)
        return self.serve()

    def late(self) -> dict[str, Any]:
        """The return comes the bound later than all first prompts."""
        self.add_all(20, BOUND_S + 0.3)
        return self.serve()

    def saved(self) -> dict[str, Any]:
        """Nothing is resident any more."""
        self.save()
        assert self.engine.reset_prefix_cache()
        self.add_all(30, 1.0)
        return self.serve()

    def looked_up(self) -> dict[str, Any]:
        """Redis has answered all lookups before the first step begins, which computes what came first."""
        self.add_all(100, 1.0)
        until, redis = time.monotonic() + 60, self.half._redis
        while len(redis.sessions._answers) < len(redis._lookups) and time.monotonic() < until:
            time.sleep(0.01)
        return self.serve()

    def lost(self) -> dict[str, Any]:
        """All KV is lost while the return waits."""
        self.add_all(40, 1.0)
        assert self.engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        return self.serve()

    def overwritten(self) -> dict[str, Any]:
        """Others' prompts take the return's blocks, of which none could be saved in time, while it waits."""
        manager, talk = self.half.manager, prompt(90)
        planned = manager.plan_stores, manager.save_running
        manager.plan_stores = manager.save_running = lambda *_: []
        talk += self.ask(talk, "gone", 8)
        self.admitted.clear()
        for at in range(7):
            self.add(f"first-{at}", prompt(91 + at), 0.1 * at)
        self.add("gone", talk, BOUND_S + 1.0)
        self.add("short", prompt(98, 300), BOUND_S + 1.5)
        report = self.serve()
        manager.plan_stores, manager.save_running = planned
        return report

    def aborted(self) -> dict[str, Any]:
        self.add_all(50, 1.0)
        self.engine.abort_request(["first-1", "back"])
        counts = self.scheduler.get_request_counts()
        return self.serve() | {"counts": counts}

    def preempted(self) -> dict[str, Any]:
        """Two requests grow beyond the pool, and a short one comes when one of them has lost its blocks."""
        for at in range(2):
            self.add(f"long-{at}", prompt(60 + at, 1500), 0.1 * at, max_tokens=100)
        while not any(one.num_preemptions for one in self.scheduler.waiting):
            self.step()
        self.add("short", prompt(62, 100), -5.0)
        return self.serve()

    def grammar(self) -> dict[str, Any]:
        """A request that waits for its grammar is passed, and served when that is ready."""
        wanted = StructuredOutputsParams(regex="(ab)+")
        self.add("bound", prompt(70, 64), 0.0, structured_outputs=wanted, ignore_eos=False)
        self.add("free", prompt(71), 0.1)
        return self.serve()

    def short_steps(self) -> dict[str, Any]:
        """The most tokens of a step of one request, and of several after the first, if steps take too long."""
        limit, report = self.half.limit, {}
        limit._least, limit._seconds, limit._tokens = 96, 1e9, 1.0
        for name, count in ("alone", 1), ("together", 3):
            steps = self.count_tokens(count)
            for at in range(count):
                self.add(f"{name}-{at}", prompt(110 + 10 * count + at), 0.1 * at)
            self.serve()
            report[name] = max(steps[count > 1 :])
        return report

    def divided(self) -> dict[str, Any]:
        """How much of a long prompt is computed, in short steps, when a return that came meanwhile gets its blocks."""
        limit = self.half.limit
        limit._least, limit._seconds, limit._tokens = 96, 1e9, 1.0
        self.scheduler.max_num_scheduled_tokens = 96
        self.add("long", prompt(170, 800), 0.0)
        self.add("other", prompt(171, 16), 0.1, max_tokens=40)

        def computed() -> dict[str, int]:
            return {one.request_id.rpartition("-")[0]: one.num_computed_tokens for one in self.scheduler.running}

        for _ in range(3):
            self.step()
        before = computed()
        self.add("back", [*self.talk, *prompt(172, 20)], 0.5)
        while "back" not in self.admitted:
            self.step()
        return {"before": before, "computed": computed()} | self.serve()

    def without_room(self) -> dict[str, Any]:
        """A large request waits for the end of a long one, and a small one comes after it."""
        self.add("long", prompt(180, 1400), 0.0, max_tokens=40)
        while "long" not in self.admitted:
            self.step()
        self.add("large", prompt(181, 1500), 0.1)
        self.add("small", prompt(182, 100), 0.2)
        return self.serve()

    def count_tokens(self, requests: int) -> list[int]:
        """Tokens of each step from now on, before which so many requests are there."""
        steps: list[int] = []
        schedule = type(self.scheduler).schedule

        def counting(*args: Any, **options: Any) -> Any:
            are_there = len(self.half._requests) == requests
            found = schedule(self.scheduler, *args, **options)
            if are_there:
                steps.append(found.total_num_scheduled_tokens)
            return found

        self.scheduler.schedule = counting
        return steps

    def priorities(self) -> dict[str, Any]:
        self.add("urgent", prompt(80), 0.5, priority=-1)
        self.add("first", prompt(81), 0.0)
        self.add("back", [*self.talk, *prompt(80, 20)], 0.2)
        self.add("patient", prompt(82, 20), -9.0, priority=1)
        return self.serve()


def main(job: Any) -> Any:
    engine = Waiting(job["policy"], job["is_async"], job["talk"], **job["manthan"])
    told = {"kind": type(engine.scheduler.waiting).__name__, "scheduler": type(engine.scheduler).__name__}
    return told | {name: getattr(engine, name)() for name in job["what"]}


if __name__ == "__main__":
    answer(main)
