"""The sweeper's clock, with the real scheduler. Nothing here depends on how fast the machine is."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from apscheduler.events import EVENT_JOB_MAX_INSTANCES

from manthan.manager.sweeper import SHORTEST_S, Sweeper

IDLE_AFTER_S = 0.04
PATIENCE_S = 30.0


@contextmanager
def running(sweeper: Sweeper) -> Iterator[None]:
    sweeper.start()
    try:
        yield
    finally:
        sweeper.stop()


def test_it_rings_when_something_is_due() -> None:
    rung = threading.Event()
    with running(Sweeper(IDLE_AFTER_S, lambda: True, rung.set)):
        assert rung.wait(PATIENCE_S)


def test_it_asks_again_and_again_and_rings_only_on_yes() -> None:
    asked = 0
    rung_at: list[int] = []
    rung = threading.Event()

    def due() -> bool:
        nonlocal asked
        asked += 1
        return asked == 3

    def ring() -> None:
        rung_at.append(asked)
        rung.set()

    with running(Sweeper(IDLE_AFTER_S, due, ring)):
        assert rung.wait(PATIENCE_S)
    assert rung_at == [3]


def test_it_works_on_a_thread_of_its_own() -> None:
    threads: list[threading.Thread] = []
    rung = threading.Event()

    def ring() -> None:
        threads.append(threading.current_thread())
        rung.set()

    with running(Sweeper(IDLE_AFTER_S, lambda: True, ring)):
        assert rung.wait(PATIENCE_S)
    assert threads[0] is not threading.main_thread()
    assert threads[0].daemon  # it never keeps a process alive


def test_an_error_does_not_stop_the_clock() -> None:
    asked = 0
    rung = threading.Event()

    def due() -> bool:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise RuntimeError("once")
        return True

    with running(Sweeper(IDLE_AFTER_S, due, rung.set)):
        assert rung.wait(PATIENCE_S)


def test_nothing_is_said_of_a_call_that_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """Also where somebody has had the logger say all, as vLLM does with its own when it is imported."""
    logging.getLogger("vllm.manthan.sweeper").setLevel(logging.DEBUG)
    is_over, left_out = threading.Event(), threading.Event()
    sweeper = Sweeper(IDLE_AFTER_S, lambda: is_over.wait(PATIENCE_S), lambda: None)
    sweeper._scheduler.add_listener(lambda _: left_out.set(), EVENT_JOB_MAX_INSTANCES)
    with running(sweeper):
        assert left_out.wait(PATIENCE_S)
        is_over.set()
    assert caplog.messages == []


def test_a_late_sweep_is_run_all_the_same() -> None:
    sweeper = Sweeper(IDLE_AFTER_S, lambda: True, lambda: None)
    with running(sweeper):
        (job,) = sweeper._scheduler.get_jobs()
        assert job.misfire_grace_time is None
        assert job.coalesce


@pytest.mark.parametrize(("idle_after_s", "every_s"), [(40.0, 10.0), (2.0, 0.5), (0.001, SHORTEST_S)])
def test_it_looks_at_the_latest_a_quarter_of_the_idle_time_late(idle_after_s: float, every_s: float) -> None:
    with running(sweeper := Sweeper(idle_after_s, lambda: False, lambda: None)):
        (job,) = sweeper._scheduler.get_jobs()
        assert job.trigger.interval.total_seconds() == every_s


def test_stopping_twice_or_before_the_start_does_nothing() -> None:
    sweeper = Sweeper(IDLE_AFTER_S, lambda: False, lambda: None)
    sweeper.stop()
    sweeper.start()
    sweeper.stop()
    sweeper.stop()
