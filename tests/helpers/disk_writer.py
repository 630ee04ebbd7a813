"""A process that writes to a disk store and is killed, and what must be found afterwards."""

import os
import random
import select
import signal
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from manthan.manager.tiers.disk import DiskTier

KEYS = [f"{number:032d}".encode() for number in range(40)]
MOST_NBYTES = 60_000
BUDGET = 8 << 20
"""Full with a third of all that is written between two kills, so that room is used again."""


def body(key: bytes, version: int) -> NDArray[np.uint8]:
    """What is put under a key for the version-th time: both are in it, and its length and bytes follow from them."""
    seed = xxhash.xxh3_64_intdigest(key, seed=version)
    head = np.frombuffer(version.to_bytes(8, "little") + key, np.uint8)
    return np.concatenate((head, np.random.default_rng(seed).integers(0, 256, seed % MOST_NBYTES, np.uint8)))


def version_of(key: bytes, found: NDArray[np.uint8]) -> int:
    """Raises AssertionError if that was never put under this key."""
    version = int.from_bytes(found[:8].tobytes(), "little")
    assert np.array_equal(found, body(key, version)), f"{key!r}: not what was put"
    return version


def write(folder: Path, version: int, tell: int) -> None:
    """Put and drop until killed; each line says what is about to be done, or was confirmed."""
    store, rng = DiskTier(folder, BUDGET), random.Random(version)
    while True:
        version, key = version + 1, rng.choice(KEYS)
        if rng.random() < 0.8:
            os.write(tell, b"p %s %d\n" % (key, version))
            refused = store.put_all(0, {key: body(key, version)})
            os.write(tell, b"%c %s %d\n" % (b"rP"[not refused], key, version))
        else:
            os.write(tell, b"d %s %d\n" % (key, version))
            store.drop(0, [key])
            os.write(tell, b"D %s %d\n" % (key, version))


def killed_after(folder: Path, version: int, seconds: float) -> list[tuple[str, bytes, int]]:
    """What a writer said until it was killed: p, d for about to put or drop, P, D for done, r for refused."""
    listen, tell = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(listen)
            write(folder, version, tell)
        finally:
            os._exit(1)
    os.close(tell)
    said = bytearray()
    select.select([listen], [], [])  # it has opened the store
    with os.fdopen(listen, "rb", buffering=0) as pipe:
        end = _now() + seconds
        while (left := end - _now()) > 0:
            if select.select([pipe], [], [], left)[0]:
                said += pipe.read(1 << 16) or b""
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while more := pipe.read(1 << 16):
            said += more
    lines = [line.split() for line in bytes(said).split(b"\n") if line]
    return [(what.decode(), key, int(number)) for what, key, number in lines]


def _now() -> float:
    return os.times().elapsed
