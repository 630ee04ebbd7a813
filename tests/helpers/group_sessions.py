"""A conversation on an engine of its own, told on standard output as JSON: each turn's prompt, tokens, their
log-probabilities, how many of the prompt's were not computed, and how many tokens a draft proposed that were right.

On standard input: model, batched_tokens, manthan (its options, or null for none), prompts (those of another run, or
null), adapter (a LoRA adapter's folder, or null), and options of the engine's besides. With max_logprobs -1 among them
each turn tells the log-probabilities of all tokens to be its answer's first. The first turn tells also how keys are
turned in each KV cache group, as far as Manthan knows: the frequencies of RoPE.
"""

import json
import random
import sys
import time
from typing import Any

from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.lora.request import LoRARequest

from manthan.manager.sessions.session import SessionState

FIRST, TURNS, MORE = 700, 4, 60
PATIENCE_S = 300.0
ANSWER = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False, logprobs=1)


def engine(job: dict[str, Any]) -> LLM:
    more: dict[str, Any] = {"skip_tokenizer_init": True}
    if job["manthan"] is not None:
        more["kv_transfer_config"] = {
            "kv_connector": "ManthanConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"manthan": job["manthan"]},
        }
    return LLM(
        job["model"],
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=4,
        max_num_batched_tokens=job["batched_tokens"],
        block_size=32,
        seed=0,
        enable_prefix_caching=True,
        prefix_cache_retention_interval=None,
        disable_log_stats=False,
        **(more | job["engine"]),
    )


def accepted(llm: LLM) -> int:
    """So many proposed tokens were right so far."""
    found = [each for each in llm.get_metrics() if each.name == "vllm:spec_decode_num_accepted_tokens"]
    return sum(each.value for each in found)


def let_go_cold(llm: LLM) -> None:
    """All sessions, and others write over the blocks that they had."""
    core: Any = llm.llm_engine.engine_core
    half = core.engine_core.scheduler.connector.scheduler
    manager, until = half.manager, time.monotonic() + PATIENCE_S
    manager.sweep(time.monotonic() + manager.idle_after_s)
    while half.has_work or any(s.state is not SessionState.COLD for s in manager.table.by_id.values()):
        assert time.monotonic() < until, f"sessions do not go cold: {manager.table.by_id}"
        half._rung = True
        llm.llm_engine.step()
        time.sleep(0.002)
    others = {"prompt_token_ids": [5] * FIRST, "cache_salt": str(time.time())}
    llm.generate([others], SamplingParams(max_tokens=2, detokenize=False), use_tqdm=False)


def ropes() -> dict[int, list[float] | None]:
    """By KV cache group."""
    found = {group: blocks.format.facts.rope for group, blocks in get_kv_transfer_group().worker.path.blocks.items()}
    return {group: None if rope is None else list(rope.frequencies) for group, rope in found.items()}


def main() -> None:
    job = json.load(sys.stdin)
    llm, chance, answer = engine(job), random.Random(0), ANSWER.clone()
    answer.logprobs = job["engine"].get("max_logprobs", answer.logprobs)
    prompt, turns = [chance.randrange(10, 1000) for _ in range(FIRST)], []
    adapter = LoRARequest("adapter", 1, job["adapter"]) if job["adapter"] else None
    for turn in range(len(job["prompts"] or range(TURNS))):
        prompt = job["prompts"][turn] if job["prompts"] else prompt
        before = accepted(llm)
        [found] = llm.generate([{"prompt_token_ids": prompt}], answer, use_tqdm=False, lora_request=adapter)
        told = found.outputs[0]
        logprobs = [next(iter(each.values())).logprob for each in told.logprobs or []]
        turns.append({"prompt": prompt, "tokens": list(told.token_ids), "logprobs": logprobs})
        turns[-1]["first"] = [each.logprob for _, each in sorted(told.logprobs[0].items())]
        turns[-1] |= {"cached": found.num_cached_tokens, "accepted": accepted(llm) - before}
        prompt = [*prompt, *told.token_ids, *(chance.randrange(10, 1000) for _ in range(MORE))]
        if job["manthan"] is not None:
            let_go_cold(llm)
    turns[0]["ropes"] = ropes() if job["manthan"] is not None else {}
    json.dump(turns, sys.stdout)


if __name__ == "__main__":
    main()
