"""Rules that hold for every policy, whatever its order is."""

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from manthan.policies import EvictionPolicy, SessionView, get_policy, policy_names
from manthan.policies.returns import Returns

IDS = st.integers(0, 14).map(str)
each_policy = pytest.mark.parametrize("policy", [*map(get_policy, policy_names()), Returns])
EVENTS = st.lists(
    st.one_of(
        st.tuples(
            st.just("request"),
            IDS,
            st.floats(0, 1000),  # seconds after the last one
            st.floats(0, 10),  # seconds that it takes
            st.integers(0, 5) | st.just(2000),  # blocks
            st.none() | st.floats(0, 1000),  # seconds after which the client says it returns
        ),
        st.tuples(st.just("forget"), IDS),
        st.tuples(st.just("supersede"), IDS),
        # for each victim: whether it goes, and another session that leaves before the next victim is asked for
        st.tuples(st.just("take"), st.lists(st.tuples(st.booleans(), st.none() | IDS), max_size=20)),
        st.tuples(st.just("look"), st.integers(0, 20)),
    ),
    max_size=60,
)


class Teller:
    """Tells a policy of events, and knows the sessions that are there."""

    def __init__(self, policy: type[EvictionPolicy]) -> None:
        self.policy = policy.family()()
        self.now = 0.0
        self.present: set[str] = set()
        self.seen: dict[str, SessionView] = {}

    def apply(self, event: tuple[Any, ...]) -> None:
        match event:
            case "request", session_id, after, took, blocks, expected_in:
                self.request(session_id, after, took, blocks, expected_in)
            case "forget", session_id:
                self.forget(session_id)
            case "supersede", session_id:
                self.policy.superseded(session_id)
            case "take", steps:
                self.take(steps)
            case "look", count:
                for _, _ in zip(range(count), self.policy.victims(), strict=False):
                    pass

    def request(self, session_id: str, after: float, took: float, blocks: int, expected_in: float | None) -> None:
        last = self.seen.get(session_id)
        begin = self.now + after
        self.now = begin + took
        view = SessionView(
            session_id,
            tokens=16 * blocks,
            nbytes=1000 * blocks,
            created=last.created if last else begin,
            last_used=begin,
            uses=last.uses + 1 if last else 1,
            gap=begin - last.last_used if last else None,
            added_tokens=blocks,
        )
        self.policy.used(view)
        expected = None if expected_in is None else self.now + expected_in
        self.seen[session_id] = view = view._replace(last_used=self.now, answer_tokens=3, expected=expected)
        self.policy.used(view)
        self.present.add(session_id)

    def forget(self, session_id: str) -> None:
        self.present.discard(session_id)
        self.policy.forget(session_id)

    def take(self, steps: list[tuple[bool, str | None]]) -> None:
        expected, passed = set(self.present), set[str]()
        victims = iter(self.policy.victims())
        for goes, other in steps:
            victim = next(victims, None)
            if victim is None:
                assert expected <= passed, "a session that is there was left out"
                return
            assert victim in self.present, "a victim is not there"
            assert victim not in passed, "a victim came twice"
            passed.add(victim)
            if goes:
                self.present.remove(victim)
                self.policy.evicted(victim)
            if other is not None:
                self.forget(other)
                expected.discard(other)


@each_policy
@settings(deadline=None)
@given(events=EVENTS)
@example(  # passes into two pieces of age, looked at between them, next to sessions of the same worth
    events=[
        ("request", i, after, took, 2000, None) for i, after, took in (("0", 570.9, 0.2), ("2", 31, 10), ("1", 291, 10))
    ]
)
def test_victims_are_the_sessions_that_are_there_and_looking_changes_nothing(
    policy: type[EvictionPolicy], events: list[tuple[Any, ...]]
) -> None:
    looking, other = Teller(policy), Teller(policy)
    for event in events:
        looking.apply(event)
        order = list(looking.policy.victims())
        assert sorted(order) == sorted(looking.present)
        assert list(looking.policy.victims()) == order
        if event[0] != "look":
            other.apply(event)
    assert list(looking.policy.victims()) == list(other.policy.victims())
