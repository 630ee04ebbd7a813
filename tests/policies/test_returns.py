"""Our own policy: it learns who comes back and when, and keeps those."""

import random

import numpy as np
import pytest

from manthan.policies import SessionView
from manthan.policies.return_model import AGES, HORIZON, PIECES, History, ReturnModel, features_of
from manthan.policies.returns import Mixture, Returns, ReturnsOptions


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
    assert hot.model.count == 8


def test_hazards_are_found_that_made_the_data() -> None:
    """Exponential returns, three times as fast after a call of a tool: the rates and their ratio are found."""
    chance = random.Random(1)
    model = ReturnModel(window=8192, refit_every=64, prior=1.0)
    events: list[tuple[float, SessionView]] = []
    for i in range(4000):
        ending = ("tool_use", "end_turn")[i % 2]
        gap = chance.expovariate(0.01 if i % 2 else 0.03)
        events.append((i * 1.0, view(f"s{i}", i * 1.0)._replace(ending=ending)))
        if i + gap < 4000:
            events.append((i + gap, view(f"s{i}", i + gap, 9, gap, added=200_000)))
    for _, session in sorted(events, key=lambda event: event[0]):
        model.observe(session)
    tool, text = (
        model.hazard(features_of(view("x", 4000.0)._replace(ending=ending), History()))
        for ending in ("tool_use", "end_turn")
    )
    for piece in (AGES.index(8), AGES.index(33), AGES.index(75)):
        assert tool[piece] == pytest.approx(0.03, rel=0.35)
        assert text[piece] == pytest.approx(0.01, rel=0.35)


def test_a_request_told_after_the_next_one_began_teaches_nothing() -> None:
    policy = Returns()
    for uses, at in ((1, 0.0), (2, 10.0)):
        policy.used(view("s", at, uses, 10.0 if uses > 1 else None))
    model = policy.model
    returned, pauses = model._returned.copy(), model._open["s"].pauses
    policy.used(view("s", 1.0, 1))
    assert (model.count, model._open["s"].uses, model._open["s"].pauses) == (2, 2, pauses)
    assert np.array_equal(model._returned, returned, equal_nan=True)


def test_a_session_that_always_pauses_long_is_expected_later() -> None:
    policy, chance, now = quick(), random.Random(2), 0.0
    sessions = {f"s{i}": (chance.uniform(0, 100), 1, None) for i in range(40)}
    for _ in range(1500):
        name = min(sessions, key=lambda key: sessions[key][0])
        now, uses, gap = sessions[name]
        policy.used(view(name, now, uses, gap))
        away = chance.lognormvariate(np.log(200 if name < "s2" else 15), 0.3)
        sessions[name] = now + away, uses + 1, away
    policy.used(view("s11", now + 400, sessions["s11"][1], 200.0))
    policy.used(view("s30", now + 400, sessions["s30"][1], 15.0))
    order = list(policy.victims())
    assert order.index("s11") < order.index("s30")


@pytest.mark.parametrize("seed", range(5))
def test_the_index_is_the_best_rate_of_all_moments_to_stop(seed: int) -> None:
    """Compared with a plain sum over each first and last piece."""
    rng, model = np.random.default_rng(seed), ReturnModel(window=64, refit_every=64, prior=8.0)
    model.coefficients[:, 0] = rng.normal(-5, 1, PIECES)
    x = [1.0, *[0.0] * (model.coefficients.shape[1] - 1)]
    hazard, index, ends = model.hazard(x), model.index(x), [0, *AGES, HORIZON]
    for first in range(PIECES):
        rates, waiting, chance, seconds = [], 1.0, 0.0, 0.0
        for piece in range(first, PIECES):
            returns = 1 - np.exp(-hazard[piece] * (ends[piece + 1] - ends[piece]))
            chance += waiting * returns
            seconds += waiting * returns / hazard[piece]
            waiting *= 1 - returns
            rates.append(chance / seconds)
        assert index[first] == pytest.approx(max(rates), rel=1e-3)


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
