"""An engine in which each call of the connector raises once, in each state. What became of requests is told on standard
output as JSON: by call and state the tokens, those of a request that nothing disturbs, and blocks that stay referenced.
"""

import json
import time
from typing import Any

import numpy as np
from vllm import LLM, SamplingParams
from vllm_engine import MODEL

from manthan.vllm_hooks import kv_transfer_config

SCHEDULER = (
    "new_request",
    "match",
    "allocated",
    "step",
    "worker_output",
    "finished",
    "take_events",
    "loaded",
)
WORKER = ("begin_step", "submit_loads", "submit_spills", "take_finished_loads", "take_failed_blocks", "take_report")
HELD = np.fromfile(f"{MODEL}/held_tokens.u16", np.uint16).tolist()
ONE = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)


def main() -> None:
    transfer = kv_transfer_config(
        min_tokens=64, idle_after_s=0.05, sweep_interval_s=0.01, codec={"guard": False, "sink_tokens": 1 << 20}
    )
    llm = LLM(MODEL, block_size=32, enforce_eager=True, max_model_len=1024, kv_transfer_config=transfer)
    core: Any = llm.llm_engine.engine_core.engine_core
    connector = core.scheduler.connector
    half, pool = connector.scheduler, core.scheduler.kv_cache_manager.block_pool
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    path = get_kv_transfer_group().worker.path

    def ask(tokens: list[int]) -> tuple[list[int], int]:
        [done] = llm.generate([{"prompt_token_ids": tokens}], ONE, use_tqdm=False)
        return list(done.outputs[0].token_ids), done.num_cached_tokens or 0

    def go_cold() -> None:
        end = time.monotonic() + 20
        while half.manager.usage.sessions["idle"] or half.manager.usage.sessions["evicting"]:
            assert time.monotonic() < end, half.manager.usage
            time.sleep(0.06)
            ask([7] * 20)

    def disturb(target: Any, name: str) -> list[int]:
        raised: list[int] = []
        call = getattr(target, name)

        def broken(*args: Any, **kwargs: Any) -> Any:
            setattr(target, name, call)
            raised.append(1)
            raise RuntimeError(f"thrown in {name}")

        broken.__name__ = name
        setattr(target, name, broken)
        return raised

    report: dict[str, Any] = {}
    calls = [*((half, name) for name in SCHEDULER), *((path, name) for name in WORKER)]
    for n, (target, name) in enumerate(calls):
        for state in ("new", "load", "store"):
            prompt = HELD[n * 800 : n * 800 + 500]
            right, _ = ask(prompt)
            if state == "load":
                go_cold()
            if state == "new":
                half.reset()
                core.scheduler.reset_prefix_cache()
            raised = disturb(target, name)
            if state == "store":
                time.sleep(0.06)
                ask([9] * 20)
            said, cached = ask(prompt)
            for _ in range(20):
                ask([8] * 20)
                if pool.get_num_free_blocks() == pool.num_gpu_blocks - 1:
                    break
                time.sleep(0.02)
            held = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
            vars(target).pop(name, None)
            report[f"{name} {state}"] = {
                "raised": bool(raised),
                "right": said == right,
                "held": held,
                "broken": connector._is_broken,
                "cached": cached,
            }
            if connector._is_broken:  # as after a restart
                connector._is_broken = False
                half.driver._restores.clear()
            half.reset()
            core.scheduler.reset_prefix_cache()
            ask([6] * 20)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
