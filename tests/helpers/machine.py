"""A state machine: random requests, stores, loads, failures and resets, and what must always hold."""

import sys
from typing import Any, ClassVar

import hypothesis.strategies as st
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from integrity import check_empty, check_integrity, check_store
from world import FAULTS, IDLE_AFTER_S, SINK_TOKENS, TOKENS, Asked, Setup, World

from manthan.manager.session.manager import DOUBLINGS
from manthan.manager.session.table import Session, SessionState

LONGEST = 10
"""Blocks of a request at most."""
RECENT = 6
"""Number of conversations that go on."""
LETTERS = st.text("ab", max_size=4)
INDEX = st.integers(0, 1000)
FEW = st.sampled_from([1, 1, 2, 3, 9])
FAULT = st.sampled_from([0, 0, 0, 0, 0, 0, 1, 2, 3, 4])
HINTS: list[dict[str, object]] = [
    *[{}] * 6,
    {"pin": True},
    {"pin": True, "ttl_s": 20},
    {"pin": False},
    {"release": True},
    {"ttl_s": 5},
    {"priority": -1},
    {"priority": 1},
    {"expect_return_s": 5},
    {"tool": "search"},
    {"prefetch": ["A"]},
    {"prefetch": ["anonymous-1", "B"]},
    {"quality": "exact"},
    {"quality": "exact"},
    {"quality": "high"},
    {"quality": "high"},
    {"store": False},
    {"store": False, "quality": "exact"},
    {"store": True},
    *[{"parent_session_id": "A"}] * 3,
    {"parent_session_id": "B"},
    {"keep": [{"from": 0, "to": 2 * TOKENS, "seconds": 15}]},
    {"keep": [{"from": 0, "to": 40, "seconds": 5}, {"from": 0, "to": TOKENS, "seconds": 30}]},
    {"parent_session_id": "C", "ttl_s": 5},
]


class Sessions(RuleBasedStateMachine):
    """Chats over a pool and tiers that are both too small for them."""

    setup: ClassVar[Setup] = Setup()
    steps: ClassVar[int] = 0
    """Steps of all machines of this process."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(self.setup)
        self.driver, self.manager = self.world.driver, self.world.manager
        self.manager.table.changed = {}
        self.texts = ["S"]  # of earlier conversations; the first is a system prompt

    # -- requests -------------------------------------------------------------------------------------

    @rule(
        base=INDEX,
        keep=st.integers(0, 8),
        more=LETTERS,
        answer=LETTERS,
        rest=st.sampled_from([0, 0, 5]),
        name=st.sampled_from([None, None, "A", "B"]),
        tenant=st.sampled_from(["", "", "small"]),
        hints=st.sampled_from(HINTS),
    )
    def ask(
        self,
        base: int,
        keep: int,
        more: str,
        answer: str,
        rest: int,
        name: str | None,
        tenant: str,
        hints: dict[str, object],
    ) -> None:
        """A new chat, a continuation, a fork or the same question again, by how much of an earlier one is kept."""
        recent = self.texts[-RECENT:]
        prompt = (recent[base % len(recent)][:keep] + more)[: LONGEST - 1] or "S"
        text = (prompt + answer)[:LONGEST]
        self.world.start(text, len(prompt), rest, name, tenant, hints)
        self.world.admit(self.world.asked[-1], 9)
        self.texts.append(text)

    def _some(self, which: int, **states: bool) -> Asked | None:
        """Return one of the requests that are in these states."""
        some = [
            each for each in self.world.asked if all(getattr(each, state) is is_so for state, is_so in states.items())
        ]
        return some[which % len(some)] if some else None

    @precondition(lambda self: self.world.asked)
    @rule(which=INDEX, count=FEW)
    def go_on(self, which: int, count: int) -> None:
        """A request is admitted, or computes more."""
        asked = self._some(which, is_loading=False)
        if asked is not None and asked.waits:
            self.world.admit(asked, count)
        elif asked is not None:
            self.world.compute(asked, count)

    @precondition(lambda self: self.world.asked)
    @rule(which=INDEX, missing=st.sampled_from([0, 0, 0, 1, 3, 99]), is_claimed=st.booleans())
    def finish(self, which: int, missing: int, is_claimed: bool) -> None:
        """A request ends, or is aborted."""
        asked = self.world.asked[which % len(self.world.asked)]
        if asked.is_running:
            self.world.compute(asked, 99)
        self.world.finish(asked, missing, is_claimed)

    @precondition(lambda self: self.world.asked)
    @rule(which=INDEX)
    def preempt(self, which: int) -> None:
        """A running request gives its blocks to others."""
        asked = self._some(which, is_running=True)
        if asked is not None:
            self.world.preempt(asked)

    @rule(
        base=INDEX,
        more=LETTERS,
        answer=LETTERS,
        fault=FAULT,
        at=INDEX,
        name=st.sampled_from([None, None, "A"]),
        hints=st.sampled_from(HINTS),
        has_slept=st.booleans(),
    )
    def converse(
        self,
        base: int,
        more: str,
        answer: str,
        fault: int,
        at: int,
        name: str | None,
        hints: dict[str, object],
        has_slept: bool,
    ) -> None:
        """A conversation goes on, from its question to the end of its answer.

        has_slept: all were idle before, and others have used the pool.
        """
        if has_slept:
            self.sleep(True)
            self.world.crowd(99)
        self.ask(base, LONGEST, more, answer, 0, name, "", hints)
        asked = self.world.asked[-1]
        for fails in (fault, 0):
            if asked.is_loading:
                self.world.step()
                self._all_work(fails, at)
            if asked.waits:
                self.world.admit(asked, 9)
        if not asked.is_loading:
            self.finish(len(self.world.asked) - 1, 0, False)

    @rule(blocks=st.sampled_from([4, 8, 99]))
    def crowd(self, blocks: int) -> None:
        """Many short requests come and go."""
        self.world.crowd(blocks)

    # -- transfers ------------------------------------------------------------------------------------

    @rule()
    def step(self) -> None:
        """The engine takes a step."""
        self.world.step()

    @precondition(lambda self: self.world.jobs)
    @rule(which=INDEX, fault=FAULT, at=INDEX)
    def work(self, which: int, fault: int, at: int) -> None:
        """A rank does the next thing for some job."""
        self._work(self.world.jobs[which % len(self.world.jobs)], fault, at)

    def _work(self, job: Any, fault: int, at: int) -> None:
        causes = FAULTS[job.transfer.direction]
        self.world.work(job, causes[fault % len(causes)] if fault else "", at)

    @precondition(lambda self: any(self.world.reports))
    @rule(rank=INDEX, most=FEW)
    def report(self, rank: int, most: int) -> None:
        """The driver hears of some results."""
        ranks = [at for at, reports in enumerate(self.world.reports) if reports]
        self.world.report(ranks[rank % len(ranks)], most)

    @precondition(lambda self: self.world.jobs)
    @rule(rank=INDEX, fault=FAULT, at=INDEX, blocks=st.sampled_from([0, 99]))
    def rank_works(self, rank: int, fault: int, at: int, blocks: int) -> None:
        """One rank ends all that it has, the driver hears of it, and others use the pool."""
        rank %= len(self.world.tiers)
        while jobs := [job for job in self.world.jobs if job.rank == rank]:
            self._work(jobs[0], fault, at)
        self.world.report(rank, 1 << 30)
        self.world.crowd(blocks)

    @rule(fault=FAULT)
    def all_work(self, fault: int) -> None:
        """All transfers end, and the driver hears of it."""
        self._all_work(fault)

    def _all_work(self, fault: int = 0, at: int = 0) -> None:
        while self.world.jobs:
            self._work(self.world.jobs[0], fault, at)
        for rank in range(len(self.world.tiers)):
            self.world.report(rank, 1 << 30)

    @rule(rank=INDEX, which=INDEX, is_lost=st.booleans())
    def spoil(self, rank: int, which: int, is_lost: bool) -> None:
        """A compressed block is damaged, or lost."""
        self.world.spoil(rank % len(self.world.tiers), which, is_lost)

    # -- time, operators and resets -------------------------------------------------------------------

    @rule(ends=st.sampled_from([True, True, False]))
    def sleep(self, ends: bool) -> None:
        """All that is idle is saved, as far as there is room. ends: False if it is only begun."""
        self.world.now += IDLE_AFTER_S
        for _ in range(3):
            self.world.step()
            if ends:
                self._all_work()

    @rule(seconds=st.sampled_from([1.0, IDLE_AFTER_S]))
    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.world.now += seconds

    @precondition(lambda self: self.manager.table.by_id)
    @rule(
        which=INDEX,
        what=st.sampled_from(["evict", "evict", "prefetch", "expect", "pin", "pin for a while", "unpin", "release"]),
    )
    def steer(self, which: int, what: str) -> None:
        """An operator asks something of a session, in whatever state it is."""
        sessions = list(self.manager.table.by_id.values())
        session, now = sessions[which % len(sessions)], self.world.now
        was_active, stays_out = bool(session.requests), session.stays_out
        if what.startswith("pin"):
            refused = self.driver.steer("pin", session, now, None if what == "pin" else 5.0)
            assert session.is_pinned is not bool(refused)
        else:
            refused = self.driver.steer(what, session, now, tool="search")
        if what in ("evict", "expect", "release"):
            assert bool(refused) == was_active or (what == "evict" and stays_out)
        if what == "evict" and not refused and not stays_out:
            assert session.is_cold or session in self.manager.saving or not len(session.rows)
        if what == "release" and not refused:
            assert session.session_id not in self.manager.table.by_id

    def _begin_transfers(self, which: int) -> None:
        """Begin to save what is idle, and to prefetch a cold session."""
        cold = [session for session in self.manager.table.by_id.values() if session.is_cold]
        if cold:
            self.world.crowd(99)
            self.driver.steer("prefetch", cold[which % len(cold)], self.world.now)
        self.world.now += IDLE_AFTER_S
        self.world.step()

    @rule(kind=st.sampled_from([0, 0, 0, 0, 0, 0, 0, 0, 1, 2]), which=INDEX)
    def reset(self, kind: int, which: int) -> None:
        """All KV is dropped: vLLM's as well, or that in tiers only. Then somebody comes back before transfers end."""
        if kind:
            self._begin_transfers(which)
            self.world.reset(clears_pool=kind == 1)
            self.ask(which, LONGEST, "", "", 0, None, "", {})
            self.finish(len(self.world.asked) - 1, 0, False)
            self.world.crowd(99 * (which % 2))

    @rule(kind=st.sampled_from([0, 0, 0, 0, 1, 2, 3]), which=INDEX)
    def halt(self, kind: int, which: int) -> None:
        """Transfers are ended; then vLLM's KV is dropped, or nothing is."""
        if not kind:
            return
        self._begin_transfers(which)
        self.world.halt()
        if kind == 1:
            return
        self.world.step()
        self._all_work()
        if kind == 2:
            self._forget_resident()
        self.world.go_on()

    def _own(self, session: Session) -> int:
        """Return the depth to which a session can be loaded by its own points. Others may leave theirs."""
        points, saved = self.manager.points, self.manager.blocks.saved_prefix(session.rows)
        if not points.is_needed:
            return saved
        return max(
            (point.depth for point in session.points if point.depth <= saved and points.stands(point)), default=0
        )

    def _forget_resident(self) -> None:
        assert not self.driver.is_moving
        sessions = [s for s in self.manager.table.by_id.values() if not s.requests]
        hashes = [self.manager.blocks.hashes(session.rows) for session in sessions]
        before = [min(self.world.offered(names), self._own(one)) for one, names in zip(sessions, hashes, strict=True)]
        self.world.forget_resident()
        for session, offered, left in zip(sessions, before, map(self.world.offered, hashes), strict=True):
            assert left >= offered, "saved blocks are lost with resident ones"
            assert not len(session.rows) or session.is_cold or session.stays_out, "a session has lost unsaved blocks"

    @precondition(lambda self: self.driver.rests)
    @rule()
    def resume(self) -> None:
        """Transfers may begin again."""
        self.world.go_on()

    # -- what holds -----------------------------------------------------------------------------------

    @invariant()
    def all_is_right(self) -> None:
        """Pool, tiers and books agree."""
        Sessions.steps += 1
        self.world.check()
        check_integrity(self.manager, self.driver)

    @invariant()
    def first_tokens_are_exact(self) -> None:
        """Blocks keep as many exact tokens as is configured, or all."""
        blocks, setup = self.manager.blocks, self.setup
        for row in blocks.rows().tolist():
            if not blocks.nbytes[row] or blocks.group[row] in setup.states:
                continue
            kept = int(blocks.exact[row])
            sink = min(max(setup.sink_tokens - TOKENS * int(blocks.depth[row]), 0), TOKENS)
            assert kept in (sink, TOKENS), f"a block keeps {kept} tokens exact, not {sink}"

    def teardown(self) -> None:
        """When all is answered, nothing is left to do. When all is forgotten, nothing is left."""
        if sys.exc_info()[0] is None:
            self.settle()
            self.forget_all()

    def settle(self) -> None:
        """End all requests and transfers, and save what may be saved."""
        world = self.world
        world.go_on()
        for _ in range(20):
            world.step()
            self._all_work()
            for asked in list(world.asked):
                world.finish(asked, 0)
        for _ in range(5):  # what failed before is tried again
            world.now += 2**DOUBLINGS * IDLE_AFTER_S
            for _ in range(10):
                world.step()
                self._all_work()
        self.all_is_right()
        assert not self.driver.is_moving
        assert not any(map(self.world.pool.users, range(self.world.pool.size))), "blocks are referenced for nothing"
        assert not any(world.pool.busy)
        assert not self.manager.saving, "sessions are being saved for ever"
        for session in self.manager.table.by_id.values():
            if session.is_cold:
                self.is_offered(session)
        for tier in world.rams:
            check_store(tier)

    def is_offered(self, session: Any) -> None:
        """A cold session can be loaded to its end, and where resume points are needed, nowhere but to one."""
        hashes = self.manager.blocks.hashes(session.rows)
        offered = [self.world.offered(hashes[:length]) for length in range(len(hashes) + 1)]
        assert offered[-1] == len(hashes), f"{session.session_id} is not offered whole"
        points = {p.row for s in self.manager.table.by_id.values() for p in s.points}
        ends = [at + 1 for at, row in enumerate(session.rows.tolist()) if row in points]
        for length, end in enumerate(offered):
            last = max((one for one in ends if one <= length), default=0) if self.setup.needs_points else length
            assert end == last, f"{end} blocks of {length} are offered, and the last resume point is at {last}"

    def forget_all(self) -> None:
        """Forget all sessions."""
        world = self.world
        for asked in list(world.asked):
            world.finish(asked, 0)
        world.step()
        self._all_work()
        for session in list(self.manager.table.by_id.values()):
            if session.session_id in self.manager.table.by_id:
                assert not self.driver.steer("release", session, world.now)
        world.step()
        self._all_work()
        world.step()
        assert not self.manager.table.by_id
        assert {state for state, count in self.manager.table.states.items() if count} == set[SessionState]()
        check_empty(self.manager)
        assert not any(world.stored)
        assert not any(tier.used for tier in world.rams)


PROFILE = settings(
    max_examples=22,
    stateful_step_count=60,
    deadline=None,
    report_multiple_bugs=False,
    phases=[Phase.generate],  # to shrink takes minutes; see fuzz.py
    suppress_health_check=list(HealthCheck),
    database=None,
)
"""Of a round: about 1,340 steps."""

CONFIGURATIONS: dict[str, type[Sessions]] = {"Sessions": Sessions}


def configuration(setup: Setup, name: str) -> type[Sessions]:
    """Return a machine with another setup."""
    made = type(name, (Sessions,), {"setup": setup, "__doc__": f"Chats of {setup}."})
    CONFIGURATIONS[name] = made
    return made


Two = configuration(Setup(ranks=2, front_blocks=3), "Two")
Exact = configuration(Setup(policy="returns", sink_tokens=SINK_TOKENS, cold_blocks=16), "Exact")
Exclusive = configuration(Setup(is_exclusive=True, cold_blocks=10), "Exclusive")
Points = configuration(
    Setup(windows={0: None, 1: 2, 2: 1}, states=frozenset([2]), pool_blocks=48, cold_blocks=28), "Points"
)
Dense = configuration(Setup(windows={0: None, 1: 99}, pool_blocks=48, cold_blocks=36), "Dense")
"""Another group with full attention: its window is longer than any session."""
Alone = configuration(
    Setup(windows={0: 2, 1: 1}, states=frozenset([1]), lossless=frozenset([1]), pool_blocks=32, cold_blocks=16), "Alone"
)
Refined = configuration(Setup(levels=5, ranks=2, front_blocks=3, sink_tokens=SINK_TOKENS), "Refined")
RefinedPoints = configuration(
    Setup(
        levels=5,
        policy="returns",
        windows={0: None, 1: 2, 2: 1},
        states=frozenset([2]),
        lossless=frozenset([2]),
        pool_blocks=48,
        cold_blocks=20,
        is_exclusive=True,
    ),
    "RefinedPoints",
)
Everything = configuration(
    Setup(
        ranks=2,
        policy="returns",
        sink_tokens=SINK_TOKENS,
        windows={0: None, 1: 1, 2: 1},
        states=frozenset([2]),
        lossless=frozenset([2]),
        pool_blocks=48,
        cold_blocks=36,
        front_blocks=6,
        is_exclusive=True,
    ),
    "Everything",
)
