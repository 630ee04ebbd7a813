"""Conversations whose chat template leaves what the model thought out of the next prompt."""

from collections.abc import Iterator

from vllm_engine import BLOCK, Answer, Engine, Table

THOUGHT_TOKENS = 100
"""What the model says in a turn: a right answer, and so much of which nothing comes back."""
TURNS = 5


def turns(engine: Engine, session: str | None) -> Iterator[tuple[Answer, int]]:
    """Each answer, and how many tokens the prompt before it had; only the value goes into the next prompt."""
    table, asked = Table(7), 0
    prompt = table.text
    for index, (name, value) in enumerate(list(table.values.items())[:TURNS]):
        prompt += f"assert {name} == "
        answer = engine.ask(prompt, session, max_tokens=THOUGHT_TOKENS)
        assert answer.text.startswith(value), index
        yield answer, asked
        asked = answer.prompt_tokens
        prompt += f"{value}\n"


def blocks_stored(engine: Engine) -> float:
    """Encoded and not dropped since the engine was started."""
    dropped = sum(
        engine.metric("manthan_dropped_blocks_total", cause=cause) for cause in ("abandoned", "reset", "budget")
    )
    return engine.metric("manthan_encoded_blocks_total") - dropped


def test_a_named_session_goes_on_and_keeps_nothing_else(engine: Engine) -> None:
    before, failures = blocks_stored(engine), engine.failures()
    for answer, asked in turns(engine, "chat"):
        kept = max(0, asked // BLOCK - 1) * BLOCK
        assert kept <= answer.cached_tokens <= asked
        engine.wait_until_cold(1)  # the same session, and no other
    total = answer.prompt_tokens + THOUGHT_TOKENS
    engine.wait(lambda: blocks_stored(engine) - before <= total // BLOCK, "only codes of the last turn's tokens")
    assert blocks_stored(engine) - before >= asked // BLOCK
    assert engine.failures() == failures


def test_without_a_name_it_may_be_somebody_else_who_is_served_exact_kv(engine: Engine) -> None:
    lossy = engine.metric("manthan_lossy_tokens_total")
    for turn, (answer, _) in zip(range(1, TURNS), turns(engine, None), strict=False):
        assert (answer.cached_tokens > 0) == (turn > 2)  # the head that two have shared is stored exact
        assert engine.metric("manthan_lossy_tokens_total") == lossy
        engine.wait(lambda: not any(map(engine.sessions, ("hot", "idle", "evicting"))), "rest")
        assert engine.sessions("cold") == turn  # what may be somebody else's stays, until there is need of room
