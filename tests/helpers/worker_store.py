"""On a worker: what tests do to the compressed blocks of the only session in its store, and to who reads them. To be
sent with `Engine.on_worker`."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer import get_kv_transfer_group

if TYPE_CHECKING:
    from vllm_engine import Engine


def in_order(worker: Any) -> list[tuple[int, bytes, Any]]:
    """Group, block hash and bytes of each compressed block, from the session's first one on; the bytes are copies."""
    from manthan.codec import wire

    store = get_kv_transfer_group().worker.engine.store
    found = [(group, key, next(store.read(group, [key]))) for group, key in list(store._blocks)]
    return sorted(found, key=lambda block: wire.parse(block[2]).header.first_token)


def damage(worker: Any, depth: int, at: int = 5000) -> None:
    """One byte of a compressed block changes; depth: its index in the session, or from the end if negative."""
    group, key, buf = in_order(worker)[depth]
    buf[at] ^= 1
    assert get_kv_transfer_group().worker.engine.store.put_all(group, {key: buf}) == {}


def lose(worker: Any, depth: int) -> None:
    """A compressed block is not there any more; depth: as above."""
    group, key, _ = in_order(worker)[depth]
    get_kv_transfer_group().worker.engine.store.drop(group, [key])


def count(worker: Any) -> int:
    """How many blocks there are."""
    return len(get_kv_transfer_group().worker.engine.store._blocks)


@contextmanager
def gate(engine: "Engine") -> Iterator[None]:
    """Whoever reads the store in the body waits for its end."""
    engine.on_worker(close_gate)
    try:
        yield
    finally:
        engine.on_worker(open_gate)


def close_gate(worker: Any) -> None:
    import threading

    store = get_kv_transfer_group().worker.engine.store
    store.gate, store.at_gate = threading.Event(), 0

    def read(group: int, keys: Any, tenant: str = "") -> Any:
        store.at_gate += 1
        assert store.gate.wait(600)  # longer than any test waits
        return type(store).read(store, group, keys)

    store.read = read


def at_gate(worker: Any) -> int:
    """How many have come to read."""
    return int(get_kv_transfer_group().worker.engine.store.at_gate)


def open_gate(worker: Any) -> None:
    get_kv_transfer_group().worker.engine.store.gate.set()


def compiled(worker: Any) -> dict[str, list[Any]]:
    """What numba has compiled, or loaded from its cache, in a worker, by the function's name."""
    found = {}
    module = sys.modules.get("manthan.codec.cpu.numba_kernels")
    for function, made in vars(module).items() if module else ():
        if hasattr(made, "stats"):
            misses, hits = made.stats.cache_misses, made.stats.cache_hits
            found[function] = [len(made.signatures), sum(misses.values()), sum(hits.values())]
    return found
