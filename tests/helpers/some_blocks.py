"""Random blocks for stores, and what comes back of them."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from manthan.manager.tiers.tier import Buffer


def blocks_of(*sizes: int, seed: int = 0) -> dict[bytes, Buffer]:
    rng = np.random.default_rng(seed)
    return {bytes([seed, at]): rng.integers(0, 256, size, np.uint8) for at, size in enumerate(sizes)}


def same(found: Iterator[Buffer | None], blocks: Mapping[bytes, Buffer], keys: Sequence[bytes]) -> bool:
    pairs = zip(found, keys, strict=True)
    return all(
        (buf is None and key not in blocks) or (buf is not None and bytes(buf) == bytes(blocks[key]))
        for buf, key in pairs
    )


def until(is_so: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)
