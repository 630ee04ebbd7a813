"""A state machine: random requests, evictions, failures, restores and resets, and what must always hold."""

from collections import Counter

import hypothesis.strategies as st
from examples import examples
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from world import EXACT_PARTS, IDLE_AFTER_S, SINK_TOKENS, WINDOW_TOKENS, World, part_keys

from manthan.manager.sessions.session import Block, CodeState, Session, SessionState

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
    {"prefetch": ["A"]},
]


class Sessions(RuleBasedStateMachine):
    """Chats over a pool and a store that are both too small for them."""

    ranks = 1
    policy = "lru"
    copies = False
    cold_blocks = COLD_BLOCKS

    def __init__(self) -> None:
        super().__init__()
        self.world = World(self.ranks, POOL_BLOCKS, self.cold_blocks, self.policy, fast_blocks=3, copies=self.copies)
        self.manager = self.world.manager
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
    @rule(which=INDEX, missing=st.sampled_from([0, 0, 0, 1, 3, 99]))
    def finish(self, which: int, missing: int) -> None:
        request = self.world.requests[which % len(self.world.requests)]
        self.world.finish(request, max(0, len(request.keys) - missing))

    @rule(relieve=st.sampled_from([0, 0, 0, 1, 3, 99]), limit=st.sampled_from([0, 1, 2, 5, 99]))
    def step(self, relieve: int, limit: int) -> None:
        self.world.step(relieve, limit)

    @precondition(lambda self: self.world.spills)
    @rule(which=INDEX, rank=INDEX, ok=st.sampled_from([True, True, True, True, False]), copied=MOSTLY)
    def answer_spill(self, which: int, rank: int, ok: bool, copied: bool) -> None:
        spill = self.world.spills[which % len(self.world.spills)]
        ranks = sorted(spill.waiting)
        self.world.answer(spill, ranks[rank % len(ranks)], ok, copied)

    @precondition(lambda self: self.world.spills)
    @rule()
    def answer_all_spills(self) -> None:
        for spill in list(self.world.spills):
            for rank in sorted(spill.waiting):
                self.world.answer(spill, rank, True)

    @precondition(lambda self: self.world.restores)
    @rule(
        which=INDEX,
        unreadable=st.sets(st.integers(0, 5), max_size=2),
        spoiled=st.sets(st.integers(0, 5), max_size=1),
    )
    def end_restore(self, which: int, unreadable: set[int], spoiled: set[int]) -> None:
        self.world.end_restore(self.world.restores[which % len(self.world.restores)], unreadable, spoiled)

    @rule(seconds=st.sampled_from([1.0, IDLE_AFTER_S]))
    def wait(self, seconds: float) -> None:
        self.world.now += seconds

    @rule(sure=st.sampled_from([False, False, False, True]))
    def reset(self, sure: bool) -> None:
        if sure:
            self.world.reset()

    # -- what holds -------------------------------------------------------------------------------------

    @invariant()
    def stores_keep_their_budget(self) -> None:
        for store in self.world.stores:
            assert store.peak <= store.max_bytes
        assert self.manager.blocks.reserved <= self.manager.capacity_blocks

    @invariant()
    def stores_hold_what_the_manager_says(self) -> None:
        """All that is cold, from this epoch, on all ranks; and nothing that nobody will remove."""
        blocks = self.manager.blocks
        assert all(self.world.stored_everywhere(b.key) for b in blocks if b.code is CodeState.COLD)
        assert all(self.world.copied_everywhere(b.key) for b in blocks if b.exact and b.code is CodeState.COLD)
        doomed = {key for drop in self.manager._drops for key in drop.keys}
        doomed |= {part for key in (*doomed, *self.manager.copies._drops) for part in part_keys(key)}
        there = [b for b in blocks if b.code in (CodeState.COLD, CodeState.SPILLING)]
        known = {b.key for b in there} | {part for b in there if b.exact for part in part_keys(b.key)}
        for store in self.world.stores:
            kept = [key for key in store._blocks if key not in doomed]
            if not self.world.clear:
                assert set(kept) <= known
                assert len(kept) <= blocks.reserved

    @invariant()
    def shares_are_kept(self) -> None:
        manager = self.manager
        assert manager.blocks.reserved_of["small"] <= manager.shares.of_tenant("small") * manager.capacity_blocks
        pinned = [s for s in manager.table.by_id.values() if s.pinned]
        assert sum(len(session.chain) for session in pinned) <= manager.shares.pinned * manager.capacity_blocks
        assert set(manager.pinned) == {session.session_id for session in pinned}

    @invariant()
    def counts_agree_with_a_scan(self) -> None:
        table, blocks = self.manager.table, list(self.manager.blocks)
        code = Counter(block.code for block in blocks)
        assert self.manager.blocks.hot == sum(block.hot > 0 for block in blocks)
        assert self.manager.blocks.exposed == sum(block.exposed for block in blocks)
        assert self.manager.blocks.queued == code[CodeState.QUEUED]
        assert self.manager.blocks.spilling == code[CodeState.SPILLING] == len(self.world.spills)
        assert self.manager.blocks.cold == code[CodeState.COLD]
        room = {block: 1 + EXACT_PARTS * block.exact for block in blocks}
        assert self.manager.blocks.moved == sum(room[block] for block in blocks if block.moved)
        assert self.manager.blocks.reserved == sum(room[block] for block in blocks if block.reserves)
        assert self.manager.blocks.stored == sum(
            room[block] for block in blocks if block.code in (CodeState.SPILLING, CodeState.COLD)
        )
        assert self.manager.blocks.copied == sum(block.exact for block in blocks if block.code is CodeState.COLD)
        assert set(self.manager.blocks.copies) == {block.key for block in blocks if block.exact}
        assert all(block.code is CodeState.COLD for block in blocks if block.moved)
        tenants: Counter[str] = Counter()
        for block in blocks:
            tenants[block.tenant] += room[block] * block.reserves
        assert +self.manager.blocks.reserved_of == +tenants
        assert +table.states == Counter(session.state for session in table.by_id.values())

    @invariant()
    def blocks_agree_with_their_sessions(self) -> None:
        users: dict[bytes, list[Session]] = {}
        for session in self.manager.table.by_id.values():
            for depth, block in enumerate(session.chain):
                assert self.manager.blocks.get(block.key) is block
                assert block.depth == depth
                users.setdefault(block.key, []).append(session)
        pins = Counter(block.key for blocks in self.manager._restoring.values() for block in blocks)
        for block in self.manager.blocks:
            states = [session.state for session in users.get(block.key, [])]
            assert block.users == len(states)
            assert block.running == states.count(SessionState.HOT)
            assert block.hot == block.running + states.count(SessionState.IDLE)
            assert block.pins == pins[block.key]
            assert block.code is CodeState.COLD or not block.pins
            self.nothing_leaks(block)

    @invariant()
    def copies_are_of_first_and_last_tokens(self) -> None:
        windows: Counter[bytes] = Counter()
        for session in self.manager.table.by_id.values():
            assert len(session.window) * 16 < WINDOW_TOKENS + 16
            windows.update(session.chain[depth].key for depth in session.window)
        for block in self.manager.blocks:
            assert block.windows == windows[block.key]
            wanted = block.windows or block.depth * 16 < SINK_TOKENS
            in_use = block.pins or block.code is CodeState.SPILLING
            assert not block.exact or (self.copies and block.reserves and (wanted or in_use))

    def nothing_leaks(self, block: Block) -> None:
        assert block.users or block.pins or block.code is CodeState.SPILLING, "a record that nobody needs"
        assert (block.code is CodeState.QUEUED) == (block.key in self.manager._queue)
        assert block.waiters or block.code is not CodeState.QUEUED
        assert block.in_flight or not block.waiters
        assert all(s.state is SessionState.EVICTING and s.chain[block.depth] is block for s in block.waiters)

    @invariant()
    def sessions_agree_with_their_state(self) -> None:
        table = self.manager.table
        for session in table.by_id.values():
            assert (session.state is SessionState.HOT) == bool(session.requests)
            assert session.chain or session.requests
            waits = [block for block in session.chain if session in block.waiters]
            assert session.pending == len(waits)
            assert (session.state is SessionState.EVICTING) == bool(waits)
            if session.state is SessionState.COLD:
                assert not any(block.gone for block in session.chain), "a tail is kept without its head"
        assert set(self.manager._running.values()) == {s for s in table.by_id.values() if s.requests}

        assert set(self.manager._restored) <= set(self.manager._running)

    @invariant()
    def idle_sessions_are_in_order(self) -> None:
        table = self.manager.table
        since = [session.idle_since for session in table.idle.values()]
        assert since == sorted(since)
        idle = {s.session_id for s in table.by_id.values() if s.state is SessionState.IDLE}
        assert set(table.idle) == idle == {session.session_id for session in table.hot_victims()}
        cold = [s for s in table.by_id.values() if s.state in (SessionState.COLD, SessionState.EVICTING)]
        assert set(table.cold_victims()) >= {session for session in cold if not session.pinned}
        others = [when for when in (self.manager._ttls.first, self.manager._expected.first) if when is not None]
        assert self.manager.next_deadline == min([*others, *(when + IDLE_AFTER_S for when in since[:1])], default=None)

    def teardown(self) -> None:
        """When all is answered and nobody asks for more, everything is cold and nothing is left to do."""
        while self.world.restores:
            self.world.end_restore(self.world.restores[0], set())
        while self.world.requests:
            self.world.finish(self.world.requests[0], 99)
        self.world.now += 2 * IDLE_AFTER_S
        for _ in range(3):
            self.step(0, 99)
            self.answer_all_spills()
            self.world.now += 2 * IDLE_AFTER_S  # what failed before the end is tried again
        self.step(0, 99)
        self.manager.take_changes()
        self.manager.take_departed()
        assert not self.manager.has_work
        assert {s.state for s in self.manager.table.by_id.values()} <= {SessionState.COLD}
        assert all(block.code is CodeState.COLD and block.users for block in self.manager.blocks)
        assert {len(store._blocks) for store in self.world.stores} == {self.manager.blocks.reserved}


PROFILE = settings(
    max_examples=examples(150),
    stateful_step_count=60,
    derandomize=True,
    deadline=None,
    report_multiple_bugs=False,
    phases=[Phase.generate, Phase.shrink],  # explanations take minutes
    suppress_health_check=list(HealthCheck),
)
