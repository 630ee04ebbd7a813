"""An engine in which calls of the connector raise once, in each of the states on standard input, behind a stride: 2 is
each second call. What became of
requests is told on standard output as JSON: by call and state the tokens, those of a request that nothing disturbs, and
blocks that stay referenced.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import warm_vllm
from scripts import answer
from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm_engine import MODEL

from manthan.vllm_hooks import kv_transfer_config

SCHEDULER = (
    *("new_request", "match", "allocated", "step", "worker_output", "finished", "take_events"),
    *("asker", "found", "computed"),
)
WORKER = (
    *("begin_step", "submit_loads", "submit_stores", "take_ended"),
    *("take_report", "take_loaded"),
)
OTHERS = ("loaded_into",)
"""Of the scheduler half, which goes on after an exception in them."""
STATES = ("new", "load", "store", "load, after", "store, after")
"""Of the request that meets the exception: after, if the call has done all that it does by then."""
HELD = np.fromfile(f"{MODEL}/held_tokens.u16", np.uint16).tolist()
EXACT = 512
"""Number of first tokens that are kept exact: all of the prompts, so that answers can be compared."""
LOSSY = HELD[20_000 : 20_000 + EXACT + 128]
"""Prompt of a session that has decoded blocks in the pool when it has come back."""
ONE = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)


class Idle:
    """Guard that measures nothing."""

    def begin_step(self, metadata: Any) -> None: ...

    def submit(self, jobs: Any) -> None: ...

    def take(self) -> list[Any]:
        return []

    def take_progress(self) -> dict[int, int]:
        return {}

    def shutdown(self) -> None: ...


class Engine:
    """An engine, until its scheduler half has broken."""

    def __init__(self) -> None:
        transfer = kv_transfer_config(
            idle={"after_s": 0.05, "min_tokens": 64}, codec={"guard": False, "sink_tokens": EXACT}
        )
        self.llm = LLM(
            MODEL,
            block_size=32,
            num_gpu_blocks_override=128,
            enforce_eager=True,
            max_model_len=1024,
            kv_transfer_config=transfer,
        )
        self.core: Any = self.llm.llm_engine.engine_core.engine_core
        self.connector = self.core.scheduler.connector
        self.half, self.pool = self.connector.scheduler, self.core.scheduler.kv_cache_manager.block_pool
        self.worker = get_kv_transfer_group().worker
        self.worker.guard = Idle()
        self._errors = 0
        take = self.half.telemetry.take

        def taken() -> Any:
            if (stats := take()) is not None:
                self._errors += sum(stats.data["counters"].get("errors", {}).values())
            return stats

        self.half.telemetry.take = taken  # vLLM takes them after each step

    def ask(self, tokens: list[int]) -> tuple[list[int], int]:
        [done] = self.llm.generate([{"prompt_token_ids": tokens}], ONE, use_tqdm=False)
        return list(done.outputs[0].token_ids), done.num_cached_tokens or 0

    def go_cold(self) -> None:
        self.wait(lambda: not any(self.half.manager.table.states[state] for state in ("active", "idle")))

    def wait(self, is_so: Callable[[], bool]) -> None:
        """Let the engine take steps until it is so."""
        end = time.monotonic() + 120
        while not is_so():
            assert time.monotonic() < end, self.half.manager.usage()
            time.sleep(0.06)
            if self.connector._is_broken or not self.connector.has_pending_push_work():
                self.ask([7] * 20)
            else:
                self.llm.llm_engine.step()

    def go_cold_and_empty(self) -> None:
        """Nothing is resident."""
        self.go_cold()
        self.core.scheduler.kv_cache_manager.reset_prefix_cache()
        self.half.driver.forget_resident(time.monotonic())

    def empty(self) -> None:
        """No KV is left, resident or saved."""
        assert self.llm.reset_prefix_cache(reset_connector=True)

    def close(self) -> None:
        warm_vllm.unfreeze()  # another one follows
        self.llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()

    def errors(self) -> int:
        """How many exceptions were counted since the last call."""
        self.half.telemetry.take()
        errors, self._errors = self._errors, 0
        return errors


def disturb(target: Any, name: str, *, after: bool) -> list[int]:
    """The next call raises, before it does anything, or after that."""
    raised: list[int] = []
    call = getattr(target, name)

    def broken(*args: Any, **kwargs: Any) -> Any:
        setattr(target, name, call)
        raised.append(1)
        if after:
            call(*args, **kwargs)
        raise RuntimeError(f"thrown in {name}")

    broken.__name__ = name
    setattr(target, name, broken)
    return raised


def try_case(engine: Engine, prompt: list[int], on_worker: bool, name: str, state: str) -> dict[str, Any]:
    """What becomes of a request, and of the engine, when a call raises in this state."""
    target = engine.half if not on_worker else engine.worker.guard if name == "begin_step" else engine.worker.engine
    right, _ = engine.ask(prompt)
    if state == "new":
        engine.empty()
    if name == "computed":  # it is called only while a block of the pool is not exact
        engine.ask(LOSSY)
        engine.go_cold_and_empty()
        engine.ask(LOSSY)
        assert engine.half.pool.marks
    elif state.startswith("load"):
        engine.go_cold_and_empty()
    engine.errors()
    raised = disturb(target, name, after=state.endswith("after"))
    if state.startswith("store"):
        time.sleep(0.06)
        engine.ask([9] * 20)
    said, cached = engine.ask(prompt)
    for _ in range(50):
        engine.ask([8] * 20)
        if engine.pool.get_num_free_blocks() == engine.pool.num_gpu_blocks - 1:
            break
        time.sleep(0.02)
    vars(target).pop(name, None)
    return {
        "raised": bool(raised),
        "right": said == right,
        "held": engine.pool.num_gpu_blocks - 1 - engine.pool.get_num_free_blocks(),
        "broken": engine.connector._is_broken,
        "counted": engine.errors(),
        "busy": engine.connector._is_broken and engine.connector.has_pending_push_work(),
        "reset": bool(engine.llm.reset_prefix_cache(reset_connector=True)),
        "cached": cached,
    }


def main(job: Any) -> Any:
    (stride, *wanted), report = job, dict[str, Any]()
    engine: Engine | None = None
    calls = [*((True, name) for name in WORKER), *((False, name) for name in (*OTHERS, *SCHEDULER))]
    for n, (on_worker, name) in list(enumerate(calls))[::stride]:
        prompt = HELD[n * 800 : n * 800 + 500]
        states = STATES if not name.startswith("take_") or not on_worker else STATES[:3]
        for state in [state for state in states if state in wanted]:
            engine = engine or Engine()
            report[f"{name} {state}"] = try_case(engine, prompt, on_worker, name, state)
            if engine.connector._is_broken:
                engine.close()
                engine = None
    return report


if __name__ == "__main__":
    answer(main)
