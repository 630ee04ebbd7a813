"""An engine in words, to try the manager by example.

A block is written as a word: "sys a b" is a chain of three blocks, and forks share their first words.
"""

from collections.abc import Iterable
from typing import Any

from spills import spilled, take_spills

from manthan.manager.sessions.hints import parse_hints
from manthan.manager.sessions.manager import SessionMemoryManager
from manthan.manager.sessions.session import CodeState, MemoryShape, Outcome, Session
from manthan.policies import get_policy

IDLE_AFTER_S = 10.0
SHAPE = MemoryShape(block_tokens=16, hot_nbytes=500, bounds={0: 100, 4: 150, 16: 500})


def chain(text: str) -> list[bytes]:
    """The block keys of a text; each covers all words up to its own."""
    words = text.split()
    return [" ".join(words[: i + 1]).encode() for i in range(len(words))]


class Engine:
    """Drives a manager through whole requests and evictions; time stands still unless it is moved."""

    def __init__(self, capacity: int = 100, min_tokens: int = 0, policy: str = "lru", **more: Any) -> None:
        self.manager = SessionMemoryManager(
            get_policy(policy), SHAPE, capacity * SHAPE.cold_nbytes + 99, IDLE_AFTER_S, min_tokens, **more
        )
        self.now = 0.0
        self.requests = 0

    def start(self, prompt: str, name: str | None = None, tenant: str = "", **hints: Any) -> str:
        """Begin a request; returns its id."""
        self.requests += 1
        self.manager.request_started(
            f"r{self.requests}", chain(prompt), name, self.now, hints=parse_hints(hints), tenant=tenant
        )
        return f"r{self.requests}"

    def finish(self, request: str, text: str) -> Outcome | None:
        return self.manager.request_finished(request, chain(text), self.now)

    def talk(self, text: str, name: str | None = None, tenant: str = "", **hints: Any) -> Outcome:
        """A request that is asked all words but the last and answers with that one."""
        outcome = self.finish(self.start(text.rpartition(" ")[0], name, tenant, **hints), text)
        assert outcome is not None
        return outcome

    def sweep(self) -> None:
        """Let everything be idle for long enough and begin to evict."""
        self.now += IDLE_AFTER_S
        self.manager.sweep(self.now)

    def spill(self, limit: int = 10_000) -> list[bytes]:
        return [order.key for order in take_spills(self.manager, limit)]

    def stored(self, keys: Iterable[bytes], nbytes: int = SHAPE.cold_nbytes) -> None:
        for key in keys:
            spilled(self.manager, key, nbytes, self.now)

    def evict(self) -> list[bytes]:
        """Everything idle goes cold; returns what had to be encoded."""
        self.sweep()
        keys = self.spill()
        self.stored(keys)
        self.manager.take_releases()
        return keys

    def chains(self) -> dict[str, str]:
        """Session id to text."""
        sessions = self.manager.table.by_id.values()
        return {s.session_id: s.chain[-1].key.decode() if s.chain else "" for s in sessions}

    def states(self) -> dict[str, str]:
        return {s.session_id: s.state.value for s in self.manager.table.by_id.values()}

    def session(self, session_id: str) -> Session:
        return self.manager.table.by_id[session_id]

    def cold(self) -> set[str]:
        """The last words of all blocks in the cold store."""
        return {b.key.decode().split()[-1] for b in self.manager.blocks if b.code is CodeState.COLD}
