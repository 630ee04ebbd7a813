"""Replays a request trace through the session memory manager and a policy, without a GPU or a clock.

    tally = replay(trace.requests, Setup(policy=get_policy("lru"), hot_blocks=4000, cold_blocks=20000))

What it takes from reality and what is simplified is said in docs/simulate.md.
"""

from collections.abc import Callable, Sequence

from manthan.manager.simulator.engine import EngineReplay
from manthan.manager.simulator.replay import OneCacheReplay, Replay, Setup, Tally
from manthan.manager.simulator.traces import TracedRequest


def replay(
    requests: Sequence[TracedRequest],
    setup: Setup,
    progress: Callable[[int], None] = lambda _: None,
    journal: bool = False,
) -> Tally:
    """Replay requests, which are in the order of their arrival.

    progress: called now and then with the number of requests that have come. journal: whether to note every action.
    Raises ValueError if a request does not fit into the pool.
    """
    world: Replay = (EngineReplay if setup.hot_blocks else OneCacheReplay)(requests, setup, journal)
    world.run(progress)
    progress(len(requests))
    return world.tally
