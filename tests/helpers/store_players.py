"""Other processes that use a store which one serves: functions that a spawned process can import."""

import os
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from manthan.manager.stores.arena import room
from manthan.manager.stores.served import RemoteStore


def refused(name: str) -> None:
    os.setuid(65534)
    assert RemoteStore(name, room).put_all(0, {b"key": np.zeros(10, np.uint8)}) == {b"key": "store_down"}


def play(name: str, seed: int, blocks: int) -> None:
    """Puts blocks of this seed from several threads, and reads each as it was put."""
    store = RemoteStore(name, room)
    rng = random.Random(seed)
    bufs = {rng.randbytes(32): np.frombuffer(rng.randbytes(rng.randrange(1, 300_000)), np.uint8) for _ in range(blocks)}

    def one(keys: list[bytes]) -> None:
        assert store.put_all(1, {key: bufs[key] for key in keys}) == {}
        for key, buf in zip(keys, store.read(1, keys), strict=True):
            assert buf is not None
            assert np.array_equal(buf, bufs[key])

    with ThreadPoolExecutor(3) as threads:
        keys = list(bufs)
        list(threads.map(one, [keys[at : at + 11] for at in range(0, blocks, 11)]))
    store.close()
