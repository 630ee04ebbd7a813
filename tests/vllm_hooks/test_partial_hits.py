"""Prompts of which a part is cold, or resident, or both: exactly their full blocks are found, each at its position."""

import random
from collections.abc import Iterator

import pytest
from vllm_engine import BLOCK, Engine, Table

pytestmark = pytest.mark.usefixtures("sweeping_engine")

WHOLE, HALF = 6 * BLOCK, 3 * BLOCK
"""Tokens of a session's prompt, and of a part of it."""
SHARED = [
    *((WHOLE, more) for more in (BLOCK, 1, 0)),
    *((WHOLE - 1, more) for more in (1, 0)),
    *((HALF, more) for more in (BLOCK, 1, 0)),
    *((HALF - 1, more) for more in (1, 0)),
    *((HALF + 1, 0), (BLOCK, 1), (BLOCK - 1, BLOCK)),
]
"""Number of tokens that a prompt shares with what is cold, and of others behind them."""


def tokens(seed: int, count: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(10, 200) for _ in range(count)]


class Found:
    """Requests, and where their prompts' tokens were found."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def ask(self, name: str, prompt: list[int], answer: int = 4) -> tuple[int, int]:
        """Return how many tokens were resident and restored."""
        before = self._counted()
        said = self.engine.run(self.engine.complete(prompt, name, answer))
        resident, restored = (int(now - then) for now, then in zip(self._counted(), before, strict=True))
        assert said.cached_tokens == resident + restored
        return resident, restored

    def _counted(self) -> list[float]:
        return [self.engine.metric(f"{name}_cache_hits_total") for name in ("prefix", "external_prefix")]


@pytest.fixture
def found(engine: Engine) -> Iterator[Found]:
    failures = engine.failures()
    yield Found(engine)
    assert engine.failures() == failures


def test_as_many_blocks_are_restored_as_a_prompt_shares(found: Found) -> None:
    """vLLM computes a prompt's last token in any case, so that a hit of whole blocks leaves the last one out."""
    for n in range(len(SHARED)):
        found.ask(f"chat-{n}", tokens(n, WHOLE))
    found.engine.wait_until_cold(len(SHARED))
    for n, (shared, more) in enumerate(SHARED):
        prompt = tokens(n, WHOLE)[:shared] + tokens(100 + n, more)
        expected = min(shared, len(prompt) - 1) // BLOCK * BLOCK
        assert found.ask(f"chat-{n}", prompt) == (0, expected), (shared, more)


def test_what_is_resident_is_not_restored(found: Found) -> None:
    """A part came back with a shorter prompt, and the rest follows it."""
    for n in range(1, 6):
        found.ask(f"chat-{n}", tokens(n, WHOLE))
    found.engine.wait_until_cold(5)
    for n in range(1, 6):
        assert found.ask(f"chat-{n}", tokens(n, n * BLOCK + 1), answer=1) == (0, n * BLOCK)
        assert found.ask(f"chat-{n}", tokens(n, WHOLE) + tokens(0, 1)) == (n * BLOCK, WHOLE - n * BLOCK)


@pytest.mark.parametrize("users", [1, 6])
def test_a_task_that_is_asked_at_once_twice(engine: Engine, users: int) -> None:
    """The prefix cache is reset in between. Users have several requests at a time, or one has all."""
    questions = [Table(500 + n % users).question(n) for n in range(12)]
    restored = 0.0
    for _ in range(2):
        before = engine.metric("external_prefix_cache_hits_total")
        prompts = ((prompt, f"user-{n % users}") for n, (prompt, _) in enumerate(questions))
        asked = [engine.start(engine.generate(*prompt)) for prompt in prompts]
        assert [each.result(60).text for each in asked] == [right for _, right in questions]
        restored = engine.metric("external_prefix_cache_hits_total") - before
        engine.wait(lambda: not any(map(engine.sessions, ("active", "idle"))), "rest")
        engine.empty_pool()
    assert restored >= users * 16 * BLOCK
