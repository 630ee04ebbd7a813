"""Traces for tests, and what must hold of a replay's journal."""

import json
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from manthan.manager.simulator.replay import Action
from manthan.manager.simulator.traces import MOONCAKE_BLOCK_TOKENS, TracedRequest

DATA = Path(__file__).parents[1] / "data"
EXCERPT = DATA / "mooncake_conversation_1000.jsonl"
BLOCK = 4
"""Tokens of a block of the traces that are made here."""
HASH_NBYTES = 32


def request(at: float, text: str, *, answer: str = "", session: str | None = None, rest: int = 1) -> TracedRequest:
    """Return a request: a prompt of one letter a block and `rest` tokens, and an answer.

    Each block hash covers all letters up to its own; see `name`.
    """
    whole = text + answer
    tokens, answer_tokens = len(text) * BLOCK + rest, len(answer) * BLOCK
    full = (tokens + max(0, answer_tokens - 1)) // BLOCK
    hashes = [name(whole[: i + 1]) for i in range(full)]
    return TracedRequest(at, session, hashes, len(text), tokens, answer_tokens)


def name(text: str) -> bytes:
    """Return the block hash of a text's last letter."""
    return text.encode().ljust(HASH_NBYTES, b"_")


def agent_requests() -> list[TracedRequest]:
    """Return the requests of agent_sessions.jsonl, in the order of their arrival."""
    requests, numbers = list[TracedRequest](), count()
    for line in (DATA / "agent_sessions.jsonl").read_text().splitlines():
        at, tokens, hashes = 0, 0, list[bytes]()
        for seconds, new, answer, left, ending in json.loads(line):
            at, tokens = at + seconds, tokens + new
            whole, full = -(-tokens // MOONCAKE_BLOCK_TOKENS), tokens // MOONCAKE_BLOCK_TOKENS
            hashes = hashes[: len(hashes) - left]
            hashes += [next(numbers).to_bytes(8, "big") for _ in range(whole - len(hashes))]
            stop = {"t": "tool_use", "e": "end_turn", "": ""}[ending]
            requests.append(TracedRequest(float(at), None, hashes[:full], full, tokens, answer, stop=stop))
    return sorted(requests, key=lambda one: one.at)


def check_journal(journal: Sequence[Action], capacity: int) -> None:
    """Check that restored blocks were stored and not dropped since, and that at most `capacity` blocks are.

    Blocks may be stored again, as those of heads that sessions come to share, but not twice at a time.
    """
    begun: set[bytes] = set()
    under_way: set[bytes] = set()
    stored: set[bytes] = set()
    for action in journal:
        if action.what == "store":
            assert not under_way & set(action.hashes), "stored twice at a time"
            begun.update(action.hashes)
            under_way.update(action.hashes)
        elif action.what == "stored":
            assert under_way.issuperset(action.hashes)
            under_way.difference_update(action.hashes)
            stored.update(action.hashes)
        elif action.what == "drop":
            begun.difference_update(action.hashes)
            stored.difference_update(action.hashes)
        else:
            assert stored.issuperset(action.hashes), f"{action.what} of blocks that are not stored"
        assert len(begun) <= capacity
