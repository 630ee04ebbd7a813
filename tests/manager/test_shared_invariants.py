"""What must always hold where engines share a store: blocks are found, lost and expire at any moment."""

import hypothesis.strategies as st
from hypothesis.stateful import precondition, rule
from machine import INDEX, PROFILE, Sessions
from world import BESIDE, encoded

from manthan.manager.sessions.session import Block, CodeState, FoundAnchor, Stranger
from manthan.manager.stores.arena import room


class SharedSessions(Sessions):
    """Another engine stores what this one's requests ask for, sessions come to their end, and the store is emptied."""

    shared = True

    @precondition(lambda self: any(request.waiting for request in self.world.requests))
    @rule(which=INDEX, more=st.integers(1, 4))
    def find(self, which: int, more: int) -> None:
        self.world.drop()
        waiting = [request for request in self.world.requests if request.waiting]
        request = waiting[which % len(waiting)]
        prompt = request.keys[: request.prompt]
        first = self.manager.elsewhere.known(prompt)
        anchor_nbytes = sum(self.world.shape.beside[group][0] for group, *_ in self.world.needed(prompt))
        free = self.manager.budget.free - anchor_nbytes
        most = min(more, free // self.world.shape.cold_nbytes)
        keys = prompt[first : first + most] if most > 0 else []
        parts = list(self.world.needed(prompt[: first + len(keys)])) if keys else []
        names = list(dict.fromkeys([*((0, key) for key in keys), *(part[:2] for part in parts)]))
        if any((b := self.block(*name)) is not None and b.in_flight for name in names):
            return  # these are being stored already
        sizes = {}
        for group, key in names:
            bufs = [encoded(self.world.content(key, group), rank, 0, group) for rank in range(self.ranks)]
            for store, buf in zip(self.world.stores, bufs, strict=True):
                assert store.put_all(group, {key: buf}) == {}
            sizes[group, key] = self.world.weigh([room(buf.nbytes) for buf in bufs])
        self.world.unreadable.difference_update(keys)
        anchor = FoundAnchor(first + len(keys), parts, [sizes[part[:2]] for part in parts]) if parts else None
        in_chain = [sizes[0, key] for key in keys]
        self.manager.elsewhere.found(request.request_id, prompt[: first + len(keys)], in_chain, anchor)
        for group, key in sizes:
            if (b := self.block(group, key)) is None or b.code is not CodeState.COLD:
                self.drop(group, key)

    def block(self, group: int, key: bytes) -> Block | None:
        return self.manager.blocks.get(key, group or None)

    def drop(self, group: int, key: bytes) -> None:
        for store in self.world.stores:
            store.drop(group, [key])

    @precondition(lambda self: self.manager.blocks.cold)
    @rule(which=INDEX)
    def lose(self, which: int) -> None:
        cold = [block for block in self.manager.blocks if block.code is CodeState.COLD]
        lost = cold[which % len(cold)]
        if lost.group is None:
            self.world.unreadable.add(lost.key)
            self.manager.elsewhere.not_stored([lost.key])
        else:
            self.manager.elsewhere.not_stored([], [(lost.group, lost.key)])

    @precondition(lambda self: self.manager.table.by_id)
    @rule(which=INDEX)
    def expire(self, which: int) -> None:
        ids = list(self.manager.table.by_id)
        chain = self.manager.table.by_id[ids[which % len(ids)]].chain
        self.world.unreadable.update(block.key for block in chain if block.droppable)
        self.manager.elsewhere.expire([ids[which % len(ids)], "unknown"])

    @rule(sure=st.sampled_from([False, False, False, True]))
    def empty(self, sure: bool) -> None:
        if sure:
            gone = [block for block in self.manager.blocks if block.droppable]
            self.world.unreadable.update(block.key for block in gone if block.group is None)
            for block in gone:
                self.drop(block.group or 0, block.key)
            self.manager.elsewhere.emptied()

    @rule(more=st.integers(0, 9), ages=st.lists(st.floats(0, 100), max_size=3))
    def count(self, more: int, ages: list[float]) -> None:
        """Others' sessions take room, some of what is free."""
        strangers = [Stranger(f"x{n}", 0.0, 1024, age) for n, age in enumerate(ages)]
        free = self.manager.budget.total - self.manager.blocks.reserved
        self.manager.elsewhere.counted(self.manager.blocks.stored + min(1024 * more, free), strangers)

    @rule()
    def tell(self) -> None:
        changes = self.manager.elsewhere.take_changes()
        assert len(changes) == len({session_id for session_id, _ in changes})
        assert all(session is self.manager.table.by_id.get(session_id) for session_id, session in changes)
        self.manager.elsewhere.take_departed()


class SharedSessionsWithExactTokens(SharedSessions):
    exact = True
    cold_blocks = 12


class SharedSessionsWithAnchors(SharedSessions):
    beside = BESIDE
    cold_blocks = 16


class SharedSessionsOnTwoRanks(SharedSessions):
    ranks = 2


TestOneRank = SharedSessions.TestCase
TestOneRank.settings = PROFILE
TestExactTokens = SharedSessionsWithExactTokens.TestCase
TestExactTokens.settings = PROFILE
TestAnchors = SharedSessionsWithAnchors.TestCase
TestAnchors.settings = PROFILE
TestTwoRanks = SharedSessionsOnTwoRanks.TestCase
TestTwoRanks.settings = PROFILE
