"""A conversation on an engine of its own, told on standard output as JSON: each turn's prompt, tokens, their
log-probabilities, and how many of the prompt's were not computed.

On standard input: model, batched_tokens, manthan (its options, or null for none), prompts (those of another run, or
null), vllm (more of its arguments).
"""

import json
import random
import sys
import time
from typing import Any

from vllm import LLM, SamplingParams

FIRST, TURNS, MORE = 700, 4, 60
ANSWER = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False, logprobs=1)


def engine(job: dict[str, Any]) -> LLM:
    more: dict[str, Any] = {}
    if job["manthan"] is not None:
        more["kv_transfer_config"] = {
            "kv_connector": "ManthanConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"manthan": job["manthan"]},
        }
    return LLM(
        job["model"],
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=4,
        max_num_batched_tokens=job["batched_tokens"],
        block_size=32,
        seed=0,
        enable_prefix_caching=True,
        prefix_cache_retention_interval=None,
        **more,
        **job.get("vllm", {}),
    )


def let_go_cold(llm: LLM) -> None:
    """The engine takes steps while the session is idle."""
    short = SamplingParams(max_tokens=2, detokenize=False)
    for number in range(6):
        time.sleep(0.5)
        llm.generate([{"prompt_token_ids": [5 + number] * 20}], short, use_tqdm=False)


def main() -> None:
    job = json.load(sys.stdin)
    llm, chance = engine(job), random.Random(0)
    prompt, turns = [chance.randrange(10, 1000) for _ in range(FIRST)], []
    for turn in range(TURNS):
        prompt = job["prompts"][turn] if job["prompts"] else prompt
        [found] = llm.generate([{"prompt_token_ids": prompt}], ANSWER, use_tqdm=False)
        told = found.outputs[0]
        logprobs = [next(iter(each.values())).logprob for each in told.logprobs or []]
        turns.append({"prompt": prompt, "tokens": list(told.token_ids), "logprobs": logprobs})
        turns[-1]["cached"] = found.num_cached_tokens
        prompt = [*prompt, *told.token_ids, *(chance.randrange(10, 1000) for _ in range(MORE))]
        if job["manthan"] is not None:
            let_go_cold(llm)
    json.dump(turns, sys.stdout)


if __name__ == "__main__":
    main()
