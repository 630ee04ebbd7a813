"""Conversations of an engine that sleeps in between."""

from typing import Any

import torch
from vllm_engine import Answer, Engine, Table

OTHER = 1 + 2**-6
"""What turns weights into others that answer alike."""
MOMENTS = ["before the cache is back", "when all is back"]
"""At which weights change."""


def sleep(engine: Engine, level: int = 1, mode: str = "abort") -> None:
    engine.run(engine.llm.sleep(level, mode))


def wake(engine: Engine, *tags: str) -> None:
    engine.run(engine.llm.wake_up(list(tags) or None))


def turned(worker: Any, factor: float) -> None:
    """New weights: the model's first parameter is multiplied."""
    with torch.no_grad():
        next(worker.model_runner.get_model().parameters()).mul_(factor)


def converse(engine: Engine, count: int = 3) -> list[tuple[Table, Answer]]:
    tables = [Table(700 + seed) for seed in range(count)]
    told = [(table, engine.ask(table.question(0)[0], f"sleeper-{n}")) for n, table in enumerate(tables)]
    engine.wait_until_cold(count)
    return told


def asked_again(engine: Engine, told: list[tuple[Table, Answer]]) -> list[int]:
    """How many tokens of each conversation need not be computed when it goes on; its answers are right."""
    found = []
    for n, (table, _) in enumerate(told):
        prompt, right = table.question(5)
        answer = engine.ask(prompt, f"sleeper-{n}")
        assert answer.text == right
        found.append(answer.cached_tokens)
    return found


def asked_again_of_other_weights(engine: Engine, moment: str) -> list[int]:
    """The same of one conversation after a sleep in parts, in which the weights changed; they are as before then."""
    told = converse(engine)
    sleep(engine)
    wake(engine, "weights")
    if moment == MOMENTS[1]:
        wake(engine, "kv_cache")
    engine.on_worker(turned, OTHER)
    wake(engine)
    try:
        return asked_again(engine, told[:1])
    finally:
        engine.on_worker(turned, 1 / OTHER)
