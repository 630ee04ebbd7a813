"""Replays a request trace through the session memory manager and a policy, without a GPU or a clock.

    tally = replay(trace.requests, Setup(policy=get_policy("lru"), hot_blocks=4000, cold_blocks=20000))

What it takes from reality and what is simplified is said in docs/simulate.md.
"""

import gc
from collections.abc import Callable, Sequence

from manthan.manager.integrity import IntegrityError
from manthan.manager.sessions.integrity import check_integrity
from manthan.manager.simulator.engine import EngineReplay
from manthan.manager.simulator.replay import OneCacheReplay, Replay, Setup, Tally
from manthan.manager.simulator.traces import TracedRequest


def spare_collector() -> None:
    """Have Python look for garbage less often, in a process that does nothing but replay traces. The trace stays, and
    what a replay makes stays for long and is hardly ever in cycles: looking through it after each 700 new objects finds
    nothing, and took a tenth of the time."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def replay(
    requests: Sequence[TracedRequest],
    setup: Setup,
    progress: Callable[[int], None] = lambda _: None,
    journal: bool = False,
    check: bool = False,
) -> Tally:
    """Replay requests, which are in the order of their arrival.

    progress: called every PROGRESS_EVERY requests with the number of those that have come. journal: whether to note
    every action. check: whether to look each time, and in the end, if the manager's books agree with themselves; raises
    IntegrityError if they do not. Raises ValueError if a request does not fit into the pool.
    """
    world: Replay = (EngineReplay if setup.hot_blocks else OneCacheReplay)(requests, setup, journal)

    def look(number: int) -> None:
        progress(number)
        if check:
            try:
                check_integrity(world.manager)
            except IntegrityError as error:
                raise IntegrityError(f"after {number} requests: {error}") from None

    world.run(look)
    look(len(requests))
    return world.tally
