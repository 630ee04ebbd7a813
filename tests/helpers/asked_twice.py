"""A task that an engine of its own is asked twice. In between its prefix cache loses all, if Manthan is there.

Run as a script: a job as JSON on standard input. On standard output, `full` has the numbers of the KV cache groups with
full attention, `first` the tokens of the first time's answers, and `turns` the second time. Besides what `told_of`
returns, a turn has the number of tokens that were `restored`, and `blocks`: digests of the prompt's blocks in the
prefix cache, up to the last token found, by group and block hash. A digest is of the bytes that vLLM's layers see.

In the job: model, batched_tokens, manthan (its options, or null for none), prompts, engine (further options of vLLM's),
and overwrites (true if other prompts overwrite all, false if the prefix cache is reset).
"""

import hashlib
import random
from collections.abc import Iterator
from typing import Any

import torch
from event_subscriber import block_hashes_of
from group_sessions import ANSWER, engine, told_of
from scripts import answer
from stepped_engine import evict
from vllm import LLM
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id
from vllm.v1.kv_cache_interface import FullAttentionSpec

GARBAGE = 0.5
MOST = 40
"""Number of other prompts that overwrite any pool of these tests."""


class Task:
    """An engine, and the prompts that it is asked."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.llm: LLM = engine(job)
        self.prompts: list[list[int]] = job["prompts"]
        client: Any = self.llm.llm_engine.engine_core
        self.core: Any = client.engine_core
        manager = self.core.scheduler.kv_cache_manager
        self.pool, self.groups = manager.block_pool, manager.kv_cache_config.kv_cache_groups

    @property
    def full(self) -> list[int]:
        return [n for n, group in enumerate(self.groups) if isinstance(group.kv_cache_spec, FullAttentionSpec)]

    def ask(self) -> list[dict[str, Any]]:
        return [self.turn(prompt) for prompt in self.prompts]

    def turn(self, prompt: list[int]) -> dict[str, Any]:
        before = self.restored()
        [found] = self.llm.generate([{"prompt_token_ids": prompt}], ANSWER, use_tqdm=False)
        told = told_of(found)
        keys = set(block_hashes_of(prompt[: told["cached"]], self.pool.hash_block_size))
        blocks = {name: self.digest(name[0], block_id) for name, block_id in self.cached().items() if name[1] in keys}
        named = {f"{group} {key.hex()}": digest for (group, key), digest in blocks.items()}
        return told | {"restored": self.restored() - before, "blocks": named}

    def restored(self) -> int:
        """Number of tokens that a connector has brought since the start."""
        return sum(each.value for each in self.llm.get_metrics() if each.name == "vllm:external_prefix_cache_hits")

    def cached(self) -> dict[tuple[int, bytes], int]:
        """Return the prefix cache: the number of a block by its KV cache group and hash."""
        hashed = [(block.block_hash, block.block_id) for block in self.pool.blocks if block.block_hash is not None]
        return {(get_group_id(key), get_block_hash(key)): block_id for key, block_id in hashed}

    def digest(self, group: int, block_id: int) -> str:
        made = hashlib.sha256()
        for cache in self.caches(group):
            each = len(cache) // len(self.pool.blocks)  # a backend may see a block as several
            rows = cache[block_id * each : (block_id + 1) * each]
            made.update(rows.contiguous().view(torch.uint8).numpy().tobytes())
        return made.hexdigest()

    def caches(self, group: int) -> Iterator[torch.Tensor]:
        """Yield the cache of each layer, and each tensor of a state, as the model computes with it."""
        runner = self.core.model_executor.driver_worker.worker.model_runner
        for name in self.groups[group].layer_names:
            cache = runner.compilation_config.static_forward_context[name].kv_cache
            yield from [cache] if isinstance(cache, torch.Tensor) else cache

    # -- between the two times ------------------------------------------------------------------------

    def reset(self) -> None:
        """Save all, reset the prefix cache but for what is cold, and leave nothing of it in memory."""
        half, transfers = self.core.scheduler.connector.scheduler, get_kv_transfer_group().worker.engine
        evict(half)
        while half.has_work():
            self.llm.llm_engine.step()
            transfers.wait()
        assert self.llm.reset_prefix_cache()
        for group in range(len(self.groups)):
            for cache in self.caches(group):
                cache.fill_(GARBAGE)

    def overwrite(self) -> None:
        """Ask others until they have all blocks. Each step ends with the stores that it began."""
        step, transfers = self.llm.llm_engine.step, get_kv_transfer_group().worker.engine

        def whole_step() -> Any:
            told = step()
            transfers.wait()
            return told

        self.llm.llm_engine.step = whole_step  # type: ignore[method-assign]
        chance, ours = random.Random(7), self.cached().keys()
        for _ in range(MOST):
            other = [chance.randrange(10, 1000) for _ in range(700)]
            self.llm.generate([{"prompt_token_ids": other}], ANSWER, use_tqdm=False)
            if ours.isdisjoint(self.cached()):
                return
        raise AssertionError(f"{MOST} prompts have not overwritten all blocks")


def work(job: dict[str, Any]) -> dict[str, Any]:
    task = Task(job)
    first = task.ask()
    if job["manthan"] is not None:
        task.overwrite() if job["overwrites"] else task.reset()
    return {"full": task.full, "first": [turn["tokens"] for turn in first], "turns": task.ask()}


if __name__ == "__main__":
    answer(work)
