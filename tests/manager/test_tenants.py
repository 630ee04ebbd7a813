"""A session, its names and its blocks belong to one tenant: nobody else can name, read, grow, pin or release it.

Where tenants are isolated, they have no block hash in common. Here a text's first word then has the tenant in it.
"""

from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
from examples import examples
from hypothesis import given, settings
from integrity import check_empty, check_integrity
from talks import Talks, last_words

from manthan.manager.session.table import Shares, qualified
from manthan.policies import policy_names


def test_a_tenant_without_a_quota_drops_nobody_s_blocks() -> None:
    talks = Talks(capacity=3, shares=Shares(pinned=1.0, tenants={"b": 0.0}))
    talks.talk("a b c", tenant="a")
    talks.rest()
    talks.talk("x y", tenant="b")
    assert (talks.rest(), talks.dropped()) == ([], [])


NAME = st.text("a/%", max_size=5)


@given(NAME, NAME, NAME, NAME)
def test_no_two_of_tenant_and_name_make_the_same_id(tenant: str, name: str, other: str, alike: str) -> None:
    assert (qualified(name, tenant) == qualified(alike, other)) == ((tenant, name) == (other, alike))


def test_a_tenant_without_sessions_takes_no_memory() -> None:
    talks = Talks(shares=Shares(tenants={"*": 0.5}))
    for at in range(3):
        talks.talk("a b c", "chat", f"made up {at}", ttl_s=15)
    talks.rest()
    assert len({tenant for tenant, _ in talks.manager.table.orders} - {None}) == 3
    talks.rest()
    check_empty(talks.manager)
    assert talks.manager.table.orders.keys() == {(None, level) for level in range(5)}
    talks.talk("a b c", "chat", "made up 1")
    assert last_words(talks.rest()) == "a b c"


def refused(talks: Talks, text: str, tenant: str) -> str:
    """Return why a session that is called as its text cannot be pinned; empty if it is pinned now."""
    return talks.talk(text, text, tenant, pin=True).refused.removeprefix("pin is refused: ")


def test_pins_of_a_tenant_keep_to_its_share() -> None:
    talks = Talks(capacity=20, shares=Shares(pinned=0.5, tenants={"a": 0.4, "b": 0.4}))
    assert refused(talks, "x b c d", "b") == refused(talks, "y b c d", "a") == ""
    assert refused(talks, "z b c d", "b") == (
        "pinned sessions may take 419 bytes of the cold store (tiers.pinned_share is 0.5, the tenant's share 0.4), "
        "400 are taken, and this session needs 400"
    )


def test_a_refused_pin_says_nothing_of_what_others_have() -> None:
    talks = Talks(capacity=20, shares=Shares(pinned=0.25))
    assert refused(talks, "x b c", "a") == ""
    assert refused(talks, "y b c", "b") == (
        "300 bytes are not left of what all tenants' pinned sessions may take (tiers.pinned_share is 0.25)"
    )
    assert "524 bytes of the cold store" in refused(talks, "z b c d e f", "b")


# -- whatever another tenant does ---------------------------------------------------------------------

TENANTS = ("a", "b", "", "a/chat")
TEXT = st.sampled_from(["x", "xy", "xyx", "xyxy", "xyxyx", "y", "xx"])
HINTS: list[dict[str, object]] = [
    {},
    {},
    {"pin": True},
    {"pin": False},
    {"release": True},
    {"store": False},
    {"store": True},
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
        "name": st.none() | st.sampled_from([None, "chat", "other", "a/chat", "chat/1", "1", "anonymous-1", "chat~2"]),
        "hints": st.sampled_from(HINTS),
        "ends": st.integers(0, 3),  # events later
    }
)
EVENTS = st.lists(st.one_of(TALK, TALK, st.sampled_from(["rest", "rest", "overwrite", "step"])), max_size=16)
QUOTAS = Shares(pinned=0.5, tenants={"": 0.25, "*": 0.25})
"""All of the tier, between TENANTS: one of them can use its share up, and pins too."""


class Watched(Talks):
    """An engine, and all that one tenant learns of it: answers, and its sessions."""

    def __init__(self, of: str, isolated: bool, policy: str) -> None:
        quotas = {"capacity": 24, "shares": QUOTAS} if isolated else {"capacity": 10_000, "shares": Shares(1.0)}
        super().__init__(blocks=600, policy=policy, driver={"prefetch_lead_s": 2.0}, **quotas)
        self.of, self.isolated, self.learned = of, isolated, list[object]()
        self.ends: dict[str, tuple[int, str, str]] = {}

    def begin(self, at: int, event: Any) -> None:
        tenant, first = event["tenant"], f"{event['tenant']}:" if self.isolated else ""
        prompt, text = (first + " ".join(words) for words in (event["prompt"], event["prompt"] + event["answer"]))
        request = self.ask(prompt, event["name"], tenant, request_id=f"r{at}", **event["hints"])
        assert self.serve(request)
        self.ends[request] = at + event["ends"], text, tenant
        if tenant == self.of and self.isolated:
            self.learned.append((self.running[request].resident, self.running[request].loaded))

    def end(self, at: int) -> None:
        for request, (when, text, tenant) in list(self.ends.items()):
            if when <= at:
                del self.ends[request]
                outcome = self.finish(request, text)
                if tenant == self.of:
                    self.learned.append(outcome if self.isolated else outcome and outcome[:3])

    def look(self) -> None:
        check_integrity(self.manager, self.driver)
        for one in self.manager.table.by_id.values():
            if one.tenant == self.of:
                saved = self.manager.blocks.nbytes[one.rows].tolist() if self.isolated else []
                self.learned.append((one.session_id, one.told_id, one.name, self.text(one), saved, one.state))
                self.learned.append((one.uses, sorted(one.requests), one.is_pinned, one.priority, one.ttl_s))
                self.learned.append((one.stays_out, one.expected))


def learned(events: Sequence[Any], of: str, *, alone: bool, isolated: bool, policy: str = "lru") -> list[object]:
    """Return what a tenant learns while these things happen; `alone`, without the others' requests."""
    watched = Watched(of, isolated, policy)
    for at, event in enumerate([*events, *["step"] * 4, "rest"]):
        watched.now += 1
        watched.end(at)
        if event == "rest":
            watched.rest()
        elif event == "overwrite":
            watched.overwrite(None if isolated else 0)
        elif event != "step" and not (alone and event["tenant"] != of):
            watched.begin(at, event)
        while watched.step().loads:
            pass
        watched.look()
    return watched.learned


@pytest.mark.invariant(
    9,
    "manager/session/table.py",
    "if session.tenant == tenant and name in (None, session.name):",
    "if name in (None, session.name):",
)
@settings(max_examples=examples(300), deadline=None, derandomize=True)
@given(EVENTS)
def test_what_a_tenant_does_changes_nothing_of_another_s(events: list[Any]) -> None:
    """Also where those who send the same prompt share its blocks, with room for all of them."""
    for of in ("a", ""):
        assert learned(events, of, alone=False, isolated=False) == learned(events, of, alone=True, isolated=False)


@pytest.mark.parametrize("policy", policy_names())
@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(EVENTS)
def test_nobody_s_blocks_are_pushed_out_by_others_if_shares_add_up_to_one(policy: str, events: list[Any]) -> None:
    for of in ("a", ""):
        both, alone = (learned(events, of, alone=alone, isolated=True, policy=policy) for alone in (False, True))
        assert both == alone
