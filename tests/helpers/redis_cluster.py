"""A Redis Cluster of three nodes on this machine, without replicas."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from redis_server import RedisServer, free_port

SLOTS = 16384


@contextmanager
def running_cluster(folder: Path, count: int = 3) -> Iterator[list[RedisServer]]:
    with ExitStack() as stack:
        nodes = []
        for number in range(count):
            home = folder / f"node-{number}"
            home.mkdir()
            bus = free_port()
            flags = ["--cluster-enabled", "yes", "--cluster-port", str(bus)]
            nodes.append(stack.enter_context(RedisServer(home, flags)))
            nodes[0].client.execute_command("CLUSTER", "MEET", "127.0.0.1", nodes[number].port, bus)
        for number, node in enumerate(nodes):
            first, end = (at * SLOTS // count for at in (number, number + 1))
            node.client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, end - 1)
        wait_until_ok(nodes)
        yield nodes


def wait_until_ok(nodes: list[RedisServer]) -> None:
    """Until every node knows where every slot is."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        answers = [str(node.client.execute_command("CLUSTER", "INFO")) for node in nodes]
        if all("cluster_state:ok" in answer and f"cluster_size:{len(nodes)}" in answer for answer in answers):
            return
        time.sleep(0.05)
    raise AssertionError(f"the cluster did not come up: {answers}")


def cluster_url(nodes: list[RedisServer]) -> str:
    return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes)
