"""Chats with a model that looks values up in tables (train_tables.py): all of them go cold, come back, and are asked
for more of their tables. What became of each turn is told on standard output as JSON.

On standard input: what group_sessions.py wants for an engine.
"""

import json
import random
import sys
import time
from typing import Any

from group_sessions import accepted, engine
from train_tables import ASK, BOS, DIGITS, EQUALS, LINE, NAMES, NOISE
from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group

CHATS, ENTRIES, NOISE_LINES, MORE_LINES, TURNS = 8, 32, 120, 6, 3
ANSWER = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
COLD_S = 60.0


class Chat:
    """A table, then lines that mean nothing, then questions, one a turn. tokens: of all turns so far."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        names = chance.sample(list(NAMES), ENTRIES)
        self.table = {name: [chance.randrange(DIGITS) for _ in range(4)] for name in names}
        self.tokens = [token for name, value in self.table.items() for token in (BOS, name, EQUALS, *value, LINE)]
        self.unasked = chance.sample(names, ENTRIES)
        self.add_noise(NOISE_LINES)

    def add_noise(self, lines: int) -> None:
        for _ in range(lines):
            self.tokens += [self.chance.choice(NOISE) for _ in range(7)]
            self.tokens.append(LINE)

    def ask(self) -> list[int]:
        """Ask for a name that was not asked for; returns its value."""
        name = self.unasked.pop()
        self.tokens += [ASK, name, EQUALS]
        return self.table[name]

    def hear(self, answer: list[int]) -> None:
        """What the model said, right or wrong, is in the chat."""
        self.tokens += [*answer, LINE]
        self.add_noise(MORE_LINES)


def let_go_cold(llm: LLM) -> None:
    """Until all are cold, the engine takes steps."""
    half, end = llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler, time.monotonic() + COLD_S
    while (usage := half.manager.usage).sessions["cold"] < CHATS:
        assert time.monotonic() < end, f"not all are cold: {usage}"
        time.sleep(0.1)
        llm.generate(
            [{"prompt_token_ids": [NOISE[0]] * 20}], SamplingParams(max_tokens=2, detokenize=False), use_tqdm=False
        )


def main() -> None:
    job: dict[str, Any] = json.load(sys.stdin)
    llm, chance = engine(job), random.Random(0)
    chats, turns = [Chat(chance) for _ in range(CHATS)], list[Any]()
    for _ in range(TURNS):
        wanted, prompts = [chat.ask() for chat in chats], [{"prompt_token_ids": list(chat.tokens)} for chat in chats]
        for chat, right, found in zip(chats, wanted, llm.generate(prompts, ANSWER, use_tqdm=False), strict=True):
            answer = list(found.outputs[0].token_ids)
            told = {"prompt": len(chat.tokens), "cached": found.num_cached_tokens, "right": answer == right}
            turns.append(told)
            chat.hear(answer)
        if job["manthan"] is not None:
            let_go_cold(llm)
    if job["manthan"] is not None:
        blocks = get_kv_transfer_group().worker.path.blocks
        turns[0]["codecs"] = {group: each.format.codec for group, each in blocks.items()}
    turns[0]["accepted"] = accepted(llm)
    print(json.dumps(turns))


if __name__ == "__main__":
    main()
