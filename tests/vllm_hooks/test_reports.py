"""What the log and the metrics say of sessions with windows and states beside full attention."""

import logging

import jobs
import pytest
from logged import said
from spills import spilled, take_spills

from manthan.manager.driver import Driver
from manthan.manager.sessions.manager import SessionMemoryManager
from manthan.manager.sessions.session import MemoryShape, Place
from manthan.manager.simulator.pool import SimulatedPool
from manthan.policies import get_policy
from manthan.vllm_hooks.telemetry.telemetry import Telemetry

CHAIN, STATE, WINDOW = 0, 1, 2
SHAPE = MemoryShape(
    96, 9600, {0: 2400}, CHAIN, beside={STATE: {0: 4000}, WINDOW: {0: 500}}, hot_beside={STATE: 4000, WINDOW: 2000}
)
KEYS = [bytes([n]) * 32 for n in range(8)]
BESIDE = [(STATE, KEYS[7], 7), (WINDOW, KEYS[6], 6), (WINDOW, KEYS[7], 7)]


class Told:
    """A session of eight blocks and three beside them that goes cold, and what is told of it."""

    def __init__(self) -> None:
        self.manager = manager = SessionMemoryManager(get_policy("lru"), SHAPE, 1 << 20, idle_after_s=10)
        self.telemetry = Telemetry(manager)
        self.driver = Driver(manager, SimulatedPool(64), 64, 0.1, 0.2, observer=self.telemetry)
        manager.request_started("first", KEYS, "s", 0.0)
        manager.request_finished("first", KEYS, 0.0, places=[Place(len(KEYS), BESIDE)])
        manager.sweep(20.0)
        for order in take_spills(manager, 100):
            spilled(manager, order.key, order.nbytes, 20.5, order.group)

    def restore(self, cause: str = "") -> str:
        """The line that says what came back. cause: why a block of the window did not."""
        driver = self.driver
        driver.started("again", KEYS, "s", 30.0, tokens=8 * 96 + 1, blocks=9)
        parts = (STATE, [KEYS[7]], [9]), (WINDOW, KEYS[6:], [10, 11])
        driver.restoring("again", KEYS, list(range(1, 9)), parts)
        with said(logging.INFO) as lines:
            chains, state, window = driver.loads_of("again")
            bad = {1: cause} if cause else {}
            driver.answered([jobs.done(chains, 2400), jobs.done(window, 500, bad, 0.004), jobs.done(state, 4000)], 30.1)
        [line] = [line for line in lines if "restored" in line]
        return line

    def count(self, name: str) -> int:
        return sum(self.telemetry._stats._counters[name].values())


@pytest.fixture
def told() -> Told:
    return Told()


def test_an_eviction_tells_bytes_of_all_groups(told: Told) -> None:
    with said(logging.INFO) as lines:
        told.driver.tell_news()
    hot, cold = 8 * 9600 + 4000 + 2 * 2000, 8 * 2400 + 4000 + 2 * 500
    what = f"8 blocks (768 tokens) and 3 of windows or states, 82.8KiB to 23.6KiB ({hot / cold:.2f}x), 8 encoded"
    assert [line for line in lines if what in line]


def test_a_restore_tells_tokens_of_the_chain_only(told: Told) -> None:
    line = told.restore()
    assert line == ("Manthan: session s restored 8 of 8 blocks (768 tokens) and 3 of windows or states in 4 ms")
    assert told.count("restored_blocks") == 11


def test_of_a_load_that_failed_nothing_is_restored(told: Told) -> None:
    line = told.restore("checksum")
    assert "restored 0 of 8 blocks (0 tokens) in 4 ms; the rest could not be read (checksum)" in line
    assert told.count("restored_blocks") == 0
    assert told.telemetry._stats._counters["failures"] == {"checksum": 1}


def test_gauges_are_of_all_groups(told: Told) -> None:
    gauges = told.telemetry._stats._gauges()
    assert gauges["anchors"] == {"": 1}
    assert gauges["cold_bytes"] == {"": 8 * 2400 + 4000 + 2 * 500}
    assert gauges["compression_ratio"] == {"": round((8 * 9600 + 4000 + 2 * 2000) / (8 * 2400 + 4000 + 2 * 500), 4)}
    told.manager.reset()
    assert told.telemetry._stats._gauges()["anchors"] == {"": 0}
