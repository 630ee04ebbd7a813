"""A state machine: random requests, evictions, failures, restores and resets, and what must always hold."""

import operator
from collections.abc import Mapping
from typing import ClassVar

import hypothesis.strategies as st
from examples import examples
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from integrity import check_integrity, check_store
from world import BESIDE_BOUNDS, IDLE_AFTER_S, SINK_TOKENS, World

from manthan.manager.sessions.evictions import DOUBLINGS
from manthan.manager.sessions.session import BlockName, CodeState, SessionState

POOL_BLOCKS = 12
COLD_BLOCKS = 6

LETTERS = st.text("ab", max_size=4)
INDEX = st.integers(0, 1000)
MOSTLY = st.sampled_from([True, True, True, True, False])
HINTS: list[dict[str, object]] = [
    {},
    {},
    {},
    {"pin": True},
    {"pin": False},
    {"release": True},
    {"ttl_s": 5},
    {"priority": -1},
    {"priority": 1},
    {"expect_return_s": 5},
    {"tool": "search"},
    {"prefetch": ["A"]},
    {"quality": "exact"},
    {"quality": "exact"},
]


class Sessions(RuleBasedStateMachine):
    """Chats over a pool and a store that are both too small for them."""

    ranks = 1
    policy = "lru"
    exact = False
    cold_blocks = COLD_BLOCKS
    beside: ClassVar[Mapping[int, int]] = {}

    def __init__(self) -> None:
        super().__init__()
        size = self.ranks, POOL_BLOCKS, self.cold_blocks
        self.world = World(*size, self.policy, 3, self.exact, self.beside)
        self.manager = self.world.manager
        self.manager.blocks.changed = {}
        self.told: set[BlockName] = set()
        """Blocks with codes, as far as news say."""
        self.noted: set[BlockName] = set()
        """Blocks of which news do not say that they are forgotten."""
        self.happened = 0
        self.texts = ["S"]  # of earlier conversations; the first is a system prompt

    # -- what happens -----------------------------------------------------------------------------------

    @rule(
        base=INDEX,
        keep=st.integers(0, 8),
        more=LETTERS,
        answer=LETTERS,
        name=st.sampled_from([None, None, "A", "B"]),
        tenant=st.sampled_from(["", "", "small"]),
        hints=st.sampled_from(HINTS),
    )
    def ask(
        self, base: int, keep: int, more: str, answer: str, name: str | None, tenant: str, hints: dict[str, object]
    ) -> None:
        """A new chat, a continuation, a fork or the same question again, by how much of an earlier one is kept."""
        prompt = (self.texts[base % len(self.texts)][:keep] + more)[: POOL_BLOCKS - 2] or "S"
        text = (prompt + answer)[: POOL_BLOCKS - 1]
        self.world.start(text, len(prompt), name, tenant, **hints)
        self.world.admit(self.world.requests[-1])
        self.texts.append(text)

    @precondition(lambda self: self.world.requests)
    @rule(which=INDEX)
    def admit(self, which: int) -> None:
        request = self.world.requests[which % len(self.world.requests)]
        if request.waiting:
            self.world.admit(request)

    @precondition(lambda self: self.world.requests)
    @rule(which=INDEX, missing=st.sampled_from([0, 0, 0, 1, 3, 99]), limit=st.sampled_from([99, 99, 2, 1, 0]))
    def finish(self, which: int, missing: int, limit: int) -> None:
        request = self.world.requests[which % len(self.world.requests)]
        self.world.finish(request, max(0, len(request.keys) - missing), limit)

    @precondition(lambda self: self.world.requests)
    @rule(which=INDEX)
    def preempt(self, which: int) -> None:
        request = self.world.requests[which % len(self.world.requests)]
        if request.restore is None:
            self.world.preempt(request)

    @rule(relieve=st.sampled_from([0, 0, 0, 1, 3, 99]), limit=st.sampled_from([0, 1, 2, 5, 99]))
    def step(self, relieve: int, limit: int) -> None:
        self.world.step(relieve, limit)

    @precondition(lambda self: self.world.spills)
    @rule(which=INDEX, rank=INDEX, ok=MOSTLY)
    def answer_spill(self, which: int, rank: int, ok: bool) -> None:
        spill = self.world.spills[which % len(self.world.spills)]
        ranks = sorted(spill.waiting)
        self.world.answer(spill, ranks[rank % len(ranks)], ok)

    @precondition(lambda self: self.world.spills)
    @rule()
    def answer_all_spills(self) -> None:
        for spill in list(self.world.spills):
            for rank in sorted(spill.waiting):
                self.world.answer(spill, rank, True)

    @precondition(lambda self: self.world.restores)
    @rule(
        which=INDEX,
        unreadable=st.sets(st.integers(0, 8), max_size=2),
    )
    def end_restore(self, which: int, unreadable: set[int]) -> None:
        self.world.end_restore(self.world.restores[which % len(self.world.restores)], unreadable)

    @rule(base=INDEX, more=LETTERS, answer=LETTERS, unreadable=st.sampled_from([(), (), (), (0,), (4,), (8,), (-1,)]))
    def converse(self, base: int, more: str, answer: str, unreadable: tuple[int, ...]) -> None:
        """A conversation goes on, from its question to the end of its answer; what is restored may be unreadable."""
        self.ask(base, POOL_BLOCKS, more, answer, None, "", {})
        request = self.world.requests[-1]
        for bad in (set(unreadable), set()):
            if request.restore is not None:
                self.world.end_restore(request.restore, bad)
            if request.waiting:
                self.world.admit(request)
        if request.restore is None:
            self.world.finish(request, len(request.keys))

    @precondition(lambda self: self.manager.table.by_id)
    @rule(
        which=INDEX,
        what=st.sampled_from(["evict", "evict", "prefetch", "expect", "pin", "pin for a while", "unpin", "release"]),
    )
    def steer(self, which: int, what: str) -> None:
        """An operator asks something of a session, in whatever state it is."""
        sessions = list(self.manager.table.by_id.values())
        session, now = sessions[which % len(sessions)], self.world.now
        before = session.state
        if what.startswith("pin"):
            refused = self.manager.steer("pin", session, now, None if what == "pin" else 5.0)
            assert session.pinned is not bool(refused)
        elif what == "expect":
            refused = self.manager.steer(what, session, now, tool="search")
            assert bool(refused) == (before is SessionState.HOT)
        else:
            refused = self.manager.steer(what, session, now)
        if what == "evict":
            assert bool(refused) == (before is SessionState.HOT)
            assert refused or session.state in (SessionState.EVICTING, SessionState.COLD) or not session.chain
        if what == "release" and not refused:
            assert session.session_id not in self.manager.table.by_id
        self.manager.take_news()

    @rule()
    def sleep(self) -> None:
        """All that is idle goes cold."""
        self.world.now += IDLE_AFTER_S
        self.step(0, 99)
        self.answer_all_spills()

    @rule(seconds=st.sampled_from([1.0, IDLE_AFTER_S]))
    def wait(self, seconds: float) -> None:
        self.world.now += seconds

    @rule(sure=st.sampled_from([False, False, False, True]))
    def reset(self, sure: bool) -> None:
        if sure:
            self.world.reset()

    @precondition(lambda self: not (self.world.spills or self.world.held or self.world.restores))
    @rule(sure=st.sampled_from([False, True]))
    def lose_what_is_hot(self, sure: bool) -> None:
        if sure:
            chains = [[block.key for block in session.chain] for session in self.manager.table.by_id.values()]
            offered = [self.manager.match(keys) for keys in chains]
            self.world.forget_hot()
            left = [self.manager.match(keys) for keys in chains]
            assert all(map(operator.ge, left, offered))  # what was being replaced is as it was
            states = {session.state for session in self.manager.table.by_id.values() if not session.requests}
            assert SessionState.IDLE not in states

    # -- what holds -------------------------------------------------------------------------------------

    @invariant()
    def marks_say_what_is_lossy(self) -> None:
        for pool in (self.world.pool, self.world.beside_pool):
            for block in pool.cached.values():
                assert bool(pool.marks[block]) == (block in pool.lossy)

    @invariant()
    def stores_keep_their_budget(self) -> None:
        for store in self.world.stores:
            assert store.peak <= store.max_bytes
            check_store(store)
        assert sum(store.used for store in self.world.stores) <= self.manager.budget.nbytes

    @invariant()
    def books_agree_with_themselves(self) -> None:
        check_integrity(self.manager)

    @invariant()
    def stores_hold_what_the_manager_says(self) -> None:
        """All that is cold, from this epoch, on all ranks; and nothing that nobody will remove."""
        blocks = self.manager.blocks
        assert all(self.world.stored_everywhere(b.key, b.group or 0) for b in blocks if b.code is CodeState.COLD)
        doomed = {(drop.group, key) for drop in self.manager._orders.drops for key in drop.keys}
        stored = (CodeState.COLD, CodeState.SPILLING)
        known = {(b.group or 0, b.key) for b in blocks if b.code in stored or b.old is not None}
        for store in self.world.stores:
            if not self.world.clear:
                assert set(store._blocks) - doomed <= known
        if not (self.world.clear or self.world.spills or doomed):
            assert self.world.stored_nbytes == blocks.cold_nbytes

    @invariant()
    def news_are_of_what_is_stored(self) -> None:
        """Now and then: what happens between two looks comes together."""
        self.happened += 1
        if self.happened % 3 == 0:
            self.hear_news()

    def hear_news(self) -> None:
        blocks = self.manager.blocks
        changed, blocks.changed = blocks.changed or {}, {}
        for group, key in changed:
            block, name = blocks.get(key, group), key if group is None else (group, key)
            (self.told.add if block is not None and block.has_codes else self.told.discard)(name)
            if block is None:
                self.noted.discard(name)
        names = {block.name for block in blocks}
        assert self.told == {block.name for block in blocks if block.has_codes}
        assert self.noted <= names
        self.noted |= names

    @invariant()
    def first_tokens_are_exact(self) -> None:
        for block in self.manager.blocks:
            kept = block.encoding.exact
            sink = min(max(SINK_TOKENS - 16 * block.depth, 0), 16)
            assert kept in ((0, sink, 16) if self.exact else (0, 16))
            has_sink = block.group is None or len(BESIDE_BOUNDS[block.group]) > 1
            assert kept >= sink or not (self.exact and block.reserves and has_sink)

    @invariant()
    def nothing_beside_is_without_an_anchor(self) -> None:
        anchors = {anchor for s in self.manager.table.by_id.values() for anchor in s.anchors}
        parts = {part for anchor in anchors for part in anchor.parts}
        for block in self.manager.blocks:
            if block.group is not None and block not in parts:
                assert block.pins or block.code is CodeState.SPILLING

    def teardown(self) -> None:
        """When all is answered and nobody asks for more, everything is cold and nothing is left to do."""
        while self.world.restores:
            self.world.end_restore(self.world.restores[0], set())
        while self.world.requests:
            self.world.finish(self.world.requests[0], 99)
        for _ in range(5):  # what failed before the end is tried again
            self.world.now += 2**DOUBLINGS * IDLE_AFTER_S
            self.step(0, 99)
            self.answer_all_spills()
        self.step(0, 99)
        assert not self.manager.has_work
        assert {s.state for s in self.manager.table.by_id.values()} <= {SessionState.COLD}
        assert all(block.code is CodeState.COLD and block.users for block in self.manager.blocks)
        assert self.world.stored_nbytes == self.manager.blocks.reserved
        assert not +self.world.pool.refs
        assert not +self.world.beside_pool.refs
        self.every_chain_is_offered()
        self.hear_news()
        self.world.reset()
        self.step(0, 99)
        assert self.manager.blocks.reserved == len(self.manager.blocks) == len(self.manager._anchors) == 0
        assert not any(store.used for store in self.world.stores)
        self.hear_news()
        assert not self.told

    def every_chain_is_offered(self) -> None:
        """What is cold can be restored to its end, and with other groups no further than there is an anchor."""
        for session in self.manager.table.by_id.values():
            keys = [block.key for block in session.chain]
            assert self.manager.match(keys) == len(keys)
            if self.beside:
                ends = {
                    anchor.depth
                    for other in self.manager.table.by_id.values()
                    for anchor in other.anchors
                    if anchor.key in keys
                }
                for length in range(len(keys)):
                    assert self.manager.match(keys[:length]) == max((end for end in ends if end <= length), default=0)


PROFILE = settings(
    max_examples=examples(150),
    stateful_step_count=60,
    derandomize=True,
    deadline=None,
    report_multiple_bugs=False,
    phases=[Phase.generate, Phase.shrink],  # explanations take minutes
    suppress_health_check=list(HealthCheck),
)
