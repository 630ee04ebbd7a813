"""The codec follows what ranks measure: the finest first, and changes in both directions."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from talks import GROUP, IDLE_AFTER_S, SHAPE, Talks

from manthan.codec.fidelity import LOGIT_NOISE, Fidelity
from manthan.manager.events import Event, Judged, Unjudged, Verdict
from manthan.manager.guard import MOST_DIVERGENCE, RECHECKS, Choice, Guard
from manthan.manager.session.blocks import MemoryShape
from manthan.vllm_hooks.scheduler_half import SchedulerHalf

FINER = MemoryShape({0: replace(GROUP, bounds={0: 140, 4: 180, 16: 500}, codec="finer")})
WHOLE = MemoryShape({0: replace(GROUP, bounds=dict.fromkeys((0, 4, 16), 500))})


def fidelity(codec: str, noise: float, decode_s: float = 0.0) -> Fidelity:
    layers = np.full(3, noise * LOGIT_NOISE, np.float32)
    return Fidelity(codec, 256, layers, layers, decode_s)


def verdict(coarse: float, finer: float = 0.1, rank: int = 0) -> Verdict:
    """Noise of both codecs, as shares of the limit."""
    return Verdict(rank, [fidelity("coarse", coarse), fidelity("finer", finer)])


class World:
    def __init__(self, ranks: int = 1, is_approved: bool = False) -> None:
        self.talks = Talks(holds=True)
        self.manager = self.talks.manager
        self.codecs: list[str | None] = []
        self.slow: list[bool] = []
        self.fallbacks: list[bool] = []
        self.news: list[bool] = []
        self.manager.events.subscribe(self._happened)
        choices = [Choice(SHAPE, 10_099), Choice(FINER, 9_999), Choice(WHOLE, 8_888)]
        self.guard = Guard(self.manager, choices, ranks, is_approved)

    def _happened(self, event: Event) -> None:
        match event:
            case Judged():
                self.codecs.append(event.codec)
                self.slow.append(event.is_slow)
                self.fallbacks.append(event.is_fallback)
                self.news.append(event.is_new)
            case Unjudged():
                self.codecs.append(None)

    def used(self, *verdicts: Verdict) -> MemoryShape:
        """Return what blocks are encoded in after these."""
        self.guard.answered(verdicts)
        return self.manager.shape

    def stored(self, name: str) -> list[tuple[str, list[int], int]]:
        """Have another session of two blocks be saved. Return codec, exact tokens and bytes of the stores."""
        before = self.manager.blocks.reserved_nbytes
        self.talks.talk(f"{name}1 {name}2", name)
        self.talks.now += IDLE_AFTER_S
        stores = self.talks.step().stores
        return [(job.codec, job.exacts(16), self.manager.blocks.reserved_nbytes - before) for job in stores]


def test_sessions_go_cold_before_a_verdict_in_the_finest_codec() -> None:
    world = World()
    assert world.stored("one") == [("finer", [0, 0], 280)]
    assert world.manager.budget_nbytes == 9_999
    assert world.used(verdict(0.5)) is SHAPE
    assert world.stored("two") == [("", [0, 0], 200)]


def test_a_codec_that_an_earlier_server_approved_is_used_at_once_until_it_is_refused_or_weights_are_new() -> None:
    world = World(is_approved=True)
    assert world.stored("one") == [("", [0, 0], 200)]
    assert world.used(verdict(1.5)) is FINER
    world = World(is_approved=True)
    world.guard.reset()
    assert world.manager.shape is FINER
    assert world.used(verdict(0.5)) is SHAPE


def test_it_opens_and_closes() -> None:
    world = World()
    assert world.used(verdict(0.5)) is SHAPE
    assert world.used(verdict(9.0)) is FINER
    assert world.used(verdict(9.0, 9.0)) is WHOLE
    assert world.stored("one") == [("", [16, 16], 1000)]
    assert world.used(verdict(9.0)) is FINER
    assert world.used(verdict(0.5)) is SHAPE
    assert world.stored("two") == [("", [0, 0], 200)]
    assert world.codecs == ["coarse", "finer", "exact", "finer", "coarse"]


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
    assert (world.manager.shape, world.codecs) == (FINER, [])
    assert world.used(answers[2]) is FINER
    assert world.codecs == ["finer"]
    assert world.used(verdict(0.1, rank=1)) is SHAPE


def test_a_measurement_that_failed_means_the_finest_codec_that_is_lossy() -> None:
    world = World()
    assert world.used(Verdict(0)) is FINER
    assert world.used(verdict(0.1)) is SHAPE
    assert world.used(Verdict(0)) is FINER
    assert world.used(verdict(9.0, 9.0)) is WHOLE
    assert world.used(Verdict(0)) is FINER


def test_a_verdict_from_before_an_offer_says_nothing_about_the_offered_codec() -> None:
    world = World()
    assert world.used(verdict(0.1)) is SHAPE
    coarsest = replace(SHAPE)
    world.guard.offer(Choice(coarsest, 10_199))
    assert world.used(verdict(0.1)) is SHAPE
    assert world.used(Verdict(0, [fidelity("new", 0.1), *verdict(0.1).measured])) is coarsest


def test_rechecks_of_one_codec_do_not_count_against_the_next() -> None:
    world = World()
    world.used(verdict(0.1))
    for _ in range(RECHECKS - 1):
        assert world.guard.rechecked(2 * MOST_DIVERGENCE) is None
    assert world.used(verdict(9.0)) is FINER
    assert world.guard.rechecked(0.0) is None
    assert world.manager.shape is FINER


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
    times = zip(found.measured, (first_s, 0.1), strict=True)
    measured = [replace(each, decode_s=seconds) for each, seconds in times]
    world.used(Verdict(0, measured, compute_s))
    assert world.codecs == [codec]


@pytest.mark.parametrize(
    ("first_s", "second_s", "codec"), [(9.0, 0.1, "finer"), (9.0, 9.0, "exact"), (0.1, 0.1, "coarse")]
)
def test_nor_is_the_configured_one(first_s: float, second_s: float, codec: str) -> None:
    world = World()
    times = zip(verdict(0.5).measured, (first_s, second_s), strict=True)
    measured = [replace(each, decode_s=seconds) for each, seconds in times]
    world.used(Verdict(0, measured, 1.0))
    assert world.codecs == [codec]
    assert world.slow == [codec != "coarse"]
    config = SimpleNamespace(codec=SimpleNamespace(name="configured"))
    half: Any = SimpleNamespace(guard=world.guard, manager=world.manager, config=config)
    used = SchedulerHalf.used_codec.fget(half)  # type: ignore[attr-defined]
    assert used == {"coarse": "configured"}.get(codec, codec)


def test_a_codec_that_is_offered_is_used_when_it_is_faithful_and_no_sooner() -> None:
    world = World()
    assert world.used(verdict(0.5)) is SHAPE
    offered = MemoryShape({0: replace(GROUP, codec="offered")})
    world.guard.offer(Choice(offered, 20_099))
    assert world.manager.shape is SHAPE
    measured = [fidelity("offered", 9.0), *verdict(0.5).measured]
    assert world.used(Verdict(0, measured)) is SHAPE
    assert world.news == [True, True], "its refusal is told"
    assert world.fallbacks == [False, False], "the configured codec is still used"
    measured[0] = fidelity("offered", 0.9)
    assert world.used(Verdict(0, measured)) is SHAPE, "there is no room to spare"
    measured[0] = fidelity("offered", 0.5)
    assert world.used(Verdict(0, measured)) is offered
    assert world.manager.budget_nbytes == 20_099
    assert world.used(Verdict(0, [fidelity("offered", 9.0), *verdict(9.0).measured])) is FINER
    assert world.fallbacks == [False, False, False, False, True]
    world.guard.reset()
    assert world.manager.shape is FINER
    assert world.codecs == ["coarse", "coarse", "coarse", "offered", "finer", None]


def recheck(world: World, *divergences: float) -> MemoryShape:
    for each in divergences:
        world.guard.rechecked(each)
    return world.manager.shape


def test_rechecks_that_diverge_on_average_refuse_a_codec_and_fewer_never_do() -> None:
    world = World()
    assert world.used(verdict(0.5)) is SHAPE
    assert recheck(world, *[99.0] * (RECHECKS - 1)) is SHAPE
    assert world.guard.rechecked(99.0) == 99
    assert world.manager.shape is FINER
    assert world.used(verdict(0.1)) is FINER, "the noise does not matter any more"
    assert recheck(world, *[99.0] * (RECHECKS - 1)) is FINER, "of the finer codec nothing is known"
    assert recheck(world, 99.0) is WHOLE
    assert recheck(world, *[99.0] * RECHECKS) is WHOLE
    assert world.used(Verdict(0)) is WHOLE, "nor a measurement that fails"
    assert world.codecs == ["coarse", "finer", "finer", "exact", None]
    world.guard.reset()
    assert world.used(verdict(0.5)) is SHAPE, "other weights are others"


def test_single_rechecks_that_diverge_refuse_nothing() -> None:
    world = World()
    assert world.used(verdict(0.5)) is SHAPE
    assert recheck(world, *[0.0] * RECHECKS, 0.9 * RECHECKS * MOST_DIVERGENCE) is SHAPE
    assert recheck(world, 0.2 * RECHECKS * MOST_DIVERGENCE) is FINER


def test_rechecks_refuse_a_codec_before_the_first_verdict() -> None:
    world = World(ranks=2)
    assert recheck(world, *[1.0] * RECHECKS) is WHOLE
    assert world.codecs == []


def test_a_codec_coarser_than_a_refused_one_is_refused() -> None:
    world = World()
    assert world.used(verdict(0.5)) is SHAPE
    assert recheck(world, *[1.0] * RECHECKS) is FINER
    world.guard.offer(Choice(MemoryShape({0: replace(GROUP, codec="offered")}), 20_099))
    assert world.used(Verdict(0, [fidelity("offered", 0.1), *verdict(0.1).measured])) is FINER
