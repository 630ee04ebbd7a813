"""A session, its names and its blocks belong to one tenant: nobody else can name, read, grow, pin or release it.

Where tenants are isolated, no key of one is a key of another: here a chain's first word then has the tenant in it.
"""

from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
from engine import Engine, chain
from examples import examples
from hypothesis import given, settings
from integrity import check_integrity

from manthan.manager.sessions.budget import Shares
from manthan.manager.sessions.session import Drop, DropCause, qualified
from manthan.policies import policy_names

NO_QUOTA = Shares(pinned=1.0, tenants={"b": 0.0})
LEAD_S = 2.0


def test_a_name_of_two_tenants_is_two_sessions_and_each_is_told_its_own() -> None:
    engine = Engine()
    assert engine.talk("a b c", "chat", tenant="a", pin=True)[:2] == ("chat", True)
    assert engine.talk("a b c d", "chat", tenant="b", priority=1)[:2] == ("chat", False)
    assert engine.talk("a b c x", "chat", tenant="")[:1] == ("chat",)
    assert engine.chains() == {"a/chat": "a b c", "b/chat": "a b c d", "chat": "a b c x"}
    assert engine.talk("a b c y z", "chat", tenant="a").session_id == "chat"


def test_a_tenant_without_a_quota_drops_nobody_s_codes() -> None:
    engine = Engine(capacity=3, shares=NO_QUOTA)
    engine.talk("a b c", tenant="a")
    engine.evict()
    running = engine.start("a b c d", tenant="a")  # its codes are redundant while it runs
    engine.manager.restore_started(running, chain("a b c"))
    engine.manager.restore_finished(running)
    engine.talk("x y", tenant="b")
    engine.evict()
    assert engine.manager.take_drops() == []
    assert engine.cold() == {"a", "b", "c"}


def test_blocks_that_two_tenants_use_stay_until_neither_does() -> None:
    engine = Engine(shares=Shares(tenants={"a": 0.5, "b": 0.5}))
    engine.talk("sys a", "chat", tenant="a")
    engine.evict()
    engine.talk("sys b", "chat", tenant="b")
    engine.evict()
    assert engine.manager.blocks.reserved_of == {"a": 200, "b": 100}
    engine.finish(engine.start("sys a", "chat", tenant="a", release=True), "sys a")
    assert engine.manager.take_drops() == [Drop(0, [b"sys a"], DropCause.RELEASED)]
    assert engine.chains() == {"b/chat": "sys b"}


NAME = st.text("a/%", max_size=5)


@given(NAME, NAME, NAME, NAME)
def test_no_two_of_tenant_and_name_make_the_same_id(tenant: str, name: str, other: str, alike: str) -> None:
    assert (qualified(name, tenant) == qualified(alike, other)) == ((tenant, name) == (other, alike))


def test_a_tenant_without_sessions_takes_no_memory() -> None:
    engine = Engine(shares=Shares(tenants={"*": 0.5}))
    for n in range(3):
        engine.talk("a b c", "chat", f"made up {n}", ttl_s=15)
    engine.evict()
    table, blocks = engine.manager.table, engine.manager.blocks
    assert (len(table.cold_of), len(blocks.reserved_of)) == (3, 1)
    engine.sweep()
    assert (table.cold_of, table.by_id, blocks.reserved_of) == ({}, {}, {})
    engine.talk("a b c", "chat", "made up 1")
    assert engine.evict()
    check_integrity(engine.manager)


def test_pins_of_a_tenant_keep_to_its_share() -> None:
    engine = Engine(capacity=20, shares=Shares(pinned=0.5, tenants={"a": 0.4, "b": 0.4}))
    assert engine.talk("a0 b c d", "one", "b", pin=True).pinned
    refused = engine.talk("a1 b c d", "two", "b", pin=True).refused
    assert refused == (
        "pin is refused: pinned sessions may take 419 bytes of the cold store (tiers.pinned_share is 0.5, the "
        "tenant's share 0.4), 400 are taken, and this session needs 400"
    )
    assert engine.talk("a2 b c d", "three", "a", pin=True).pinned
    check_integrity(engine.manager)


def test_a_refused_pin_says_nothing_of_what_others_have() -> None:
    engine = Engine(capacity=20, shares=Shares(pinned=0.25))
    assert engine.talk("a0 b c", "one", "a", pin=True).pinned
    refused = engine.talk("b0 b c", "two", "b", pin=True).refused
    assert refused == (
        "pin is refused: 300 bytes are not left of what all tenants' pinned sessions may take (tiers.pinned_share is "
        "0.25)"
    )
    assert "524 bytes of the cold store" in engine.talk("b0 b c d e f", "two", "b", pin=True).refused


# -- whatever another tenant does ---------------------------------------------------------------------

TENANTS = ("a", "b", "", "a/chat")
TEXT = st.text("xy", min_size=1, max_size=5)
HINTS: list[dict[str, object]] = [
    {},
    {},
    {"pin": True},
    {"pin": False},
    {"release": True},
    {"ttl_s": 30},
    {"priority": 1},
    {"expect_return_s": 20},
    {"tool": "search"},
    {"prefetch": ["chat", "a/chat", "anonymous-1", "chat~2", "1"]},
]
TALK = st.fixed_dictionaries(
    {
        "tenant": st.sampled_from(["a", *TENANTS]),
        "prompt": TEXT,
        "answer": st.text("xy", max_size=2),
        "name": st.sampled_from([None, None, "chat", "other", "a/chat", "chat/1", "1", "anonymous-1", "chat~2"]),
        "hints": st.sampled_from(HINTS),
        "reads": st.booleans(),
        "ends": st.integers(0, 3),  # events later
    }
)
EVENTS = st.lists(st.one_of(TALK, TALK, st.sampled_from(["evict", "evict", "prefetch"])), max_size=16)
NONE_SHARED = Shares(pinned=0.5, tenants={"": 0.25, "*": 0.25})
"""All of the store, between TENANTS: one of them can use its share up, and pins too."""


class Watched:
    """An engine, and what one tenant of it learns: all that it is told, and all that it has."""

    def __init__(self, of: str, isolated: bool, policy: str) -> None:
        quotas = {"capacity": 24, "shares": NONE_SHARED} if isolated else {"capacity": 10_000, "shares": Shares(1.0)}
        self.engine = Engine(policy=policy, prefetch_lead_s=LEAD_S, **quotas)
        self.of, self.isolated, self.seen = of, isolated, list[object]()
        self.ends: dict[str, tuple[int, str, str]] = {}

    def key_text(self, text: str, tenant: str) -> str:
        return (f"{tenant}:" if self.isolated else "") + " ".join(text)

    def start(self, now: int, event: Any) -> None:
        tenant, manager = event["tenant"], self.engine.manager
        text = self.key_text(event["prompt"], tenant)
        self.engine.requests = now
        request = self.engine.start(text, event["name"], tenant, **event["hints"])
        restorable = chain(text)[: manager.match(chain(text))] if event["reads"] else []
        if restorable:
            manager.restore_started(request, restorable)
            manager.restore_finished(request)
        if tenant == self.of and self.isolated:
            self.seen.append(restorable)
        self.ends[request] = now + event["ends"], self.key_text(event["prompt"] + event["answer"], tenant), tenant

    def finish(self, now: int) -> None:
        for request, (when, text, tenant) in list(self.ends.items()):
            if when <= now:
                del self.ends[request]
                outcome = self.engine.finish(request, text)
                if tenant == self.of:
                    self.seen.append(outcome)

    def prefetch(self) -> None:
        while (prefetch := self.engine.manager.take_prefetch(1000, self.engine.now)) is not None:
            self.engine.manager.prefetch_finished(prefetch.session_id, True, (), self.engine.now)
            if prefetch.tenant == self.of:
                self.seen.append(prefetch)

    def look(self) -> None:
        manager = self.engine.manager
        check_integrity(manager)
        manager.take_drops()
        for s in manager.table.by_id.values():
            if s.tenant == self.of:
                codes = [(b.key, b.code if self.isolated else None) for b in s.chain]
                self.seen.append((s.session_id, s.told_id, s.asked_id, codes, s.state, s.uses, sorted(s.requests)))
                self.seen.append((s.pinned, s.priority, s.ttl_s, s.expected))


def learned(events: Sequence[Any], of: str, *, alone: bool, isolated: bool, policy: str = "lru") -> list[object]:
    """What a tenant learns while these things happen; `alone`, without the others' requests."""
    watched = Watched(of, isolated, policy)
    for now, event in enumerate([*events, *["wait"] * 4, "evict"]):
        watched.engine.now += 1
        watched.finish(now)
        if event == "evict":
            watched.engine.evict()
        elif event == "prefetch":
            watched.prefetch()
        elif event != "wait" and not (alone and event["tenant"] != of):
            watched.start(now, event)
        watched.look()
    return watched.seen


@settings(max_examples=examples(300), deadline=None, derandomize=True)
@given(EVENTS)
def test_what_a_tenant_does_changes_nothing_of_another_s(events: list[Any]) -> None:
    """Also where those who send the same prompt share its blocks, with room for all of them."""
    for of in ("a", ""):
        assert learned(events, of, alone=False, isolated=False) == learned(events, of, alone=True, isolated=False)


@pytest.mark.parametrize("policy", policy_names())
@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(EVENTS)
def test_nobody_s_codes_are_pushed_out_by_others_where_shares_add_up_to_one(policy: str, events: list[Any]) -> None:
    for of in ("a", ""):
        assert learned(events, of, alone=False, isolated=True, policy=policy) == learned(
            events, of, alone=True, isolated=True, policy=policy
        )
