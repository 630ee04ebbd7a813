"""A session of a real engine that is evicted in the very step that computes its blocks, and what became of them.

Run as a script: a job as JSON on standard input, a report as JSON on standard output. See SteppedEngine.
"""

from typing import Any

import numpy as np
import vllm_engine
from evicted import evict
from exact_sessions import ExactSessions
from scripts import answer
from stepped_engine import SteppedEngine


class SameStep(ExactSessions):
    """loads_first: vLLM has loads begun before each forward pass, as it does for connectors with synchronous ones."""

    def __init__(self, engine: SteppedEngine, loads_first: bool) -> None:
        super().__init__(engine)
        self.steps: list[list[str]] = []
        core = engine.engine.engine_core.engine_core
        self._watch_scheduler(core.scheduler, loads_first)
        self._watch_worker(core.model_executor.driver_worker.worker.model_runner)

    def _watch_scheduler(self, scheduler: Any, loads_first: bool) -> None:
        schedule = scheduler.schedule

        def noting_schedule(*args: Any, **more: Any) -> Any:
            self.steps.append([])
            output = schedule(*args, **more)
            output.has_sync_kv_loads = loads_first
            return output

        scheduler.schedule = noting_schedule

    def _watch_worker(self, runner: Any) -> None:
        """Note in which order a step's forward passes, the draft's too, loads and stores begin."""
        forward, loads, stores = runner._model_forward, self.path.submit_loads, self.path.submit_stores

        def noting_forward(*args: Any, **more: Any) -> Any:
            computed = forward(*args, **more)
            self.steps[-1].append("forward")
            return computed

        def noting_loads(metadata: Any) -> None:
            self.steps[-1].append("loads")
            loads(metadata)

        def noting_stores(metadata: Any) -> None:
            self.steps[-1] += ["stores"] if metadata.stores else []
            stores(metadata)

        if hasattr(runner, "drafter"):
            propose = runner.drafter.propose

            def noting_draft(*args: Any, **more: Any) -> Any:
                proposed = propose(*args, **more)
                self.steps[-1].append("draft")
                return proposed

            runner.drafter.propose = noting_draft
        runner._model_forward = noting_forward
        self.path.submit_loads, self.path.submit_stores = noting_loads, noting_stores

    def lose(self, session: str) -> None:
        """vLLM does not have a session's blocks any more, of which the manager has not heard."""
        pool = self.half.pool
        pool._pool.evict_blocks(set(pool.lookup(self.group, self.hashes(session))))
        for rows, _, _ in self.blocks._memory._layers:
            rows[:] = 0

    def evict_when_computed(self) -> None:
        """Whoever is idle is evicted in the next step that computes a prompt."""
        half, step = self.half, self.half.step

        def evicting_step(tokens: int, requests: int) -> Any:
            if tokens > 10 * vllm_engine.BLOCK:
                evict(half)
                half.step = step
            metadata = step(tokens, requests)
            if tokens > 10 * vllm_engine.BLOCK:
                self.report["named"] = sum(map(len, metadata.stores))
            return metadata

        half.step = evicting_step

    def codes_are_right(self, session: str) -> list[bool]:
        """For each block of a session, True if its compressed block is made of what the pool has now."""
        right, exact = [], self.half.manager.blocks.exact[self.rows(session)].tolist()
        for depth, (key, both) in enumerate(self.pool(session).items()):
            keys, values = map(np.ascontiguousarray, np.split(both, 2, axis=3))
            [buf] = self.path.store.read(self.group, [key])
            first = depth * vllm_engine.BLOCK
            wanted = self.blocks.format.encode(keys, values, key=key, first_token=first, exact=exact[depth])
            right.append(buf is not None and np.array_equal(buf, wanted))
        return right

    def go(self) -> None:
        """Two sessions have the same prompt; the first is evicted while the second computes it anew."""
        table = vllm_engine.Table(1)
        self.ask(table, 0, "first", [])
        self.lose("first")
        self.evict_when_computed()
        self.ask(table, 0, "second", [])
        self.report["state"] = self.half.manager.table.by_id["first"].state
        self.report["codes"] = self.codes_are_right("first")
        self.go_cold()
        self.ask(table, 3, "second", [])
        last = self.engine.requests[-1]
        self.report |= {"restored": last["found"][1], "asked": last["input_tokens"] // vllm_engine.BLOCK}
        self.report["steps"] = self.steps


def main(job: Any) -> Any:
    codec = {"name": "k3v3", "sink_tokens": 0, "guard": False}  # blocks that are encoded again are as they were
    engine = SteppedEngine(
        131, job["vllm"], codec=codec, idle={"after_s": 3600, "min_tokens": 64}, tiers={"max_bytes": "64MiB"}
    )
    sessions = SameStep(engine, job["loads_first"])
    sessions.go()
    return sessions.report


if __name__ == "__main__":
    answer(main)
