"""Traces for tests, and slow but plain references of what caches find of them."""

from collections import OrderedDict
from collections.abc import Sequence
from functools import cache
from itertools import combinations
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


def run_length(keys: Sequence[bytes], cached: object) -> int:
    return next((i for i, key in enumerate(keys) if key not in cached), len(keys))  # type: ignore[operator]


def block_lru(requests: Sequence[TracedRequest], capacity: int, block_tokens: int = BLOCK) -> int:
    """Blocks found by a cache of blocks, the least recently used being evicted, of a prompt its tail before its head.

    The last token of a prompt is always computed.
    """
    cached: OrderedDict[bytes, None] = OrderedDict()
    found = 0
    for one in requests:
        found += run_length(one.keys[: (one.input_tokens - 1) // block_tokens], cached)
        for key in reversed(one.keys):
            cached[key] = None
            cached.move_to_end(key)
        while len(cached) > capacity:
            cached.popitem(last=False)
    return found


def best_of_all(requests: Sequence[TracedRequest], capacity: int) -> int:
    """Blocks that any cache could find: all choices of what to keep after each request are tried."""

    @cache
    def best(number: int, cached: frozenset[bytes]) -> int:
        if number == len(requests):
            return 0
        here = run_length(requests[number].keys, cached)
        known = sorted(cached | set(requests[number].keys))
        kept = map(frozenset, combinations(known, min(capacity, len(known))))
        return here + max(best(number + 1, choice) for choice in kept)

    return best(0, frozenset())


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
