"""The sweeper's clock, with the real scheduler. Nothing here depends on how fast the machine is."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

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


def test_it_asks_again_and_again_and_rings_only_on_yes() -> None:
    asked = 0
    rung_at: list[int] = []
    rung = threading.Event()

    def due() -> bool:
        nonlocal asked
        asked += 1
        return asked == 3

    def wake() -> None:
        rung_at.append(asked)
        rung.set()

    with running(Sweeper(IDLE_AFTER_S, due, wake)):
        assert rung.wait(PATIENCE_S)
    assert rung_at == [3]


def test_it_works_on_a_thread_of_its_own() -> None:
    threads: list[threading.Thread] = []
    rung = threading.Event()

    def wake() -> None:
        threads.append(threading.current_thread())
        rung.set()

    with running(Sweeper(IDLE_AFTER_S, lambda: True, wake)):
        assert rung.wait(PATIENCE_S)
    assert threads[0] is not threading.main_thread()
    assert threads[0].daemon  # it never keeps a process alive


def test_a_process_that_ends_without_stopping_it_says_nothing() -> None:
    script = """
import atexit, time
from manthan.manager.sweeper import Sweeper
atexit.register(time.sleep, 0.3)
Sweeper(0.04, lambda: False, lambda: None).start()
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("", "")


@pytest.mark.parametrize(("idle_after_s", "every_s"), [(40.0, 10.0), (2.0, 0.5), (0.001, SHORTEST_S)])
def test_it_looks_at_the_latest_a_quarter_of_the_idle_time_late(idle_after_s: float, every_s: float) -> None:
    with running(sweeper := Sweeper(idle_after_s, lambda: False, lambda: None)):
        (job,) = sweeper._scheduler.get_jobs()
        assert job.trigger.interval.total_seconds() == every_s
