"""What sealing codes at rest costs: blocks written to a disk and to Redis and read back, sealed and as they are.

Each way writes so many incompressible blocks with some threads, and reads them back in another order, from the page
cache and from a redis-server of its own on this machine; by turns, several rounds. In memory, they are only sealed and
opened.

    python benchmarks/sealed.py [--folder FOLDER] [--size 512MiB] [--block 400KiB] [--threads 2] [--rounds 5]
        [--out FOLDER]
"""

import base64
import random
import secrets
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
import yaml

from manthan.benchmarks.arms import OUT, make_console
from manthan.benchmarks.local_redis import redis_at
from manthan.benchmarks.rates import Rates, nbytes_of, show_rates, some_blocks, timed, write_rates
from manthan.manager.config.model import RedisConfig
from manthan.manager.stores.cold_store import Buffer, ColdStore, Found, Landing
from manthan.manager.stores.disk.store import DiskStore
from manthan.manager.stores.keyring import KeyRing
from manthan.manager.stores.redis.client import Circuit, connect
from manthan.manager.stores.redis.index import batches
from manthan.manager.stores.redis.schema import Namespace
from manthan.manager.stores.redis.store import RedisStore
from manthan.manager.stores.sealed import SealedStore, Sealer

WRITTEN, READ = "written", "read"
PLACE = "benchmark"
BATCH = 16
"""Blocks in a call, as where they are encoded."""


class Memory(ColdStore):
    """Keeps the last block of each key, and no copy."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, Buffer] = {}

    def put_all(self, group: int, blocks: Mapping[bytes, Buffer], tenant: str = "") -> dict[bytes, str]:
        self._blocks |= blocks
        return {}

    def read(self, group: int, keys: Sequence[bytes], tenant: str = "", into: Landing | None = None) -> Iterator[Found]:
        return (self._blocks.get(key) for key in keys)

    def absent(self, group: int, keys: Sequence[bytes]) -> list[bytes]:
        return [key for key in keys if key not in self._blocks]

    def drop(self, group: int, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._blocks.pop(key, None)

    def cleared(self, place: str) -> "Memory":
        return Memory()

    def close(self) -> None:
        self._blocks.clear()

    def room(self, nbytes: int) -> int:
        return nbytes


def key_ring(folder: Path) -> KeyRing:
    def secret() -> str:
        return base64.b64encode(secrets.token_bytes(32)).decode()

    path = folder / "keys.yaml"
    path.touch(0o600)
    path.write_text(yaml.safe_dump({"names": secret(), "current": "k1", "keys": {"k1": secret()}}), encoding="utf-8")
    return KeyRing(path)


def one_round(store: ColdStore, blocks: list[Buffer], count: int, threads: int) -> dict[str, float]:
    """GB/s of each step."""
    found: dict[str, float] = {}
    keys = [number.to_bytes(32, "little") for number in range(count)]
    order = random.Random(0).sample(range(count), count)

    def put(numbers: Sequence[int]) -> None:
        if refused := store.put_all(0, {keys[number]: blocks[number % len(blocks)] for number in numbers}):
            raise OSError(f"refused: {refused}")

    def get(numbers: Sequence[int]) -> None:
        for number, block in zip(numbers, store.read(0, [keys[number] for number in numbers]), strict=True):
            assert isinstance(block, np.ndarray)
            assert block[7] == blocks[number % len(blocks)][7]

    with ThreadPoolExecutor(threads) as pool:
        with timed(found, WRITTEN, count * blocks[0].nbytes):
            list(pool.map(put, batches(range(count), BATCH)))
        with timed(found, READ, count * blocks[0].nbytes):
            list(pool.map(get, batches(order, BATCH)))
    store.drop(0, keys)
    return found


def main(
    context: typer.Context,
    folder: Annotated[Path, typer.Option(help="On the disk to be measured.")] = Path(),
    size: Annotated[str, typer.Option(help="Of all blocks.")] = "512MiB",
    block: Annotated[str, typer.Option(help="Of one: 400 KiB are 16 tokens of a model like Qwen3-8B.")] = "400KiB",
    threads: Annotated[int, typer.Option(min=1, help="That write and read.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Of all ways by turns.")] = 5,
    out: Annotated[Path, typer.Option(help="Folder for the JSON.")] = OUT,
) -> None:
    """Measure what sealing costs."""
    console = make_console()
    total, each = map(nbytes_of, (size, block))
    blocks = some_blocks(each)
    with ExitStack() as stack:
        own = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
        sealer = Sealer(key_ring(own), PLACE)
        config = RedisConfig(url=stack.enter_context(redis_at("")))
        redis = RedisStore(connect(config, threads + 4), Circuit(), Namespace(config.prefix, PLACE), 0, 3600)
        disk = DiskStore(own / "store", 4 * total + (64 << 20))
        ways: dict[str, ColdStore] = {"in memory, sealed": SealedStore(Memory(), sealer, 0)}
        for name, store in (("disk", disk), ("Redis", redis)):
            stack.callback(store.close)
            ways |= {f"{name}, as they are": store, f"{name}, sealed": SealedStore(store, sealer, 0)}
        found: Rates = {name: {WRITTEN: [], READ: []} for name in ways}
        for number in range(rounds + 1):
            for name in ways if number % 2 else reversed(ways):
                console.print(f"round {number} of {rounds}: {name}")
                for step, rate in one_round(ways[name], blocks, total // each, threads).items():
                    found[name][step] += [rate] if number else []  # one more warms up
    show_rates(console, found)
    write_rates(console, "sealed", context, {"ways": found}, out)


if __name__ == "__main__":
    typer.run(main)
