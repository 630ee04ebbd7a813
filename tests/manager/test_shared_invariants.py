"""What must always hold where engines share a store: blocks are found, lost and expire at any moment."""

import hypothesis.strategies as st
from hypothesis.stateful import precondition, rule
from machine import INDEX, PROFILE, Sessions
from world import encoded

from manthan.manager.sessions.session import CodeState, Stranger


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
        most = min(more, self.manager.budget.free // self.world.shape.cold_nbytes)
        keys = prompt[first : first + most]
        if any(b is not None and b.in_flight for b in map(self.manager.blocks.get, keys)):
            return  # these are being stored already
        sizes = dict.fromkeys(keys, 0)
        for rank, store in enumerate(self.world.stores):
            for key in keys:
                buf = encoded(self.world.content(key), rank, 0)
                assert store.put_all(0, {key: buf}) == {}
                sizes[key] += store.room(buf.nbytes)
        self.world.unreadable.difference_update(keys)
        self.manager.elsewhere.found(request.request_id, prompt[: first + len(keys)], list(sizes.values()))
        known = [key for key in keys if (b := self.manager.blocks.get(key)) and b.code is CodeState.COLD]
        for store in self.world.stores:
            store.drop(0, [key for key in keys if key not in known])

    @precondition(lambda self: self.manager.blocks.cold)
    @rule(which=INDEX)
    def lose(self, which: int) -> None:
        cold = [block for block in self.manager.blocks if block.code is CodeState.COLD]
        key = cold[which % len(cold)].key
        self.world.unreadable.add(key)
        self.manager.elsewhere.not_stored([key])

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
            gone = [block.key for block in self.manager.blocks if block.droppable]
            self.world.unreadable.update(gone)
            for store in self.world.stores:
                store.drop(0, gone)
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


class SharedSessionsOnTwoRanks(SharedSessions):
    ranks = 2


TestOneRank = SharedSessions.TestCase
TestOneRank.settings = PROFILE
TestExactTokens = SharedSessionsWithExactTokens.TestCase
TestExactTokens.settings = PROFILE
TestTwoRanks = SharedSessionsOnTwoRanks.TestCase
TestTwoRanks.settings = PROFILE
