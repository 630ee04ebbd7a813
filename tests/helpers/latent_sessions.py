"""A session of a model with latents (MLA) that goes cold in a real engine and returns, and what became of its KV.

Run as a script: a job as JSON on standard input, a report as JSON on standard output. A prompt that returns has one
token behind its last full block: that is computed by the CPU's kernel for single tokens, which reads the paged cache.
"""

import random
from typing import Any

import numpy as np
import vllm_engine
from exact_sessions import ExactSessions, same_tokens
from latent_model import VOCAB, allow_prefix_caching
from numpy.typing import NDArray
from scripts import answer
from stepped_engine import SteppedEngine

from manthan.codec import wire
from manthan.codec.cpu.numbers import as_floats

BLOCK = 16
PROMPT, ANSWER, FILLED = 20 * BLOCK, BLOCK + 1, 21
"""Tokens of the prompt and of the first answer; blocks that are full then."""
NAME = "user"
Latents = dict[int, NDArray[Any]]
"""Latents of each block of the session, as gathered."""


class LatentSessions(ExactSessions):
    def __init__(self, engine: SteppedEngine) -> None:
        super().__init__(engine)
        rng = random.Random(0)
        prompt = [rng.randrange(10, VOCAB) for _ in range(PROMPT)]
        self.tokens = prompt + engine.ask(prompt, NAME, ANSWER)

    def answered(self) -> dict[str, Any]:
        """The session's next answer, and how many blocks were resident and restored."""
        answer = self.engine.ask(self.tokens, NAME, 24)
        return {"answer": answer, "found": self.engine.requests[-1]["found"]}

    @property
    def filled(self) -> list[bytes]:
        return self.hashes(NAME)[:FILLED]

    def gathered(self) -> tuple[NDArray[Any], Latents]:
        """RoPE's part of all blocks, and the latents of each."""
        ids = self.half.pool.lookup(self.group, self.filled)
        turned, latents = zip(*(self.blocks._memory.gather(block_id) for block_id in ids), strict=True)
        return np.stack(turned), dict(enumerate(latents))

    def come_back(self) -> None:
        """The same question while the session is resident, after it was cold, and with a cache of zeros."""
        self.report["hot"] = self.answered()
        turned, latents = self.gathered()
        self.go_cold()
        self.report["sections"] = self.sections()
        self.report["cold"] = self.answered()
        turned_after, after = self.gathered()
        self.report["turned_same"] = bool(np.array_equal(turned, turned_after))
        self.report["same_tokens"] = same_tokens(latents, after)
        self.report["noise"] = noise(latents, after)
        decode = self.blocks.decode
        self.blocks.decode = lambda *_: None  # type: ignore[method-assign]
        self.go_cold()
        self.report["zeros"] = self.answered()
        self.blocks.decode = decode  # type: ignore[method-assign]

    def sections(self) -> list[list[Any]]:
        """Kind, codec and tokens of each section of the first block and of the second."""
        bufs = self.path.store.read(self.group, self.filled[:2])
        blocks = [wire.parse(buf).header.sections for buf in bufs]
        return [[[s.kind.name, s.codec, s.first_token, s.tokens] for s in block] for block in blocks]


def noise(before: Latents, after: Latents) -> float:
    """The error of all latents beside what they differ in from their mean, in energy, in the worst layer."""
    x, y = (as_floats(np.concatenate(list(latents.values()), axis=2)) for latents in (before, after))
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
