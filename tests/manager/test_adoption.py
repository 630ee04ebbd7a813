"""Processes that are killed, and what the next one takes over: sessions whose codes are there, as if they had gone cold
in it."""

import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import hypothesis.strategies as st
import pytest
from examples import examples
from hypothesis import Phase, settings
from hypothesis.stateful import rule, run_state_machine_as_test
from integrity import check_integrity
from machine import POOL_BLOCKS, PROFILE, Sessions
from told import all_told, told
from world import BESIDE, IDLE_AFTER_S, World, chain

from manthan.manager.journal_link import JournalLink
from manthan.manager.sessions.adoption import HISTORY, LeftAnchor, LeftSession
from manthan.manager.sessions.budget import Shares
from manthan.manager.sessions.manager import SessionMemoryManager
from manthan.manager.sessions.session import CodeState, Drop, DropCause, Encoding, MemoryShape, Session, SessionState
from manthan.manager.tiers.journal import Journal, JournalSession
from manthan.manager.work import Name
from manthan.policies import get_policy


def note_of(name: Name) -> bytes:
    return b"%d of " % name[0] + name[1]


class Notes(dict[Name, bytes]):
    """Something is known of every block; what is put in here comes from the journal."""

    def get(self, name: Name, default: object = None) -> bytes:  # type: ignore[override]
        return note_of(name)


class PatientJournal(Journal):
    """Writes what it was told last when it is told more, and in the caller's thread: what a kill loses is always the
    same."""

    last: list[JournalSession]

    def tell(self, sessions: Iterable[JournalSession]) -> None:
        self.flush()
        self.last = list(sessions)

    def flush(self) -> None:
        self._write(getattr(self, "last", ()), False)
        self.last = []

    def clear(self) -> None:
        self.last = []
        self._write((), True)


class Restarts(Sessions):
    """Now and then the process is killed, and another one finds its stores and its journal."""

    steer = None  # type: ignore[assignment]  # an operator's pin for a while does not outlast its process

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="manthan-journal-"))
        self.came = 0
        self.begin()

    def begin(self) -> None:
        self.journal = PatientJournal(self.folder)
        self.notes = Notes()
        self.link = JournalLink(self.journal, self.manager, self.notes, lambda: self.world.now)
        self.is_void = False
        step, reset = self.world.step, self.world.reset

        def step_and_tell(relieve: int, limit: int) -> None:
            step(relieve, limit)
            self.link.tell(self.world.now)

        def reset_and_forget() -> None:
            reset()
            self.link.reset()
            self.is_void = True

        self.world.step, self.world.reset = step_and_tell, reset_and_forget  # type: ignore[method-assign]

    @rule(is_told=st.booleans())
    def kill(self, is_told: bool) -> None:
        """is_told: what was told last is written."""
        before = self.manager.table.by_id
        if is_told:
            self.link.tell(self.world.now)
            self.journal.flush()
        self.journal.close()
        dead, was_void = self.world, self.is_void
        if was_void:  # nobody finds what was stored since a reset, nor before it
            for store in dead.stores:
                store.cleared("")
        size = self.ranks, POOL_BLOCKS, self.cold_blocks
        self.world = World(*size, self.policy, 3, self.exact, self.beside)
        self.manager = self.world.manager
        self.world.stores, self.world.seen = dead.stores, dead.seen
        self.world.now, self.world.epoch, self.world.count = dead.now, dead.epoch, dead.count
        self.manager.blocks.changed = {}
        self.told.clear()
        self.noted.clear()
        self.begin()
        ranks = [{name: store.room(kept.nbytes) for name, kept in store._blocks.items()} for store in dead.stores]
        found = self.link.adopt(ranks, self.world.now)
        known = {(block.group or 0, block.key) for block in self.manager.blocks}
        assert dict(self.notes) == {name: note_of(name) for name in known}
        assert found.sessions == len(self.manager.table.by_id)
        assert {session.state for session in self.manager.table.by_id.values()} <= {SessionState.COLD}
        assert not (was_void and found.written)
        self.came += found.sessions
        if is_told and not was_void:
            self.all_that_were_cold_are(list(before.values()))

    def all_that_were_cold_are(self, before: list[Session]) -> None:
        """But for what is beyond the budget of those that came later, and for those of which another has a block hot
        without codes."""
        for session in before:
            if session.state is SessionState.COLD and all(block.has_codes for block in session.chain):
                found = self.manager.table.by_id[session.session_id]
                assert [block.key for block in found.chain] == [block.key for block in session.chain]
                assert [anchor.depth for anchor in found.anchors] == [anchor.depth for anchor in session.anchors]
                assert (found.asked_id, found.tenant, found.uses) == (session.asked_id, session.tenant, session.uses)
                assert (found.pinned, found.priority, found.ttl_s) == (session.pinned, session.priority, session.ttl_s)
                assert (found.last_used, found.created) == (session.last_used, session.created)

    def teardown(self) -> None:
        try:
            self.kill(is_told=True)  # each life ends so
            super().teardown()
        finally:
            self.journal.close()
            shutil.rmtree(self.folder)


class RestartsWithAnchors(Restarts):
    beside = BESIDE
    cold_blocks = 24


class RestartsWithExactTokensOnTwoRanks(Restarts):
    ranks = 2
    exact = True
    cold_blocks = 12


@pytest.mark.parametrize("machine", [Restarts, RestartsWithAnchors, RestartsWithExactTokensOnTwoRanks])
def test_what_the_next_process_takes_over(machine: type[Restarts]) -> None:
    came = 0

    class Watched(machine):  # type: ignore[valid-type,misc]
        def teardown(self) -> None:
            nonlocal came
            super().teardown()
            came += self.came

    run_state_machine_as_test(Watched, settings=settings(PROFILE, max_examples=examples(300), phases=[Phase.generate]))
    assert came > 10


# -- by example -----------------------------------------------------------------------------------------


def manager(capacity: int = 1000, beside: bool = False) -> SessionMemoryManager:
    shape = MemoryShape(16, 1000, {0: 100}, beside={1: {0: 50}} if beside else {})
    shares = Shares(pinned=0.5, tenants={"small": 0.3})
    return SessionMemoryManager(get_policy("lru"), shape, capacity, idle_after_s=10, shares=shares)


def left(name: str, text: str, last_used: float, nbytes: int = 100, **facts: object) -> LeftSession:
    codes = {(None, key): Encoding(nbytes) for key in chain(text)}
    history = dict.fromkeys(HISTORY, 0) | {"ttl_s": None, "gap": None, "expected": None}
    known = (
        history
        | {"asked_id": name.rpartition("/")[2], "tenant": "", "pinned": False, "created": 0.0, "prompt_end": ""}
        | facts
    )
    anchors = known.pop("anchors", ())
    codes |= {(group, key): Encoding(50) for a in anchors for group, key, _ in a.parts}
    return LeftSession(name, known | {"last_used": last_used}, chain(text), anchors, codes)


def test_a_tenant_s_share_holds_and_a_pin_that_still_fits() -> None:
    mine = manager(1000)
    sessions = [left("small/a", "aaaaa", 1.0, tenant="small"), left("b", "bbb", 2.0, pinned=True)]
    sessions.append(left("c", "ccc", 3.0, pinned=True))
    assert mine.adopt(sessions, 5.0) == {"small/a": 3, "b": 3, "c": 3}
    assert [told(mine, name).pinned for name in ("small/a", "b", "c")] == [False, True, False]
    check_integrity(mine)
    assert mine.request_started("r", chain("aaaaaa"), "a", 6.0, tenant="small") == "small/a"


def test_a_time_to_live_that_ended_meanwhile() -> None:
    mine = manager()
    mine.adopt([left("a", "aa", 1.0, ttl_s=3.0), left("b", "bb", 1.0, ttl_s=30.0)], 5.0)
    mine.sweep(5.0)
    assert [info.id for info in all_told(mine)] == ["b"]
    assert mine.take_drops() == [Drop(0, chain("aa"), DropCause.EXPIRED)]


def test_what_stands_where_the_prompt_ends_comes_too() -> None:
    keys = chain("aaaa")
    anchors = [LeftAnchor(depth, [(1, keys[depth - 1], depth - 1)]) for depth in (1, 2, 4)]
    mine = manager(beside=True)
    assert mine.adopt([left("a", "aaaa", 1.0, anchors=anchors, prompt_depth=2)], 5.0) == {"a": 4}
    assert [anchor.depth for anchor in mine.table.by_id["a"].anchors] == [2, 4]
    assert mine.match(keys[:3]) == 2
    check_integrity(mine)


def test_what_some_rank_does_not_have_is_dropped_and_so_is_what_nobody_names(tmp_path: Path) -> None:
    first = manager()
    journal = Journal(tmp_path)
    first.adopt([left("a", "aaaa", 1.0)], 1.0)
    JournalLink(journal, first)
    link = JournalLink(journal, first)
    first.table.touch(first.table.by_id["a"])
    link.tell(2.0)
    link.close()
    keys, stray = chain("aaaa"), (0, b"stray")
    both = {(0, key): 50 for key in keys} | {stray: 50}
    one = {name: nbytes for name, nbytes in both.items() if name[1] != keys[2]}
    next_one = manager()
    link = JournalLink(Journal(tmp_path), next_one)
    found = link.adopt([both, one], 9.0)
    assert (found.sessions, found.written, found.blocks, found.nbytes, found.dropped) == (1, 1, 2, 200, 3)
    [drop] = next_one.take_drops()
    assert sorted(drop.keys) == sorted([keys[2], keys[3], b"stray"])
    link.close()
    assert [len(session.chain.blocks) for session in Journal(tmp_path).sessions()] == [2]


def test_what_another_session_stores_for_a_cold_one_is_written(tmp_path: Path) -> None:
    world = World(ranks=1, pool_blocks=12, cold_blocks=20)
    link = JournalLink(Journal(tmp_path), world.manager)

    def go_cold() -> None:
        world.now += IDLE_AFTER_S
        world.step(0, 99)
        link.tell(world.now)
        for spill in list(world.spills):
            world.answer(spill, 0, True)
        link.tell(world.now)

    def ask(text: str, *unreadable: int) -> None:
        world.start(text, len(text), None)
        request = world.requests[-1]
        world.admit(request)
        if request.restore is not None:
            world.end_restore(request.restore, set(unreadable))
        world.finish(request, len(text))

    ask("sab")
    ask("sb")
    go_cold()
    for key in chain("sb"):
        world.pool.uncache(world.pool.cached.get(key, -1))
    ask("sba", 0)  # the first block's codes cannot be read: it is computed, and encoded once more
    assert world.manager.blocks.get(b"s").code is CodeState.NONE
    world.manager.table.touch(world.manager.table.by_id["anonymous-1"])
    link.tell(world.now)
    go_cold()
    link.close()
    written = {each.session_id: len(each.chain.blocks) for each in Journal(tmp_path).sessions()}
    assert written == {"anonymous-1": 3, "anonymous-2": 3}


def test_a_pin_for_a_while_ends_with_its_process(tmp_path: Path) -> None:
    mine, journal = manager(), Journal(tmp_path)
    link = JournalLink(journal, mine, clock=lambda: 5.0)
    mine.adopt([left("a", "aa", 1.0), left("b", "bb", 2.0), left("c", "cc", 3.0)], 5.0)
    mine.steer("pin", mine.table.by_id["a"], 5.0, seconds=60.0)
    mine.steer("pin", mine.table.by_id["b"], 5.0)
    link.tell(5.0)
    journal.close()
    facts = {session.session_id: session.facts["pinned"] for session in Journal(tmp_path).sessions()}
    assert facts == {"a": False, "b": True, "c": False}
