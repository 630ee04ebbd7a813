"""Traces for tests, and what must hold of a replay's journal."""

from collections.abc import Sequence
from pathlib import Path

from manthan.manager.simulator.replay import Action
from manthan.manager.simulator.traces import TracedRequest

EXCERPT = Path(__file__).parents[1] / "data" / "mooncake_conversation_1000.jsonl"
BLOCK = 4
"""Tokens of a block of the traces that are made here."""


def request(at: float, text: str, *, answer: str = "", session: str | None = None, rest: int = 1) -> TracedRequest:
    """A prompt of one letter a block and `rest` tokens, and an answer; each key covers all letters up to its own."""
    whole = text + answer
    tokens, answer_tokens = len(text) * BLOCK + rest, len(answer) * BLOCK
    full = (tokens + max(0, answer_tokens - 1)) // BLOCK
    keys = [whole[: i + 1].encode() for i in range(full)]
    return TracedRequest(at, session, keys, len(text), tokens, answer_tokens)


def check_journal(journal: Sequence[Action], capacity: int, *, again: bool = False) -> None:
    """What is restored has been encoded and not been dropped since, and no more than `capacity` blocks ever are.

    again: codes may be replaced, as those of heads that sessions come to share; nothing is encoded twice at a time.
    """
    begun: set[bytes] = set()
    under_way: set[bytes] = set()
    stored: set[bytes] = set()
    for action in journal:
        if action.what == "spill":
            assert not (under_way if again else begun) & set(action.keys), "encoded twice"
            begun.update(action.keys)
            under_way.update(action.keys)
        elif action.what == "stored":
            assert under_way.issuperset(action.keys)
            under_way.difference_update(action.keys)
            stored.update(action.keys)
        elif action.what == "drop":
            begun.difference_update(action.keys)
            stored.difference_update(action.keys)
        else:
            assert stored.issuperset(action.keys), f"{action.what} of blocks without codes"
        assert len(begun) <= capacity
