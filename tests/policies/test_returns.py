"""Our own policy: it learns who comes back and when, and keeps those."""

import random

import numpy as np
import pytest

from manthan.policies import SessionView
from manthan.policies.mixture import Mixture
from manthan.policies.return_model import AGES, ReturnModel
from manthan.policies.returns import Returns, ReturnsOptions


def view(name: str, at: float, uses: int = 1, gap: float | None = None, added: int = 100, **more: int) -> SessionView:
    return SessionView(name, 1000, last_used=at, uses=uses, gap=gap, added_tokens=added, **more)


def play(policy: Returns, sessions: list[SessionView]) -> float:
    """Use sessions in the order of time, then evict all. Returns the time of the last use."""
    in_time = sorted(sessions, key=lambda session: session.last_used)
    for session in in_time:
        policy.used(session)
    for session in in_time:
        policy.evicted(session.session_id)
    return in_time[-1].last_used


def taught(policy: Returns, sessions: int = 600, seed: int = 0) -> float:
    """Half of the sessions ask little and return after 40 to 80 s, the others ask much and never do.

    Returns the time at which it ends.
    """
    chance = random.Random(seed)
    events = []
    for i in range(sessions):
        begin = i * 3.0
        events.append(view(f"s{i}", begin, added=100 if i % 2 else 20_000))
        if i % 2:
            gap = chance.uniform(40, 80)
            events.append(view(f"s{i}", begin + gap, 2, gap, added=20_000))
    return play(policy, events) + 100


def quick() -> Returns:
    return Returns(ReturnsOptions(window=1024, refit_every=64))


def test_before_it_has_learned_the_one_unused_for_longest_goes_first() -> None:
    policy = Returns()
    for i in range(50):
        policy.used(view(f"s{i}", float(i), added=i * 500))
    assert list(policy.victims()) == [f"s{i}" for i in range(50)]


@pytest.mark.parametrize(
    ("uses", "order"),
    [
        ([("chat", 0, 100), ("document", 20, 20_000), ("last", 30, 100)], ["document"]),
        ([("late", 0, 100), ("new", 300, 100)], ["late", "new"]),
        ([("soon", 0, 100), ("in a while", 45, 100)], ["in a while", "soon"]),
    ],
    ids=["never returns", "waited for too long", "its time has come"],
)
def test_sessions_that_pay_least_for_their_room_go_first(uses: list[tuple[str, int, int]], order: list[str]) -> None:
    policy = quick()
    now = taught(policy)
    for name, after, added in uses:
        policy.used(view(name, now + after, added=added))
    assert list(policy.victims())[: len(order)] == order


def test_whose_conversation_went_on_elsewhere_goes_first_until_it_is_used() -> None:
    told, untold = quick(), quick()
    for policy in (told, untold):
        now = taught(policy)
        for i, name in enumerate(("a", "b", "c")):
            policy.used(view(name, now + 10 * i))
    first, *others = untold.victims()
    last = others[-1]
    told.superseded(last)
    told.superseded("unknown")
    assert list(told.victims()) == [last, first, *others[:-1]]
    for policy in (told, untold):
        policy.used(view(last, now + 40))
    assert list(told.victims()) == list(untold.victims())


def test_all_places_learn_from_all_and_count_a_request_once() -> None:
    make = Mixture.family(ReturnsOptions(window=64, refit_every=4))
    hot, cold = make(), make()
    assert hot.model is cold.model
    for i in range(8):
        for place in (hot, cold, hot, cold):
            place.used(view(f"s{i}", float(i)))
    assert hot.model.version == 2


def test_hazards_are_found_that_made_the_data() -> None:
    """Exponential returns, three times as fast after short additions: the factors' ratio is 3, the rate is right."""
    chance = random.Random(1)
    model = ReturnModel(window=8192, refit_every=4000, prior=1.0)
    events: list[tuple[float, SessionView]] = []
    for i in range(4000):
        short = i % 2 == 0
        gap = chance.expovariate(0.03 if short else 0.01)
        events.append((i * 1.0, view(f"s{i}", i * 1.0, added=10 if short else 5000)))
        if i + gap < 4000:
            events.append((i + gap, view(f"s{i}", i + gap, 9, gap, added=200_000)))
    for _, session in sorted(events, key=lambda event: event[0]):
        model.observe(session, model.buckets(session))
    model._fit(4000.0)
    short, long = (model.buckets(view("x", 0.0, added=added)) for added in (10, 5000))
    factors = [np.exp(model.log_factor(known)) for known in (short, long)]
    assert 2.5 < factors[0] / factors[1] < 3.5
    piece = AGES.index(30)
    assert 0.024 < model.base[0, piece] * factors[0] < 0.036


def said(policy: Returns, true: bool, sessions: int = 400) -> float:
    """Half of the sessions say that they will be back in 30 s, the others nothing. If that is true, those who said it
    are, and nobody else; if not, the others are after 40 s, and they never. Returns the time at which it ends."""
    events = []
    for i in range(sessions):
        begin, says = i * 5.0, i % 2 == 0
        first = view(f"t{i}", begin)
        events.append(first._replace(expected=begin + 30.0) if says else first)
        if says == true:
            gap = 30.0 if says else 40.0
            events.append(view(f"t{i}", begin + gap, 2, gap, added=20_000))
    return play(policy, events) + 100


@pytest.mark.parametrize(("true", "first"), [(True, "silent"), (False, "says")])
def test_an_announced_return_counts_where_earlier_ones_were_true(true: bool, first: str) -> None:
    policy = quick()
    now = said(policy, true)
    policy.used(view("says", now)._replace(expected=now + 30.0))
    policy.used(view("silent", now))
    policy.used(view("last", now + 10.0))
    assert next(name for name in policy.victims() if name != "last") == first
