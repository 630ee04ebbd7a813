"""A session of a model with latents (MLA) that goes cold in a real engine and returns, and what became of its KV.

Run as a script: a job as JSON on standard input, a report as JSON on standard output. A prompt that returns has one
token behind its last full block: that is computed by the CPU's kernel for single tokens, which reads the paged cache.
"""

import random
import time
from typing import Any

import numpy as np
import vllm_engine
from evicted import evict
from latent_model import VOCAB, allow_prefix_caching
from numpy.typing import NDArray
from scripts import answer
from stepped_engine import SteppedEngine
from vllm.distributed.kv_transfer import get_kv_transfer_group

from manthan.codec import wire
from manthan.codec.cpu.numbers import as_floats
from manthan.manager.events import Event, Restored
from manthan.manager.session.table import SessionState

BLOCK = 16
PROMPT, ANSWER, FILLED = 20 * BLOCK, BLOCK + 1, 21
"""Tokens of the prompt and of the first answer; blocks that are full then."""
NAME = "user"
Pool = list[tuple[NDArray[Any], NDArray[Any]]]
"""RoPE's part and latents of each block of the session, as gathered."""


class LatentSessions:
    def __init__(self, engine: SteppedEngine) -> None:
        self.engine, self.half = engine, engine.half
        self.worker = get_kv_transfer_group().worker
        [(self.group, self.blocks)] = self.worker.engine.blocks.items()
        rng = random.Random(0)
        self.report: dict[str, Any] = {"causes": []}
        prompt = [rng.randrange(10, VOCAB) for _ in range(PROMPT)]
        self.tokens = prompt + engine.ask(prompt, NAME, ANSWER)
        self.half.manager.events.subscribe(self._note)

    def _note(self, event: Event) -> None:
        if isinstance(event, Restored):
            self.report["causes"] += event.causes

    def ask(self) -> dict[str, Any]:
        """The session's next answer, and how many blocks were resident and restored."""
        answer = self.engine.ask(self.tokens, NAME, 24)
        return {"answer": answer, "found": self.engine.requests[-1]["found"]}

    @property
    def hashes(self) -> list[bytes]:
        manager = self.half.manager
        hashes: list[bytes] = manager.blocks.hashes(manager.table.by_id[NAME].rows[:FILLED])
        return hashes

    def pool(self) -> Pool:
        return [self.blocks._memory.gather(block_id) for block_id in self.half.pool.lookup(self.group, self.hashes)]

    def go_cold(self) -> None:
        """The session is evicted, and nothing of it is left in the pool."""
        manager, until = self.half.manager, time.monotonic() + 60
        evict(self.half)
        while {s.state for s in manager.table.by_id.values()} != {SessionState.COLD} or self.half.has_work:
            assert time.monotonic() < until, "the session does not go cold"
            self.half._rung = True
            self.engine.engine.step()
            self.engine._wait_for_threads()
            if self.worker._guard is not None and self.worker._guard._threads is not None:
                time.sleep(0.01)
        assert self.half.pool._pool.reset_prefix_cache()
        for rows, _, _ in self.blocks._memory._layers:
            rows[:] = 0

    def come_back(self) -> None:
        """The same question while the session is resident, after it was cold, and with a cache of zeros."""
        self.report["hot"] = self.ask()
        before = self.pool()
        self.go_cold()
        self.report["sections"] = self.stored()
        self.report["cold"] = self.ask()
        after = self.pool()
        self.report["turned_same"] = all(np.array_equal(x[0], y[0]) for x, y in zip(before, after, strict=True))
        self.report["same_tokens"] = same_tokens(before, after)
        self.report["noise"] = noise(before, after)
        decode = self.blocks.decode
        self.blocks.decode = lambda *_: None  # type: ignore[method-assign]
        self.go_cold()
        self.report["zeros"] = self.ask()
        self.blocks.decode = decode  # type: ignore[method-assign]

    def stored(self) -> list[list[Any]]:
        """Kind, codec and tokens of each section of the first block and of the second."""
        bufs = self.worker.engine.store.read(self.group, self.hashes[:2])
        blocks = [wire.parse(buf).header.sections for buf in bufs]
        return [[[s.kind.name, s.codec, s.first_token, s.tokens] for s in block] for block in blocks]


def same_tokens(before: Pool, after: Pool) -> list[int]:
    """Places of the tokens whose latents are the same in all layers, bit for bit."""
    same: list[int] = []
    for depth, ((_, x), (_, y)) in enumerate(zip(before, after, strict=True)):
        same += (depth * BLOCK + np.flatnonzero((x == y).all(axis=(0, 1, 3)))).tolist()
    return same


def noise(before: Pool, after: Pool) -> float:
    """The error of all latents beside what they differ in from their mean, in energy, in the worst layer."""
    x, y = (as_floats(np.concatenate([latents for _, latents in pool], axis=2)) for pool in (before, after))
    wrong, spread = np.square(x - y), np.square(x - x.mean(axis=2, keepdims=True))
    return float((wrong.sum(axis=(1, 2, 3)) / spread.sum(axis=(1, 2, 3))).max())


def main(job: Any) -> Any:
    allow_prefix_caching()
    vllm_engine.MODEL, vllm_engine.BLOCK = job["model"], BLOCK
    sessions = LatentSessions(SteppedEngine(131, {"skip_tokenizer_init": True}, **job["manthan"]))
    sessions.come_back()
    return sessions.report


if __name__ == "__main__":
    answer(main)
