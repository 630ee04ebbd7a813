"""The codec follows what ranks measure: the finest first, and changes in both directions."""

from collections.abc import Sequence

import numpy as np
import pytest
from engine import SHAPE, Engine
from spills import take_spills

from manthan.codec.fidelity import LOGIT_NOISE, Fidelity
from manthan.manager.guard import Choice, Guard
from manthan.manager.observer import Judgement, Observer
from manthan.manager.sessions.session import MemoryShape
from manthan.manager.work import Verdict

FINER = MemoryShape(16, 500, {0: 140, 4: 180, 16: 500}, codec="finer")
WHOLE = MemoryShape(16, 500, dict.fromkeys((0, 4, 16), 500))


def fidelity(codec: str, noise: float, decode_s: float = 0.0) -> Fidelity:
    layers = np.full(3, noise * LOGIT_NOISE, np.float32)
    return Fidelity(codec, 256, layers, layers, decode_s)


def verdict(coarse: float, finer: float = 0.1, rank: int = 0) -> Verdict:
    """Noise of both codecs, as shares of the limit."""
    return Verdict(rank, [fidelity("coarse", coarse), fidelity("finer", finer)])


class Told(Observer):
    def __init__(self) -> None:
        self.codecs: list[str | None] = []
        self.slow: list[bool] = []

    def judged(self, judgement: Judgement | None) -> None:
        self.slow.append(judgement is not None and judgement.is_slow)
        self.codecs.append(None if judgement is None else judgement.codec)


class World:
    def __init__(self, ranks: int = 1) -> None:
        self.engine, self.told = Engine(), Told()
        self.manager = self.engine.manager
        choices = [Choice(SHAPE, 10_099), Choice(FINER, 9_999), Choice(WHOLE, 8_888)]
        self.guard = Guard(self.manager, choices, ranks, self.told)

    def used(self, *verdicts: Verdict) -> MemoryShape:
        """What blocks are encoded in after these."""
        self.guard.answered(verdicts)
        return self.manager.shape

    def orders(self, name: str) -> list[tuple[str, int, int]]:
        """What is ordered for another session: codec, exact tokens and bytes of each block."""
        self.engine.talk(f"{name}1 {name}2", name)
        self.engine.sweep()
        return [(order.codec, order.exact, order.nbytes) for order in take_spills(self.manager, 10)]


def test_sessions_go_cold_before_a_verdict_in_the_finest_codec() -> None:
    world = World()
    assert world.orders("one") == [("finer", 0, 140)] * 2
    assert world.manager.budget.nbytes == 9_999
    assert world.used(verdict(0.5)) is SHAPE
    assert world.orders("two") == [("", 0, 100)] * 2


def test_it_opens_and_closes() -> None:
    world = World()
    assert world.used(verdict(0.5)) is SHAPE
    assert world.used(verdict(9.0)) is FINER
    assert world.used(verdict(9.0, 9.0)) is WHOLE
    assert world.orders("one") == [("", 16, 500)] * 2
    assert world.used(verdict(9.0)) is FINER
    assert world.used(verdict(0.5)) is SHAPE
    assert world.orders("two") == [("", 0, 100)] * 2
    assert world.told.codecs == ["coarse", "finer", "exact", "finer", "coarse"]


def test_it_does_not_flap_about_the_limit() -> None:
    world = World()
    assert world.used(verdict(0.95)) is SHAPE
    assert world.used(verdict(1.05)) is FINER
    assert world.used(verdict(0.95)) is FINER
    assert world.used(verdict(0.75)) is SHAPE
    assert world.used(verdict(0.95)) is SHAPE


@pytest.mark.parametrize("order", [1, -1])
def test_the_worst_rank_decides_when_all_have_answered(order: int) -> None:
    world = World(ranks=3)
    answers: Sequence[Verdict] = [verdict(0.1, rank=0), verdict(9.0, rank=1), verdict(0.2, rank=2)][::order]
    world.guard.answered(answers[:2])
    assert (world.manager.shape, world.told.codecs) == (FINER, [])
    assert world.used(answers[2]) is FINER
    assert world.told.codecs == ["finer"]
    assert world.used(verdict(0.1, rank=1)) is SHAPE


def test_a_measurement_that_failed_means_the_finest_codec_that_is_lossy() -> None:
    world = World()
    assert world.used(Verdict(0)) is FINER
    assert world.used(verdict(0.1)) is SHAPE
    assert world.used(Verdict(0)) is FINER
    assert world.used(verdict(9.0, 9.0)) is WHOLE
    assert world.used(Verdict(0)) is FINER


def test_other_weights_are_measured_anew() -> None:
    world = World()
    assert world.used(verdict(0.1)) is SHAPE
    world.guard.reset()
    assert world.manager.shape is FINER


@pytest.mark.parametrize(("compute_s", "codec"), [(0.0, "finer"), (1e-3, "exact"), (1.0, "finer")])
@pytest.mark.parametrize("first_s", [0.0, 0.09])
def test_no_codec_is_chosen_that_takes_longer_than_to_compute(compute_s: float, codec: str, first_s: float) -> None:
    world = World()
    found = verdict(9.0)
    measured = [found.measured[0].timed(first_s), found.measured[1].timed(0.1)]
    world.used(Verdict(0, measured, compute_s))
    assert world.told.codecs == [codec]


@pytest.mark.parametrize(
    ("first_s", "second_s", "codec"), [(9.0, 0.1, "finer"), (9.0, 9.0, "exact"), (0.1, 0.1, "coarse")]
)
def test_nor_is_the_configured_one(first_s: float, second_s: float, codec: str) -> None:
    world = World()
    measured = [each.timed(seconds) for each, seconds in zip(verdict(0.5).measured, (first_s, second_s), strict=True)]
    world.used(Verdict(0, measured, 1.0))
    assert world.told.codecs == [codec]
    assert world.told.slow == [codec != "coarse"]


def test_blocks_of_the_codec_before_stay_what_they_are() -> None:
    """A switch at any time: what is queued keeps its codec and its bytes, and what comes later has the other's."""
    engine = Engine()
    engine.talk("a b", "one")
    engine.sweep()
    engine.manager.recode(FINER, 5_000)
    engine.talk("x y", "two")
    engine.sweep()
    orders = take_spills(engine.manager, 10)
    assert [(order.key[-1:], order.codec, order.nbytes) for order in orders] == [
        (b"b", "", 100),
        (b"a", "", 100),
        (b"y", "finer", 140),
        (b"x", "finer", 140),
    ]
    assert engine.manager.blocks.reserved == 480
