"""Sessions of a real engine that go cold and return, and what became of the bits of their blocks.

Run as a script: a job as JSON on standard input, a report as JSON on standard output. See SteppedEngine.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import vllm_engine
from stepped_engine import SteppedEngine
from vllm.distributed.kv_transfer import get_kv_transfer_group

from manthan.manager.sessions.session import SessionState

Blocks = dict[bytes, bytes]
"""The numbers of paged blocks, by block key."""


class ExactSessions:
    """Does jobs, and writes down what happens."""

    def __init__(self, engine: SteppedEngine) -> None:
        self.engine, self.half = engine, engine.half
        self.path = get_kv_transfer_group().worker.path
        self.tokenizer = engine.engine.get_tokenizer()
        self.report: dict[str, Any] = {"right": [], "failures": []}
        self.half.stats.copies_failed = self.report["failures"].extend

    # -- what can be done -----------------------------------------------------------------------------

    def ask(self, table: vllm_engine.Table, index: int, session: str, after: list[int]) -> list[int]:
        """Ask for an entry at the end of a conversation; returns the conversation with question and answer."""
        prompt, right = table.question(index)
        text = prompt if not after else f"\nassert {list(table.values)[index]} == "
        tokens = after + self.tokenizer.encode(text, add_special_tokens=False)
        answer = self.engine.ask(tokens, session, 4)
        self.report["right"].append(self.tokenizer.decode(answer) == right)
        return tokens + answer

    def pool(self, session: str) -> Blocks:
        """The numbers of a hot session's blocks, in order."""
        chain = self.half.manager.table.by_id[session].chain
        found = {block.key: self.half._pool.get_cached_block(block.key, [0]) for block in chain}
        return {key: self.path.blocks.numbers(at[0].block_id).tobytes() for key, at in found.items() if at}

    def go_cold(self) -> None:
        """Everything is evicted, and nothing of it is left in the pool."""
        manager = self.half.manager
        until = time.monotonic() + 30
        while {s.state for s in manager.table.by_id.values()} != {SessionState.COLD} or self.half.has_work:
            assert time.monotonic() < until, "sessions do not go cold"
            self.half._rung = True
            self.engine.engine.step()
            self.engine._wait_for_threads()
        for layer in self.path.blocks._layers:
            layer.rows[:] = 0

    def copies(self, session: str) -> list[int]:
        """Which of a session's blocks have exact copies."""
        chain = self.half.manager.table.by_id[session].chain
        return [block.depth for block in chain if block.exact]

    def gauges(self) -> dict[str, float]:
        shown = {name: values[""] for name, values in self.half.stats._gauges().items() if "" in values}
        return shown | {"store": self.path.store.used, "peak": self.path.store.peak}

    # -- jobs -----------------------------------------------------------------------------------------

    def grow(self) -> None:
        """One session goes cold and returns, three times, and grows by five blocks or so each time."""
        table = vllm_engine.Table(1)
        rounds = self.report["rounds"] = []
        conversation, before = self.ask(table, 0, "user", []), self.pool("user")
        for turn in range(3):
            self.go_cold()
            copies, gauges = self.copies("user"), self.gauges()
            more = self.tokenizer.encode("\n" + table.text[:250], add_special_tokens=False)
            conversation = self.ask(table, turn + 1, "user", conversation + more)
            after = self.pool("user")
            rounds.append(
                {
                    "same": [after[key] == numbers for key, numbers in before.items()],
                    "copies": copies,
                    "restored": self.engine.requests[-1]["found"][1],
                }
                | gauges
            )
            before = after

    def damage(self) -> None:
        """A byte of one part of the first block's copy changes, and a part of the last one's is lost."""
        table = vllm_engine.Table(2)
        conversation, before = self.ask(table, 0, "unlucky", []), self.pool("unlucky")
        self.go_cold()
        first, *_, last = before
        store = self.path.store._blocks
        parts = {key: sorted(k for k in store if k.startswith(key + b"/exact")) for key in (first, last)}
        damaged = store[parts[first][1]].copy()
        damaged[5000] ^= 1
        store[parts[first][1]] = damaged
        self.path.store.drop([parts[last][-1]])
        self.ask(table, 1, "unlucky", conversation)
        after = self.pool("unlucky")
        self.report["same"] = [after[key] == numbers for key, numbers in before.items()]
        self.engine.ask([1, 2, 3], "other", 1)  # what is spoiled is dropped with a step
        self.report["copies"] = self.copies("unlucky")
        self.report["parts"] = [len([k for k in store if k.startswith(key + b"/")]) for key in before]

    def prefetch(self) -> None:
        """A session comes back before it is asked for."""
        self.ask(vllm_engine.Table(3), 0, "expected", [])
        before = self.pool("expected")
        self.go_cold()
        self.engine.ask(list(range(100, 120)), "caller", 1, prefetch=["expected"])
        after = self.pool("expected")
        self.report["prefetched"] = [after.get(key) == numbers for key, numbers in before.items()]

    def crowd(self) -> None:
        """More and more sessions in a store that is too small for their copies, and at last for their codes."""
        tables = [vllm_engine.Table(10 + n) for n in range(8)]
        conversations, rounds = {}, []
        for n, table in enumerate(tables):
            conversations[n] = self.ask(table, 2, f"user-{n}", [])
            self.go_cold()
            chains = {s.session_id: len(s.chain) for s in self.half.manager.table.by_id.values()}
            copies = {f"user-{m}": self.copies(f"user-{m}") for m in range(n + 1) if f"user-{m}" in chains}
            rounds.append({"chains": chains, "copies": copies} | self.gauges())
        self.report["rounds"] = rounds
        for n in range(7, 3, -1):
            self.ask(tables[n], 14, f"user-{n}", conversations[n])


def main() -> None:
    job = json.load(sys.stdin)
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints
    sessions = ExactSessions(SteppedEngine(job["blocks"], **job["manthan"]))
    for name in job["what"]:
        what: Callable[[], None] = getattr(sessions, name)
        what()
    with report:
        json.dump(sessions.report, report)


if __name__ == "__main__":
    main()
