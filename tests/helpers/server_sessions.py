"""Where the sessions of a server are, and what became of their codes, from its metrics."""

from collections import Counter
from collections.abc import Iterable

from manthan.benchmarks.endpoint import Endpoint
from manthan.benchmarks.server import VllmServer

PREFIX = "vllm:manthan_"
WARM = ("hot", "idle", "evicting")


def has_no(endpoint: Endpoint, states: Iterable[str]) -> bool:
    """Whether it has told of sessions, and none is in these states."""
    found = {labels["state"]: value for name, labels, value in endpoint.samples() if name == f"{PREFIX}sessions"}
    return bool(found) and not any(found[state] for state in states)


def wait_until_cold(server: VllmServer) -> None:
    server.wait_for(lambda: has_no(server, WARM), 60, "have everybody go cold")


def restored(endpoint: Endpoint) -> float:
    """Blocks, so far."""
    return endpoint.metrics().get(f"{PREFIX}restored_blocks_total", 0)


def failures(endpoint: Endpoint) -> Counter[str]:
    """Blocks that could not be stored or restored, so far, by cause."""
    told = [sample for sample in endpoint.samples() if sample[0] == f"{PREFIX}failures_total"]
    return +Counter({labels["cause"]: int(value) for _, labels, value in told})
