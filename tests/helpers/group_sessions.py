"""A conversation on an engine of its own, and what became of each turn.

Run as a script: a job as JSON on standard input, turns as JSON on standard output. A turn has its prompt, its tokens,
their log-probabilities, and the log-probabilities of the first token. Further, it has the number of the prompt's
tokens that were not computed, and of proposed tokens that were right. The first turn also has the frequencies of RoPE
by KV cache group, as far as Manthan knows them, and what restored blocks have lost.

In the job: model, batched_tokens, manthan (its options, or null for none), prompts (those of another run, or null),
adapter (a LoRA adapter's folder, or null), harm (true if blocks of other groups are damaged before the third turn),
warm (number of first tokens of a prompt that are asked for ahead of it, from the second turn on), and engine (further
options). With max_logprobs -1 the first token has the log-probabilities of the whole vocabulary. With questions, the
number of an image and a text each, these are asked instead.
"""

import random
import time
from typing import Any

import numpy as np
import torch._dynamo
from image_model import picture
from scripts import answer
from stepped_engine import evict_all
from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.lora.request import LoRARequest

from manthan.codec.base import Numbers
from manthan.codec.cpu.numbers import as_floats
from manthan.manager.transfer import Transfer
from manthan.vllm_hooks import kv_transfer_config
from manthan.vllm_hooks.worker.engine_cpu import Arrays

FIRST, TURNS, MORE = 700, 4, 60
ANSWER = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False, logprobs=1)


def engine(job: dict[str, Any]) -> LLM:
    torch._dynamo.config.disable = (
        True  # for log-probabilities vLLM compiles a function, which takes longer than all else
    )
    more: dict[str, Any] = {"skip_tokenizer_init": True, "prefix_cache_retention_interval": None}
    if job["manthan"] is not None:
        more["kv_transfer_config"] = kv_transfer_config(**job["manthan"])
    return LLM(
        job["model"],
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=4,
        max_num_batched_tokens=job["batched_tokens"],
        block_size=32,
        seed=0,
        enable_prefix_caching=True,
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
    evict_all(llm.llm_engine, core.engine_core.scheduler.connector.scheduler)
    others = {"prompt_token_ids": [5] * FIRST, "cache_salt": str(time.time())}
    llm.generate([others], SamplingParams(max_tokens=2, detokenize=False), use_tqdm=False)


def harm(llm: LLM) -> None:
    """A byte changes of each block that is stored of other groups."""
    core: Any = llm.llm_engine.engine_core
    main = core.engine_core.scheduler.connector.scheduler.groups.main.index
    store = get_kv_transfer_group().worker.engine.store
    for group, key in [name for name in store._blocks if name[0] != main]:
        [buf] = store.read(group, [key])
        buf[len(buf) // 2] ^= 1
        assert store.put_all(group, {key: buf}) == {}


def ropes() -> dict[int, list[float] | None]:
    """By KV cache group."""
    found = {group: blocks.format.facts.rope for group, blocks in get_kv_transfer_group().worker.engine.blocks.items()}
    return {group: None if rope is None else list(rope.frequencies) for group, rope in found.items()}


class Losses:
    """With the encoders and decoders of all KV cache groups: what blocks lose between them.

    by_group: the energy of the error of keys and of values over their own, the most of any block, in any layer; of
    blocks that are bytes, how many are another.
    """

    def __init__(self) -> None:
        self.by_group: dict[int, list[float]] = {}
        for group, blocks in get_kv_transfer_group().worker.engine.blocks.items():
            self._watch(group, blocks)

    def _watch(self, group: int, blocks: Any) -> None:
        encode_blocks, decode_block, gather = blocks.encode, blocks.decode, blocks._memory.gather
        encoded: dict[bytes, tuple[Numbers, Numbers]] = {}
        most = self.by_group[group] = [0.0, 0.0]

        def encode(job: Transfer, copies: list[Arrays]) -> Any:
            encoded.update(zip(job.block_hashes, copies, strict=True))
            return encode_blocks(job, copies)

        def decode(key: bytes, block_id: int, found: Any) -> Any:
            cause = decode_block(key, block_id, found)
            for n, pair in enumerate(zip(encoded[key], gather(block_id), strict=True) if key in encoded else ()):
                most[n] = max(most[n], lost(*pair))
            return cause

        blocks.encode, blocks.decode = encode, decode


def lost(before: Numbers, after: Numbers) -> float:
    if before.dtype == np.uint8 or not before.size:
        return float(not np.array_equal(before, after))
    x, y = (as_floats(numbers).astype(np.float64) for numbers in (before, after))
    energies = [np.square(numbers).sum(axis=(1, 2, 3)) for numbers in (x - y, x)]
    return float((energies[0] / energies[1]).max())


def told_of(found: Any) -> dict[str, Any]:
    """Return an answer's tokens, their log-probabilities, and the prompt's tokens that were not computed."""
    told = found.outputs[0]
    logprobs = [next(iter(each.values())).logprob for each in told.logprobs or []]
    return {"tokens": list(told.token_ids), "logprobs": logprobs, "cached": found.num_cached_tokens}


def asked_of_images(job: dict[str, Any]) -> list[Any]:
    options = {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 1}, "mm_processor_cache_gb": 0}
    llm, answers = engine(job | {"engine": options}), []
    for number, text in job["questions"]:
        prompt = {"prompt": text, "multi_modal_data": {"image": picture(number)}}
        [found] = llm.generate([prompt], ANSWER, use_tqdm=False)
        answers.append(told_of(found))
        if job["manthan"] is not None:
            let_go_cold(llm)
    return answers


def conversation(job: dict[str, Any]) -> list[Any]:
    llm, chance, params = engine(job), random.Random(0), ANSWER.clone()
    params.logprobs = job["engine"].get("max_logprobs", params.logprobs)
    prompt, turns = [chance.randrange(10, 1000) for _ in range(FIRST)], []
    losses = Losses() if job["manthan"] is not None else None
    adapter = LoRARequest("adapter", 1, job["adapter"]) if job["adapter"] else None
    for turn in range(len(job["prompts"] or range(TURNS))):
        prompt = job["prompts"][turn] if job["prompts"] else prompt
        if job["harm"] and turn == 2:
            harm(llm)
        if job["warm"] and turn:
            ahead = SamplingParams(max_tokens=1, detokenize=False)
            llm.generate([{"prompt_token_ids": prompt[: job["warm"]]}], ahead, use_tqdm=False)
        before = accepted(llm)
        [found] = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False, lora_request=adapter)
        first = [each.logprob for _, each in sorted(found.outputs[0].logprobs[0].items())]
        turns.append(told_of(found) | {"prompt": prompt, "first": first, "accepted": accepted(llm) - before})
        prompt = [*prompt, *turns[-1]["tokens"], *(chance.randrange(10, 1000) for _ in range(MORE))]
        if losses is not None:
            let_go_cold(llm)
    if losses is not None:
        turns[0] |= {"ropes": ropes(), "losses": losses.by_group}
    return turns


if __name__ == "__main__":
    answer(lambda job: asked_of_images(job) if job["questions"] else conversation(job))
