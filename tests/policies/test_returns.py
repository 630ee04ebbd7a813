"""Our own policy: it learns who comes back and when, and keeps those."""

import random

import numpy as np

from manthan.policies import SessionView
from manthan.policies.return_model import AGES, ReturnModel, buckets
from manthan.policies.returns import Returns, ReturnsOptions


def view(name: str, at: float, uses: int = 1, gap: float | None = None, added: int = 100, **more: int) -> SessionView:
    return SessionView(name, 1000, last_used=at, uses=uses, gap=gap, added_tokens=added, **more)


def taught(policy: Returns, sessions: int = 600, seed: int = 0) -> float:
    """Half of the sessions ask little and return after 40 to 80 s, the others ask much and never do.

    Returns the time at which it ends.
    """
    chance = random.Random(seed)
    events = []
    for i in range(sessions):
        begin = i * 3.0
        events.append((begin, view(f"s{i}", begin, added=100 if i % 2 else 20_000)))
        if i % 2:
            gap = chance.uniform(40, 80)
            events.append((begin + gap, view(f"s{i}", begin + gap, 2, gap, added=20_000)))
    for _, session in sorted(events, key=lambda event: event[0]):
        policy.used(session)
    for i in range(sessions):
        policy.evicted(f"s{i}")
    return sessions * 3.0 + 100


def quick() -> Returns:
    return Returns(ReturnsOptions(window=1024, refit_every=64))


def test_before_it_has_learned_the_one_unused_for_longest_goes_first() -> None:
    policy = Returns()
    for i in range(50):
        policy.used(view(f"s{i}", float(i), added=i * 500))
    assert list(policy.victims()) == [f"s{i}" for i in range(50)]


def test_who_will_not_return_goes_before_older_ones_who_will() -> None:
    policy = quick()
    now = taught(policy)
    policy.used(view("chat", now))
    policy.used(view("document", now + 20, added=20_000))
    policy.used(view("last", now + 30))
    assert next(policy.victims()) == "document"


def test_who_stays_away_for_longer_than_anybody_goes_before_new_ones() -> None:
    policy = quick()
    now = taught(policy)
    policy.used(view("late", now))
    policy.used(view("new", now + 300))
    assert list(policy.victims()) == ["late", "new"]


def test_of_those_likely_to_return_the_one_whose_time_has_come_stays() -> None:
    policy = quick()
    now = taught(policy)
    policy.used(view("soon", now))
    policy.used(view("in a while", now + 45))
    assert list(policy.victims()) == ["in a while", "soon"]


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
    make = Returns.family(ReturnsOptions(window=64, refit_every=4))
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
        model.observe(session, buckets(session))
    model._fit(4000.0)
    short, long = (buckets(view("x", 0.0, added=added)) for added in (10, 5000))
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
        events.append((begin, first._replace(expected=begin + 30.0) if says else first))
        if says == true:
            gap = 30.0 if says else 40.0
            events.append((begin + gap, view(f"t{i}", begin + gap, 2, gap, added=20_000)))
    for _, session in sorted(events, key=lambda event: event[0]):
        policy.used(session)
    for i in range(sessions):
        policy.evicted(f"t{i}")
    return sessions * 5.0 + 100


def first_of_both(policy: Returns, now: float) -> str:
    """Who goes first: one who has said that it will be back, or one used at the same time that has not."""
    policy.used(view("says", now)._replace(expected=now + 30.0))
    policy.used(view("silent", now))
    policy.used(view("last", now + 10.0))
    return next(name for name in policy.victims() if name != "last")


def test_who_says_when_it_will_be_back_stays_where_that_was_true() -> None:
    policy = quick()
    assert first_of_both(policy, said(policy, true=True)) == "silent"


def test_what_is_said_is_worth_nothing_where_it_was_not_true() -> None:
    policy = quick()
    assert first_of_both(policy, said(policy, true=False)) == "says"
