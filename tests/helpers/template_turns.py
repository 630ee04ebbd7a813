"""An agent's conversation whose template drops thinking: what of each prompt is computed anew, and the answers.

Run as a script: a job as JSON on standard input, requests as JSON on standard output. In the job: model, manthan (its
options, or null for none), prompts (those of another run, or null), tools (calls of tools in a turn), and engine
(further options of vLLM's). Before each turn all sessions go cold.

A turn is a user's message, answers that end in a tool's call, the tools' results, and an answer. Each answer begins
with thinking. The template keeps thinking until the next message of the user, as those of reasoning models do.
"""

import random
from typing import Any

import vllm_engine  # noqa: F401  sets the environment
from scripts import answer
from stepped_engine import evict_all
from vllm import EngineArgs, SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

from manthan.vllm_hooks import kv_transfer_config

SYSTEM, USER, RESULT, SAID = 3001, 30, 40, 16
"""Tokens of the system prompt, of a message, of a tool's result, and of an answer without its thinking.

All prompts have an odd number of tokens, so that none ends with a block.
"""
ANSWER = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, detokenize=False)


class Turns:
    def __init__(self, job: dict[str, Any]) -> None:
        more = {} if job["manthan"] is None else {"kv_transfer_config": kv_transfer_config(**job["manthan"])}
        self.engine = LLMEngine.from_engine_args(
            EngineArgs(
                job["model"],
                **({"block_size": 32, "max_model_len": 8192, "max_num_batched_tokens": 2048} | job["engine"]),
                num_gpu_blocks_override=job["blocks"],
                enforce_eager=True,
                skip_tokenizer_init=True,
                enable_prefix_caching=True,
                prefix_cache_retention_interval=None,
                **more,
            )
        )
        core: Any = self.engine.engine_core
        self.half = None if job["manthan"] is None else core.engine_core.scheduler.connector.scheduler
        self.given, self.found = job["prompts"], list[dict[str, Any]]()

    def ask(self, prompt: list[int]) -> list[int]:
        prompt = self.given[len(self.found)] if self.given else prompt
        self.engine.add_request(str(len(self.found)), {"prompt_token_ids": prompt}, ANSWER, session_id="agent")
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                last = output
        tokens = list(last.outputs[0].token_ids)
        self.found.append({"prompt": list(prompt), "tokens": tokens, "cached": last.num_cached_tokens})
        return tokens

    def go_cold(self) -> None:
        if self.half is not None:
            evict_all(self.engine, self.half)


def converse(job: dict[str, Any]) -> list[dict[str, Any]]:
    chance, turns = random.Random(0), Turns(job)

    def some(count: int) -> list[int]:
        return [chance.randrange(10, 1000) for _ in range(count)]

    history = some(SYSTEM)
    for _ in range(job["turns"]):
        history += some(USER)
        prompt, said = list(history), list[int]()
        for _ in range(job["tools"]):
            answered, result = turns.ask(prompt), some(RESULT)
            prompt += answered + result
            said += answered[-SAID:] + result
        said += turns.ask(prompt)[-SAID:]
        history += said
        turns.go_cold()
    return turns.found


if __name__ == "__main__":
    answer(converse)
