"""Processes that are killed, and their sessions, which the next one takes over as cold ones."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from examples import examples
from integrity import check_integrity
from talks import GROUP, SHAPE, Talks, names

from manthan.manager.events import BlocksDropped, BlocksSaved, DropCause
from manthan.manager.pool import BlockName
from manthan.manager.session.blocks import NO_GROUP, FrontTier, GroupShape, MemoryShape
from manthan.manager.session.persist import FACTS, HISTORY, TIMES, JournalLink
from manthan.manager.session.table import Session, SessionState, Shares, digest_of
from manthan.manager.tiers.journal import Journal, JournalBlock, JournalPoint, JournalSession, SavedBlocks
from manthan.manager.transfer import on_each

WINDOW, STATE = 1, 2
OTHERS = {WINDOW: 2, STATE: 1}
"""Number of last blocks that a request needs of each other group."""
POINTED = MemoryShape({0: GROUP, WINDOW: GROUP, STATE: GroupShape(16, 500, {0: 150})})
FRONTS = [FrontTier(300, True), FrontTier(600, True)]
HINTS: list[dict[str, object]] = [
    *({}, {}, {}, {"pin": True}, {"pin": False}, {"release": True}, {"ttl_s": 5}, {"priority": -1}, {"priority": 1}),
    *({"expect_return_s": 5}, {"quality": "exact"}, {"store": False}, {"store": True}),
]


def note_of(name: BlockName) -> bytes:
    return b"%d of " % name[0] + name[1]


class Notes(dict[BlockName, bytes]):
    """Every block has a note; those that are put in here come from the journal."""

    def packed(self, names: Iterable[BlockName]) -> list[bytes]:
        return list(map(note_of, names))


class PatientJournal(Journal):
    """Writes the last records when it gets more, in the caller's thread. So a kill always loses the same."""

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


class Lives:
    """Chats over tiers that are too small for them. Now and then another process takes over.

    others: by other KV cache group, the number of last blocks that a request needs of it.
    """

    def __init__(
        self,
        folder: Path,
        rng: Random,
        shape: MemoryShape = SHAPE,
        others: Mapping[int, int] = {},
        capacity: int = 12,
        ranks: int = 1,
        sink_tokens: int = 0,
    ) -> None:
        self.folder, self.rng, self.shape, self.others, self.ranks = folder, rng, shape, others, ranks
        self.capacity, self.sink_tokens = capacity, sink_tokens
        self.texts = ["s"]
        self.came = 0
        self.begin({}, 0.0)

    def begin(self, tier: dict[BlockName, int], now: float) -> None:
        self.talks = Talks(
            self.capacity,
            blocks=64,
            shape=self.shape,
            ranks=self.ranks,
            low=0.2,
            high=0.4,
            shares=Shares(pinned=0.5, tenants={"small": 0.5}),
            sink_tokens=self.sink_tokens,
            driver={"fronts": FRONTS, "weigh": on_each(self.ranks)},
        )
        self.talks.tier, self.talks.now = tier, now
        self.manager = self.talks.manager
        self.journal, self.notes = PatientJournal(self.folder), Notes()
        self.link = JournalLink(self.journal, self.manager, FRONTS, self.notes, lambda: self.talks.now)
        self.is_void = False

    def live(self, steps: int) -> None:
        """Do things at random. Each life ends with a kill."""
        happens = [*[self.ask] * 6, self.abort, *[self.rest] * 2, self.overwrite, self.damage, self.reset, self.kill]
        for _ in range(steps):
            self.rng.choice(happens)()
        self.kill()
        self.journal.close()

    def ask(self) -> None:
        """A new chat, a continuation, a fork or the same question again, by how much of an earlier one is kept."""
        rng = self.rng
        self.abort(most=2)
        prompt = (rng.choice(self.texts)[: rng.randrange(9)] + letters(rng, 4))[:8] or "s"
        text = prompt + letters(rng, 3)
        self.texts.append(text)
        who, tenant = rng.choice([None, None, "A", "B"]), rng.choice(["", "", "small"])
        request_id = self.talks.ask(" ".join(prompt), who, tenant, **rng.choice(HINTS))
        if self.talks.serve(request_id) and rng.random() < 0.75:
            ends = dict.fromkeys((" ".join(text), " ".join(prompt))) if self.others else ()
            self.talks.finish(request_id, " ".join(text), [self.talks.point(end, self.others) for end in ends])
        self.step()

    def abort(self, most: int = 0) -> None:
        if len(self.talks.running) > most:
            self.talks.finish(self.rng.choice(list(self.talks.running)))
            self.step()

    def rest(self) -> None:
        self.talks.now += self.rng.choice([1.0, 10.0, 10.0])
        for _ in range(3):
            self.step()

    def overwrite(self) -> None:
        self.talks.overwrite()

    def damage(self) -> None:
        """A compressed block cannot be read any more. Nobody knows before it is loaded."""
        if self.talks.tier:
            del self.talks.tier[self.rng.choice(list(self.talks.tier))]

    def reset(self) -> None:
        if self.rng.random() < 0.25 and not self.talks.running:
            self.talks.driver.reset(self.talks.now)
            self.talks.pool.clear()
            self.talks.tier.clear()
            self.link.reset()
            self.is_void = True

    def step(self) -> None:
        self.talks.step()
        self.link.tell(self.talks.now)

    def kill(self) -> None:
        if is_told := self.rng.random() < 0.5:
            self.step()
            self.journal.flush()
        self.journal.close()
        dead = self.talks
        cold = [session for session in dead.manager.table.by_id.values() if session.is_cold]
        before = [self.facts(dead, session) for session in cold if dead.tier.keys() >= set(self.names(dead, session))]
        if was_void := self.is_void:  # nobody finds blocks of before a reset, or of after it
            dead.tier.clear()
            before = []
        self.begin(dead.tier, dead.now)
        ranks = [{name: -(-size // self.ranks) for name, size in dead.tier.items()} for _ in range(self.ranks)]
        found = self.link.adopt(ranks, self.talks.now)
        table = self.manager.table
        assert found.sessions == len(table.by_id) == table.states[SessionState.COLD]
        assert not (was_void and found.written)
        self.came += found.sessions
        for each in before if is_told else ():
            if not each["tenant"]:  # one with a quota may have to pay for blocks that others paid for
                assert self.facts(self.talks, table.by_id[str(each["session_id"])]) == each
        self.only_saved_blocks_stay()

    def names(self, talks: Talks, session: Session) -> list[BlockName]:
        """Return the blocks that the tiers should have of a session."""
        blocks = talks.manager.blocks
        rows = [*session.rows.tolist(), *session.point_rows.tolist()]
        return [blocks.name(row) for row in rows if blocks.group[row] != NO_GROUP]

    def facts(self, talks: Talks, session: Session) -> dict[str, object]:
        """Return what the next process is to know of a session."""
        blocks = talks.manager.blocks
        return {
            "session_id": session.session_id,
            "blocks": sorted(self.names(talks, session)),
            "exact": blocks.exact[session.rows].tolist(),
            "marks": blocks.mark[session.rows].tolist(),
            "points": [point.depth for point in session.points],
            "is_pinned": session.is_pinned,
            **{name: getattr(session, name) for name in (*HISTORY, *TIMES)},
        }

    def only_saved_blocks_stay(self) -> None:
        """Events and notes name every block that was adopted. All others are dropped with the next step."""
        check_integrity(self.manager)
        blocks = self.manager.blocks
        rows = blocks.rows().tolist()
        saved = {blocks.name(row) for row in rows if blocks.group[row] != NO_GROUP}
        told = [(event.group, name) for event in self.talks.told(BlocksSaved) for name in event.block_hashes]
        assert sorted(told) == sorted(saved)
        kept = {(self.manager.pool_group(group), name) for group, name in map(blocks.name, rows)}
        assert dict(self.notes) == {name: note_of(name) for name in kept}
        assert all(blocks.moved[rows] == 3)
        self.step()
        assert set(self.talks.tier) >= saved
        assert blocks.saved_nbytes <= self.manager.budget_nbytes


def letters(rng: Random, most: int) -> str:
    return "".join(rng.choices("ab", k=rng.randrange(most + 1)))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"shape": POINTED, "others": OTHERS, "capacity": 24},
        pytest.param(
            {"shape": MemoryShape(POINTED.groups, stores_main=False), "others": OTHERS, "capacity": 24},
            marks=pytest.mark.slow,
        ),
        {"ranks": 2, "sink_tokens": 20, "capacity": 20},
    ],
    ids=["plain", "points", "points only", "exact tokens on two ranks"],
)
def test_sessions_that_the_next_process_takes_over(options: dict[str, Any], tmp_path: Path) -> None:
    came = 0
    for seed in range(examples(60)):
        lives = Lives(tmp_path / str(seed), Random(seed), **options)
        lives.live(60)
        came += lives.came
    assert came > 10


# -- by example -----------------------------------------------------------------------------------------


class ListJournal:
    """A journal in memory."""

    def __init__(self, sessions: Iterable[JournalSession]) -> None:
        self.written = {session.session_id: session for session in sessions}
        self.close = self.written.clear

    def sessions(self) -> list[JournalSession]:
        return list(self.written.values())

    def tell(self, sessions: Iterable[JournalSession]) -> None:
        self.written |= {session.session_id: session for session in sessions}

    @property
    def saved(self) -> dict[str, SavedBlocks]:
        """Saved blocks of each session whose last record names them."""
        return {name: session.saved for name, session in self.written.items() if session.saved is not None}


def linked(talks: Talks, sessions: Iterable[JournalSession] = ()) -> tuple[ListJournal, JournalLink]:
    journal = ListJournal(sessions)
    return journal, JournalLink(journal, talks.manager, (), clock=lambda: talks.now)  # type: ignore[arg-type]


def block(group: int, hashes: list[bytes], at: int, **more: int) -> JournalBlock:
    return JournalBlock(hashes[at], group, at, 0, **more)


def left(session_id: str, text: str, last_used: float, depths: Iterable[int] = (), **facts: object) -> JournalSession:
    """A session as an earlier process has written it. depths: of its resume points, each of one state."""
    known = dict.fromkeys(FACTS, 0) | {"ttl_s": None, "gap": None, "expected": None, "prompt_end": "", "tenant": ""}
    known |= {"parent": None, "name": session_id.rpartition("/")[2], "last_used": last_used, **facts}
    hashes = names(text)
    points = tuple(JournalPoint(depth, (block(STATE, hashes, depth - 1),)) for depth in depths)
    return JournalSession(
        session_id, known, SavedBlocks(tuple(block(0, hashes, at) for at in range(len(hashes))), points)
    )


def adopt(talks: Talks, *sessions: JournalSession) -> tuple[dict[str, int], JournalLink]:
    """Return the length of each session that was adopted."""
    _, link = linked(talks, sessions)
    saved = [each.saved for each in sessions if each.saved is not None]
    parts = [part for each in saved for point in each.points for part in point.parts]
    names = [one.name for each in saved for one in each.blocks] + [part.name for part in parts]
    talks.tier = {name: 50 if name[0] else 100 for name in names}
    link.adopt([talks.tier], talks.now)
    return {session.session_id: len(session.rows) for session in talks.manager.table.by_id.values()}, link


def test_the_newest_come_first_within_shares_and_pins_that_still_fit() -> None:
    talks = Talks(10, shares=Shares(pinned=0.5, tenants={"small": 0.3}))
    sessions = [left("small/a", "a a a a a", 1.0, tenant="small"), left("b", "b b b", 2.0, is_pinned=True)]
    sessions.append(left("c", "c c c", 3.0, is_pinned=True))
    assert adopt(talks, *sessions)[0] == {"small/a": 3, "b": 3, "c": 3}
    assert [talks.session(name).is_pinned for name in ("small/a", "b", "c")] == [False, True, False]
    table = talks.manager.table
    assert [session.session_id for session in table.victims(table.order)] == ["small/a", "c"]
    assert [session.session_id for session in table.victims(table.orders["small", 0])] == ["small/a"]
    request = talks.start("a a a a a a", "a", tenant="small")
    assert talks.running[request].loaded == 3
    assert talks.manager.requests[request].session is talks.session("small/a")


def test_windows_alone_take_the_bytes_that_they_took_before_the_restart() -> None:
    shape = MemoryShape({0: GroupShape(16, 500, {0: 50})}, stores_main=False)
    talks = Talks(shape=shape)
    journal, link = linked(talks)
    talks.driver._journal = link
    text = "a b c d e f g h"
    talks.finish(talks.start("a b c d e f g", "alice"), text, [talks.point(text, {0: 2})])
    talks.rest()
    talks.step()
    assert talks.manager.blocks.saved_nbytes == sum(talks.tier.values()) == 100
    again = Talks(shape=shape)
    linked(again, journal.written.values())[1].adopt([dict(talks.tier)], again.now)
    assert again.manager.blocks.saved_nbytes == 100
    assert again.texts() == {"alice": text}


def test_requests_find_a_session_by_its_prompt_and_by_its_end() -> None:
    talks = Talks()
    hashes = names("a b c d")
    adopt(talks, left("anonymous-1", "a b c", 1.0, name=None, uses=7, prompt_end=digest_of("", hashes[:2], b"tail")))
    again = talks.manager.request_started("again", hashes[:2], None, 2.0, tail=b"tail")
    assert again.own == 2
    assert b"tail".hex() not in again.session.prompt_end  # no token of a prompt reaches the journal
    other = talks.manager.request_started("other", hashes[:2], None, 2.0, tail=b"another")
    assert other.own == 0
    session = talks.session("anonymous-1")
    talks.manager.cut(session, 0, DropCause.BUDGET)
    assert talks.manager.request_started("next", hashes, None, 3.0).session is session
    assert session.uses == 8


def test_blocks_that_some_rank_lacks_are_dropped_and_those_that_nobody_names(tmp_path: Path) -> None:
    talks = Talks()
    hashes, stray = names("a b c d"), (0, names("stray")[0])
    journal = Journal(tmp_path)
    journal.tell([left("a", "a b c d", 1.0)])
    journal.close()
    both = {(0, block_hash): 50 for block_hash in hashes} | {stray: 50}
    one = {name: nbytes for name, nbytes in both.items() if name[1] != hashes[2]}
    link = JournalLink(Journal(tmp_path), talks.manager, ())
    found = link.adopt([both, one], 9.0)
    assert found == (1, 1, 2, 200, 3)
    [drop] = talks.told(BlocksDropped)
    assert sorted(drop.block_hashes) == sorted([hashes[2], hashes[3], stray[1]])
    link.close()
    assert [session.saved.blocks for session in Journal(tmp_path).sessions() if session.saved] == [
        (block(0, hashes, 0), block(0, hashes, 1))
    ]


def test_blocks_that_were_cut_come_back_with_the_levels_that_they_have(tmp_path: Path) -> None:
    shape = MemoryShape({0: replace(GROUP, levels=5)})
    talks, hashes = Talks(shape=shape), names("a b c d")
    journal = Journal(tmp_path)
    journal.tell([left("a", "a b c d", 1.0)])
    journal.close()
    counts = zip(hashes, (5, 3, 1, 2), strict=True)
    parts = {(0, block_hash): (4, 8, 20, 30, 60)[:count] for block_hash, count in counts}
    ranks = [{name: sizes[-1] for name, sizes in parts.items()} for _ in range(2)]
    inner = {name: [2 * size for size in sizes[:-1]] for name, sizes in parts.items()}
    link = JournalLink(Journal(tmp_path), talks.manager, ())
    found = link.adopt(ranks, 9.0, None, inner)
    assert found == (1, 1, 4, 2 * (60 + 20 + 4 + 8), 0)
    rows, blocks = talks.session("a").rows, talks.manager.blocks
    assert blocks.level[rows].tolist() == [4, 2, 0, 1]
    assert blocks.inner[rows].tolist() == [[8, 16, 40, 60], [8, 16, 0, 0], [0, 0, 0, 0], [8, 0, 0, 0]]
    talks.manager.budget_nbytes, talks.parts = blocks.saved_nbytes, (8, 16, 40, 60, 100)
    talks.go_cold("x")
    assert blocks.level[rows].tolist() == [2, 1, 0, 1]
    link.close()


@pytest.mark.parametrize("facts", [{"expected": "?"}, {"created": "?"}])
def test_a_session_with_damaged_facts_is_left_out(facts: dict[str, object]) -> None:
    talks = Talks()
    lengths, link = adopt(talks, left("a", "a b", 1.0, **facts), left("b", "b b", 1.0))
    assert lengths == {"b": 2}
    assert set(link._told) == {"b"}


def test_a_pin_for_a_while_ends_with_its_process() -> None:
    talks = Talks()
    journal, link = linked(talks)
    for who in "abc":
        talks.talk(f"{who} b", who)
    talks.rest()
    talks.manager.steer("pin", talks.session("a"), talks.now, seconds=60.0)
    talks.manager.steer("pin", talks.session("b"), talks.now)
    link.tell(talks.now)
    assert {name: each.facts["is_pinned"] for name, each in journal.written.items()} == {
        "a": False,
        "b": True,
        "c": False,
    }


def test_a_child_is_of_its_parents_family_again() -> None:
    talks = Talks()
    older = left("old", "a d", 1.0)
    older = replace(older, facts={name: fact for name, fact in older.facts.items() if name != "parent"})
    adopt(talks, left("parent", "a b", 3.0), left("child", "a c", 2.0, parent="parent"), older)
    assert talks.manager.table.relatives(talks.session("parent")) == [talks.session("child")]
    assert talks.session("child").parent == "parent"
    assert talks.session("old").parent is None
    check_integrity(talks.manager, talks.driver)
