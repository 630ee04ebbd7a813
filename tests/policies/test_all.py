"""What holds for every registered policy, whatever its order is."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manthan.policies import EvictionPolicy, SessionView, get_policy, policy_names

IDS = st.integers(0, 14).map(str)
each_policy = pytest.mark.parametrize("name", policy_names())


@dataclass(frozen=True)
class Request:
    """A session is used: a request of it begins, and ends after `took` seconds."""

    session_id: str
    after: float
    took: float
    blocks: int
    expected_in: float | None


@dataclass(frozen=True)
class Forget:
    session_id: str


@dataclass(frozen=True)
class Supersede:
    session_id: str


@dataclass(frozen=True)
class Take:
    """Victims are taken: per victim, whether it goes, and who else leaves before the next one is asked for."""

    steps: tuple[tuple[bool, str | None], ...]


@dataclass(frozen=True)
class Look:
    """Victims are asked for, and nobody goes."""

    count: int


EVENTS = st.lists(
    st.one_of(
        st.builds(
            Request,
            IDS,
            after=st.floats(0, 1000),
            took=st.floats(0, 10),
            blocks=st.integers(0, 5) | st.just(2000),
            expected_in=st.none() | st.floats(0, 1000),
        ),
        st.builds(Forget, IDS),
        st.builds(Supersede, IDS),
        st.builds(Take, st.lists(st.tuples(st.booleans(), st.none() | IDS), max_size=20).map(tuple)),
        st.builds(Look, st.integers(0, 20)),
    ),
    max_size=60,
)


@dataclass
class Manager:
    """Tells a policy what happens, and knows who is there."""

    policy: EvictionPolicy
    now: float = 0.0
    present: set[str] = field(default_factory=set)
    seen: dict[str, SessionView] = field(default_factory=dict)

    def apply(self, event: object) -> None:
        match event:
            case Request():
                self.request(event)
            case Forget(session_id):
                self.forget(session_id)
            case Supersede(session_id):
                self.policy.superseded(session_id)
            case Take(steps):
                self.take(steps)
            case Look(count):
                for _, _ in zip(range(count), self.policy.victims(), strict=False):
                    pass

    def request(self, event: Request) -> None:
        last = self.seen.get(event.session_id)
        begin = self.now + event.after
        self.now = begin + event.took
        view = SessionView(
            event.session_id,
            tokens=16 * event.blocks,
            nbytes=1000 * event.blocks,
            created=last.created if last else begin,
            last_used=begin,
            uses=last.uses + 1 if last else 1,
            gap=begin - last.last_used if last else None,
            added_tokens=event.blocks,
        )
        self.policy.used(view)
        expected = None if event.expected_in is None else self.now + event.expected_in
        self.seen[event.session_id] = view = view._replace(last_used=self.now, answer_tokens=3, expected=expected)
        self.policy.used(view)
        self.present.add(event.session_id)

    def forget(self, session_id: str) -> None:
        self.present.discard(session_id)
        self.policy.forget(session_id)

    def take(self, steps: tuple[tuple[bool, str | None], ...]) -> None:
        expected, passed = set(self.present), set[str]()
        victims = iter(self.policy.victims())
        for goes, other in steps:
            victim = next(victims, None)
            if victim is None:
                assert expected <= passed, "somebody who is there was left out"
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


def a_policy(name: str) -> EvictionPolicy:
    return get_policy(name).family()()


@each_policy
@settings(deadline=None)
@given(events=EVENTS)
def test_victims_are_those_who_are_there_each_once(name: str, events: list[object]) -> None:
    manager = Manager(a_policy(name))
    for event in events:
        manager.apply(event)
        order = list(manager.policy.victims())
        assert sorted(order) == sorted(manager.present)
        assert list(manager.policy.victims()) == order


@each_policy
@settings(deadline=None)
@given(events=EVENTS)
def test_who_only_looks_changes_nothing_and_the_same_events_give_the_same_order(
    name: str, events: list[object]
) -> None:
    looking, other = Manager(a_policy(name)), Manager(a_policy(name))
    for event in events:
        looking.apply(event)
        list(looking.policy.victims())
        if not isinstance(event, Look):
            other.apply(event)
    assert list(looking.policy.victims()) == list(other.policy.victims())


@settings(deadline=None)
@given(events=EVENTS)
def test_one_look_gives_the_order_in_which_they_would_go_one_by_one(events: list[object]) -> None:
    manager = Manager(a_policy("lru"))
    for event in events:
        manager.apply(event)
    order = list(manager.policy.victims())
    gone = []
    for _ in order:
        gone.append(next(iter(manager.policy.victims())))
        manager.policy.evicted(gone[-1])
    assert gone == order
