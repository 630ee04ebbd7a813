"""A session, its names and its blocks belong to one tenant: nobody else can name, read, grow, pin or release it."""

from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
from engine import Engine, chain
from hypothesis import given, settings

from manthan.manager.sessions.budget import Shares
from manthan.manager.sessions.session import Drop, DropCause, Prefetch

NO_QUOTA = Shares(pinned=1.0, tenants={"b": 0.0})
LEAD_S = 2.0


def test_another_tenant_s_prompt_is_not_a_session_s_next_turn() -> None:
    engine = Engine(shares=NO_QUOTA)
    engine.finish(engine.start("a b c", "chat", tenant="a", pin=True), "a b c")  # its answer filled no block
    outcome = engine.finish(engine.start("a b c", tenant="b", release=True), "a b c d")
    assert outcome is not None
    assert outcome.session_id == "anonymous-1"
    assert engine.chains() == {"a/chat": "a b c"}
    assert engine.session("a/chat").pinned
    engine.evict()
    assert engine.cold() == {"a", "b", "c"}


def test_a_name_of_two_tenants_is_two_sessions_and_each_is_told_its_own() -> None:
    engine = Engine()
    assert engine.talk("a b c", "chat", tenant="a", pin=True)[:2] == ("chat", True)
    assert engine.talk("a b c d", "chat", tenant="b", priority=1)[:2] == ("chat", False)
    assert engine.talk("a b c x", "chat", tenant="")[:1] == ("chat",)
    assert engine.chains() == {"a/chat": "a b c", "b/chat": "a b c d", "chat": "a b c x"}
    assert engine.talk("a b c y z", "chat", tenant="a").session_id == "chat"


def test_a_name_that_looks_like_another_tenant_s_is_not_its() -> None:
    engine = Engine(prefetch_lead_s=LEAD_S)
    engine.talk("a b c", "chat", tenant="a")
    assert engine.talk("a b c d", "a/chat", release=True).session_id != "a/chat"
    engine.evict()
    engine.talk("x y", prefetch=["a/chat", "chat"])
    assert engine.manager.take_prefetches(99, engine.now) == []
    engine.talk("x y z", tenant="a", prefetch=["chat"])
    assert engine.manager.take_prefetches(99, engine.now) == [Prefetch("a/chat", chain("a b c"), tenant="a")]


def test_a_remembered_session_is_its_tenant_s() -> None:
    engine = Engine(capacity=3)
    engine.talk("a b c", "chat", tenant="a")
    engine.evict()
    engine.now += 1
    engine.talk("x y z", tenant="b")
    engine.evict()
    engine.start("a b c d", tenant="b")
    assert [s.uses for s in engine.manager.table.by_id.values() if s.tenant == "b"] == [1, 1]
    engine.start("a b c d", tenant="a")
    assert engine.session("a/chat").uses == 2


def test_a_changed_conversation_has_the_history_of_its_own_tenant_only() -> None:
    engine = Engine(shares=NO_QUOTA)
    engine.talk("sys a b c", tenant="a")
    engine.start("sys a x", tenant="b")
    engine.start("sys a y", tenant="a")
    assert [(s.tenant, s.uses) for s in engine.manager.table.by_id.values()] == [("a", 1), ("b", 1), ("a", 2)]


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


# -- whatever another tenant does ---------------------------------------------------------------------

TEXT = st.text("xy", min_size=1, max_size=5)
TALK = st.fixed_dictionaries(
    {
        "tenant": st.sampled_from(["a", "a", "b", ""]),
        "prompt": TEXT,
        "answer": st.text("xy", max_size=2),
        "name": st.sampled_from([None, None, "chat", "other", "b/chat"]),
        "hints": st.sampled_from(
            [
                {},
                {},
                {"pin": True},
                {"pin": False},
                {"release": True},
                {"ttl_s": 30},
                {"priority": 1},
                {"expect_return_s": 20},
                {"prefetch": ["chat", "a/chat", "anonymous-1", "chat~2"]},
            ]
        ),
        "ends": st.integers(0, 3),  # events later
    }
)
EVENTS = st.lists(st.one_of(TALK, TALK, st.sampled_from(["evict", "prefetch"])), max_size=14)


def told(events: Sequence[Any], of: str, *, alone: bool) -> list[object]:
    """What a tenant is told, and what its sessions are after each event; `alone`, without the others' requests."""
    engine = Engine(capacity=10_000, prefetch_lead_s=LEAD_S, shares=Shares(pinned=1.0))
    ends: dict[str, tuple[int, str, str]] = {}
    seen: list[object] = []
    for now, event in enumerate([*events, *["wait"] * 4]):
        engine.now += 1
        for request, (when, text, tenant) in list(ends.items()):
            if when <= now:
                outcome = engine.finish(request, text)
                del ends[request]
                if tenant == of:
                    seen.append(outcome and outcome[1:])
        if event == "evict":
            engine.evict()
        elif event == "prefetch":
            for prefetch in engine.manager.take_prefetches(1000, engine.now):
                engine.manager.prefetch_finished(prefetch.session_id, True, (), engine.now)
        elif event != "wait" and not (alone and event["tenant"] != of):
            prompt, answer = " ".join(event["prompt"]), " ".join(event["prompt"] + event["answer"])
            engine.requests = now
            request = engine.start(prompt, event["name"], event["tenant"], **event["hints"])
            ends[request] = (now + event["ends"], answer, event["tenant"])
        sessions = [s for s in engine.manager.table.by_id.values() if s.tenant == of]
        seen.append([(s.asked_id, [b.key for b in s.chain], s.state, s.uses, sorted(s.requests)) for s in sessions])
        seen.append([(s.pinned, s.priority, s.ttl_s, s.expected) for s in sessions])
    return seen


@settings(max_examples=300, deadline=None, derandomize=True)
@given(EVENTS)
def test_what_a_tenant_does_changes_nothing_of_another_s(events: list[Any]) -> None:
    assert told(events, "a", alone=False) == told(events, "a", alone=True)
