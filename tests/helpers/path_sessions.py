"""A session on an engine whose worker has the GPU's engine, and what becomes of it, told on standard output as JSON.

Run as a script, in a process of its own. On standard input: model; manthan, its options; vllm, more of its arguments;
what, which of the jobs below.

An answer ends within the block that the prompt ends in: what the prompt can go on from ends at one token, whether it is
hot or was cold, and is computed from there in the same steps.
"""

import random
import time
from typing import Any

import torch
import vllm_engine  # sets the environment
from scripts import answer
from stepped_engine import evict
from vllm import EngineArgs, SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics.reader import Counter

from manthan.manager.events import Event, Restored
from manthan.manager.session.table import SessionState
from manthan.vllm_hooks import kv_transfer_config

TOKENS, REST, ANSWER, TOP = 600, 9, 6, 20
VOCABULARY = 1000
WAIT_S = 120.0


class PathSession:
    def __init__(self, model: str, vllm: dict[str, Any], manthan: dict[str, Any]) -> None:
        arguments: dict[str, Any] = {
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "max_model_len": 4096,
            "max_num_batched_tokens": 4096,
            "max_num_seqs": 2,
            "block_size": 32,
            "gpu_memory_utilization": 0.5,
            "kv_cache_memory_bytes": vllm_engine.GPU_BYTES,
            "enable_prefix_caching": True,
        }
        transfer = kv_transfer_config(**{"idle.min_tokens": 64, "idle": 3600} | manthan)
        args = EngineArgs(model, kv_transfer_config=transfer, **arguments | vllm)
        self.engine = LLMEngine.from_engine_args(args)
        self.half = self.engine.engine_core.engine_core.scheduler.connector.scheduler
        self.path = get_kv_transfer_group().worker.engine
        self.block = self.half.groups.main.spec.block_size
        self.causes: list[str] = []
        self.requests = 0
        self.half.manager.events.subscribe(self._note)
        blocks = max(2, -(-TOKENS // self.block))
        rng = random.Random(0)
        self.prompt = [rng.randrange(10, VOCABULARY) for _ in range(blocks * self.block + REST)]

    def _note(self, event: Event) -> None:
        if isinstance(event, Restored):
            self.causes += event.causes

    def ask(self) -> dict[str, Any]:
        """The answer, log-probabilities of the first token by id and of the others, what was not computed, and how many
        tokens a draft proposed that were right."""
        params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, detokenize=False, logprobs=TOP)
        self.requests += 1
        before = self.accepted()
        prompt = {"prompt_token_ids": self.prompt}
        self.engine.add_request(f"request-{self.requests}", prompt, params, session_id="user")
        last: Any = None
        while self.engine.has_unfinished_requests() or self.half.has_work():
            for output in self.engine.step():
                last = output
        told = last.outputs[0]
        first = {str(token): found.logprob for token, found in told.logprobs[0].items()}
        chosen = [each[token].logprob for token, each in zip(told.token_ids, told.logprobs, strict=True)]
        said = {"tokens": list(told.token_ids), "logprobs": chosen, "first": first, "cached": last.num_cached_tokens}
        return said | {"accepted": self.accepted() - before}

    def accepted(self) -> int:
        """So many tokens of a draft were right so far."""
        found = [each for each in self.engine.get_metrics() if each.name == "vllm:spec_decode_num_accepted_tokens"]
        return sum(each.value for each in found if isinstance(each, Counter))

    def go_cold(self) -> None:
        """The session is evicted, and nothing of it is left in the pool."""
        manager, until = self.half.manager, time.monotonic() + WAIT_S
        while {s.state for s in manager.table.by_id.values()} != {SessionState.COLD} or self.half.has_work():
            assert time.monotonic() < until, f"the session does not go cold: {manager.table.by_id}"
            evict(self.half)
            self.engine.step()
            time.sleep(0.002)
        assert self.half.pool._pool.reset_prefix_cache()
        with torch.inference_mode():
            for codec, *_ in self.path.codecs.values():
                for cache in codec.layout.caches:
                    cache.zero_()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def stored(self) -> dict[str, list[Any]]:
        """By KV cache group: the codec of its blocks, how many of them are in the tiers, and in which."""
        names = [(group, tier) for tier in self.path.tiers.all for group, _ in tier.blocks()]
        return {
            str(group): [
                codec.format.codec,
                sum(group == of for of, _ in names),
                sorted({tier.buffer.device.type for of, tier in names if of == group}),
            ]
            for group, (codec, *_) in self.path.codecs.items()
        }

    def damage(self, group: int) -> None:
        """One bit changes of a block of the group: of the main one, of its first, before which nothing can be kept."""
        stored = [(name, tier, kept) for tier in self.path.tiers.all for name, kept in tier.blocks().items()]
        found = {key: (tier, kept) for (of, key), tier, kept in stored if of == group}
        [session] = self.half.manager.table.by_id.values()
        [first] = self.half.manager.blocks.hashes(session.rows[:1])
        tier, kept = found.get(first) or list(found.values())[len(found) // 2]
        tier.buffer[kept.extents[0].start + 300] ^= 1

    def rows_in_pool(self) -> torch.Tensor:
        """All layers' numbers of each block of the main group that has any, [blocks, numbers]."""
        caches = next(iter(self.path.codecs.values()))[0].layout.caches
        rows = torch.cat([cache.float().flatten(1) for cache in caches], 1).cpu()
        return rows[rows.any(1)]

    # -- jobs -----------------------------------------------------------------------------------------

    def come_back(self) -> dict[str, Any]:
        """Computed; hot; restored twice; and hot, but with zeros in the cache: that is what the answer is made of."""
        report: dict[str, Any] = {"computed": self.ask(), "hot": self.ask()}
        hot = self.rows_in_pool()
        self.go_cold()
        report["stored"] = self.stored()
        report["cold"] = self.ask()
        report["noise"] = noise(hot, self.rows_in_pool())
        self.go_cold()
        report["again"] = self.ask()
        with torch.inference_mode():
            for cache in next(iter(self.path.codecs.values()))[0].layout.caches:
                cache.zero_()
        report["zeros"] = self.ask()
        return report

    def be_damaged(self) -> dict[str, Any]:
        """In each group in turn, and asked after that."""
        report: dict[str, Any] = {"computed": self.ask(), "damaged": {}}
        for group in self.path.codecs:
            self.go_cold()
            self.damage(group)
            report["damaged"][str(group)] = self.ask()
        return report


def noise(hot: torch.Tensor, cold: torch.Tensor) -> list[float]:
    """In energy, of each block of `hot` as the one of `cold` that is most like it, the least first."""
    off: torch.Tensor = torch.cdist(hot, cold).square().amin(1) / hot.square().sum(1)
    return sorted(off.tolist())


def main(job: Any) -> Any:
    session = PathSession(job["model"], job.get("vllm", {}), job["manthan"])
    said = getattr(session, job["what"])()
    said |= {"block": session.block, "prompt": len(session.prompt), "causes": session.causes}
    return said | {"engine": type(session.path).__name__}


if __name__ == "__main__":
    answer(main)
