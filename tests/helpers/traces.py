"""Traces for tests, and what must hold of a replay's journal."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from manthan.benchmarks.simulator.engine import EngineReplay, Setup
from manthan.benchmarks.simulator.traces import TracedRequest, read_trace
from manthan.manager.events import BlocksDropped, BlocksSaved, Event, Evicted

DATA = Path(__file__).parents[1] / "data"
EXCERPT = DATA / "mooncake_conversation_1000.jsonl"
AGENTS = DATA / "coding_agents.jsonl.xz"
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
    """Return the requests of the coding agents' sessions of odd number, in the order of their arrival."""
    return [one for one in read_trace(AGENTS).requests if int(one.agent[6:10]) % 2]


class Action(NamedTuple):
    """What happened to blocks: `store` (it begins), `stored` (it has ended), `cold`, `restore` or `drop`."""

    what: str
    hashes: Sequence[bytes]


class WatchedReplay(EngineReplay):
    """A replay that notes every action, the order in which requests are let in, and the most blocks that were taken."""

    def __init__(self, requests: Sequence[TracedRequest], setup: Setup) -> None:
        super().__init__(requests, setup)
        self.journal: list[Action] = []
        self.order: list[int] = []
        self.peak_used = self.peak_cold = 0
        self.manager.events.subscribe(self._note)
        self._plain_step, self._driver.step = self._driver.step, self._watched_step  # type: ignore[method-assign]

    def _note(self, event: Event) -> None:
        match event:
            case BlocksSaved():
                self.journal.append(Action("stored", event.block_hashes))
            case BlocksDropped():
                self.journal.append(Action("drop", event.block_hashes))
            case Evicted():
                rows = self.manager.table.by_id[event.session_id].rows
                self.journal.append(Action("cold", self.manager.blocks.hashes(rows)))
            case _:
                pass

    def _watched_step(self, taken: int, now: float) -> Any:
        work = self._plain_step(taken, now)
        blocks = self.manager.blocks
        self.peak_cold = max(self.peak_cold, blocks.storing + sum(blocks.saved_blocks.values()))
        if work.stores:
            self.journal.append(Action("store", [name for job in work.stores for name in job.block_hashes]))
        return work

    def _start(self, request: Any, hits: list[int], cold: int) -> None:
        self.order.append(request.number)
        resident = len(hits)
        super()._start(request, hits, cold)
        if cold:
            self.journal.append(Action("restore", request.traced.hashes[resident : resident + cold]))

    def _step(self) -> None:
        super()._step()
        self.peak_used = max(self.peak_used, self.setup.pool_blocks - len(self._pool))


def watched(requests: Sequence[TracedRequest], setup: Setup) -> WatchedReplay:
    """Replay requests, and return what was noted."""
    world = WatchedReplay(requests, setup)
    world.run()
    return world


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
