"""Names, salts and times that clients make up leave nothing behind."""

import gc
import tracemalloc
from math import inf

import pytest
from talks import SHAPE

from manthan.benchmarks.simulator.pool import SimulatedPool
from manthan.manager.driver import Driver
from manthan.manager.events import Events
from manthan.manager.session.hints import Hints
from manthan.manager.session.manager import SessionManager
from manthan.policies import get_policy

MANY = 750


@pytest.mark.parametrize(("name", "tenant"), [("session-%d", ""), (None, "salt-%d")])
def test_nothing_is_left_of_sessions_that_are_gone(name: str | None, tenant: str) -> None:
    manager = SessionManager(get_policy("lru"), SHAPE, 10**9, 300.0, Events())
    pool = SimulatedPool(16)
    driver = Driver(manager, pool)
    hints = Hints(release=True, ttl_s=1e6, priority=3)

    def ask(n: int) -> None:
        hashes, told = [n.to_bytes(32, "big")], {"hints": hints, "tenant": tenant and tenant % n}
        driver.started(manager.request_started("r", hashes, name and name % n, float(n), tokens=17, **told), 1)
        driver.finished("r", hashes, n + 0.5, 17)
        driver.step(0, n + 0.5)

    ask(0)
    gc.collect()
    tracemalloc.start()
    for n in range(1, MANY):
        ask(n)
    gc.collect()
    ours = [tracemalloc.Filter(True, f"*/manthan/{package}/*") for package in ("manager", "policies")]
    traces = tracemalloc.take_snapshot().filter_traces(ours)  # other threads of this process may allocate as well
    tracemalloc.stop()
    left = sum(each.size for each in traces.statistics("filename"))
    assert not manager.table.by_id
    assert len(manager.blocks) == 0
    assert driver.next_deadline == inf
    assert left < 2**15
