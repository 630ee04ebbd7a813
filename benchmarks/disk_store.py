"""How fast blocks go to disk and come back: DiskStore beside plain files of the same bytes on the same disk.

Each way writes so many incompressible blocks with some threads, lets them be synced, has the page cache forget them,
and reads them back in another order; then once more from the page cache. By turns, several rounds. `plain` writes and
reads one preallocated file at given offsets with the same threads, and looks at nothing; `direct` the same with
O_DIRECT. With RAM in front of the disk, blocks that were read once are read again: they have moved up.

    python benchmarks/disk_store.py [--folder FOLDER] [--size 1GiB] [--block 400KiB] [--threads 4] [--opened 100000]
        [--promoted 64MiB] [--out FOLDER]
"""

import mmap
import os
import random
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
import typer

from manthan.benchmarks.arms import OUT, make_console
from manthan.benchmarks.rates import Block, Rates, nbytes_of, show_rates, some_blocks, timed, write_rates
from manthan.manager.stores.cold_store import HostStore
from manthan.manager.stores.disk.segment import PAGE, newest
from manthan.manager.stores.disk.store import DiskStore
from manthan.manager.stores.tiered import TieredStore

FIRST, SECOND = "first return, from disk", "second return, from RAM"
PUT, COLD, WARM = "written and synced", "read from disk", "read from the page cache"
OPENED_NBYTES = 13_000


class Way(Protocol):
    """How blocks are written and read, by number."""

    def put(self, number: int, block: Block) -> None: ...

    def get(self, number: int) -> Block: ...

    def sync(self) -> None: ...

    def close(self) -> None: ...


class Stored:
    """Manthan's store."""

    def __init__(self, folder: Path, size: int, block: int) -> None:
        self._store = DiskStore(folder / "store", 2 * size + (64 << 20))

    def put(self, number: int, block: Block) -> None:
        if refused := self._store.put_all(0, {number.to_bytes(32, "little"): block}):
            raise OSError(f"refused: {refused}")

    def get(self, number: int) -> Block:
        [block] = self._store.read(0, [number.to_bytes(32, "little")])
        assert block is not None
        return block

    def sync(self) -> None:
        self._store.sync()

    def close(self) -> None:
        self._store.close()


class Plain:
    """One file. flags: further ones to open it with; blocks are whole pages then."""

    def __init__(self, folder: Path, size: int, block: int, flags: int = 0) -> None:
        self._step, self._is_direct = -(-block // PAGE) * PAGE, bool(flags)
        self._nbytes = self._step if flags else block
        self._fd = os.open(folder / "plain", os.O_RDWR | os.O_CREAT | flags, 0o600)
        os.posix_fallocate(self._fd, 0, -(-size // block) * self._step)

    def put(self, number: int, block: Block) -> None:
        view = block.data
        if self._is_direct:
            aligned = mmap.mmap(-1, self._nbytes)
            aligned[: block.nbytes] = view
            view = memoryview(aligned)
        os.pwrite(self._fd, view, number * self._step)

    def get(self, number: int) -> Block:
        buf: Any = mmap.mmap(-1, self._nbytes) if self._is_direct else np.empty(self._nbytes, np.uint8)
        os.preadv(self._fd, [buf], number * self._step)
        return np.frombuffer(buf, np.uint8)

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


WAYS: dict[str, Callable[[Path, int, int], Way]] = {
    "DiskStore": Stored,
    "plain": Plain,
    "direct": lambda folder, size, block: Plain(folder, size, block, os.O_DIRECT),
}


def one_round(
    make: Callable[[Path, int, int], Way], folder: Path, blocks: list[Block], size: int, threads: int
) -> dict[str, float]:
    """GB/s of each step."""
    count, nbytes = size // blocks[0].nbytes, blocks[0].nbytes
    order = random.Random(0).sample(range(count), count)
    with tempfile.TemporaryDirectory(dir=folder) as own, ThreadPoolExecutor(threads) as pool:
        way = make(Path(own), size, nbytes)
        found: dict[str, float] = {}

        def get(number: int) -> None:
            block = way.get(number)
            assert block[7] == blocks[number % len(blocks)][7]

        with timed(found, PUT, count * nbytes):
            list(pool.map(lambda number: way.put(number, blocks[number % len(blocks)]), range(count)))
            way.sync()
        forget(Path(own))
        for step in (COLD, WARM):
            with timed(found, step, count * nbytes):
                list(pool.map(get, order))
        way.close()
    return found


def opening(folder: Path, count: int) -> dict[str, float]:
    """Seconds that a server takes to find so many blocks again: the store is opened, and headers are read once more for
    the scheduler. With the page cache as it is, and after it has forgotten them."""
    block = np.random.default_rng(0).integers(0, 256, OPENED_NBYTES, np.uint8)
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=folder) as own:
        size = 2 * count * 2 * OPENED_NBYTES + (64 << 20)
        store = DiskStore(Path(own), size)
        for number in range(count):
            store.put_all(0, {number.to_bytes(32, "little"): block})
        store.close()
        for name in (WARM, COLD):
            if name == COLD:
                forget(Path(own))
            began = time.perf_counter()
            store = DiskStore(Path(own), size)
            assert len(newest(Path(own))) == count
            found[name] = time.perf_counter() - began
            store.close()
    return found


def promotion(folder: Path, blocks: list[Block], size: int) -> dict[str, float]:
    """GB/s at which a session of so many bytes is read, as for a restore but not decoded: when it has left the RAM in
    front of the disk, and the page cache too; and once more, when it has moved up."""
    found: dict[str, float] = {}
    session = {n.to_bytes(32, "little"): blocks[n % len(blocks)] for n in range(size // blocks[0].nbytes)}
    nbytes = sum(block.nbytes for block in session.values())
    with tempfile.TemporaryDirectory(dir=folder) as own:
        disk, ram = DiskStore(Path(own), 2 * size + (64 << 20)), HostStore(size + (64 << 20))
        for store in (disk, ram):
            assert not store.put_all(0, session)
        ram.drop(0, session)  # the system has given the memory
        disk.sync()
        forget(Path(own))
        tiers = TieredStore(ram, disk)
        for step in (FIRST, SECOND):
            with timed(found, step, nbytes):
                for buf in tiers.read(0, list(session)):
                    assert isinstance(buf, np.ndarray)
                    buf.copy()  # whoever decodes it reads it all
            assert len(ram.names()) == len(session)
        tiers.close()
    return found


def forget(folder: Path) -> None:
    """The page cache drops what it has of these files, which are synced."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def main(
    context: typer.Context,
    folder: Annotated[Path, typer.Option(help="On the disk to be measured.")] = Path(),
    size: Annotated[str, typer.Option(help="Of all blocks.")] = "1GiB",
    block: Annotated[str, typer.Option(help="Of one: 400 KiB are 16 tokens of a model like Qwen3-8B.")] = "400KiB",
    threads: Annotated[int, typer.Option(min=1, help="That write and read.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Of all ways by turns.")] = 5,
    opened: Annotated[int, typer.Option(min=0, help="Blocks of a store that is opened again; 0 for none.")] = 0,
    promoted: Annotated[str, typer.Option(help="Of a session that is read twice, with RAM in front.")] = "64MiB",
    out: Annotated[Path, typer.Option(help="Folder for the JSON.")] = OUT,
) -> None:
    """Measure writing and reading of blocks on a disk."""
    console = make_console()
    total, each, session = map(nbytes_of, (size, block, promoted))
    blocks = some_blocks(each)
    found: Rates = {name: {PUT: [], COLD: [], WARM: []} for name in WAYS}
    tiers: Rates = {"RAM in front of the disk": {FIRST: [], SECOND: []}}
    for number in range(rounds):
        for name, make in WAYS.items():
            console.print(f"round {number + 1} of {rounds}: {name}")
            for step, rate in one_round(make, folder, blocks, total, threads).items():
                found[name][step].append(rate)
        for name, steps in tiers.items():
            console.print(f"round {number + 1} of {rounds}: {name}")
            for step, rate in promotion(folder, blocks, session).items():
                steps[step].append(rate)
    show_rates(console, found)
    show_rates(console, tiers)
    seconds = opening(folder, opened) if opened else {}
    for name, taken in seconds.items():
        console.print(f"  {opened:,} blocks found again in {taken:.1f} s, {name}")
    write_rates(console, "disk_store", context, {"ways": found, "tiers": tiers, "opened": seconds}, out)


if __name__ == "__main__":
    typer.run(main)
