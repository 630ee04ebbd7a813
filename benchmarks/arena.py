"""What a RAM tier loses to fragments: blocks of mixed sizes come and go in a HostStore for as long as wanted.

Room is made for a block's bound, and it turns out smaller, as with entropy coding: sizes from 26 KB to 2.4 MB, each up
to 5% below its bound. The store is kept full, but for what should be left free; what goes is drawn by lot, which is
worse for holes than any policy. Blocks are read back and compared. Said are: bytes that cannot be used (left free, or
taken beside the blocks' own), blocks in several extents, the process' memory against the bytes used, puts a second.

    python benchmarks/arena.py [--minutes 10] [--budget 1GiB] [--json FILE]

Exit status 1 if a block came back wrong, a byte was lost for good, or more than 3% of the budget cannot be used.
"""

import json
import random
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from pydantic import ByteSize, TypeAdapter
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from manthan.manager.stores.arena import Arena, room, usable
from manthan.manager.stores.cold_store import HostStore

BOUNDS = (26_000, 26_700, 98_560, 205_000, 410_000, 461_000, 1_024_160, 2_400_000)
"""Of blocks of models from the smallest to a large one whose first tokens are exact, in bytes."""
SPREAD = 20
"""A block is smaller than its bound by up to one part of so many."""
MOST_LOST = 0.03


class WrongBytesError(RuntimeError):
    """A block came back as something else."""


@dataclass
class Found:
    """puts: blocks that were kept. in_pieces: of them, those in several extents; extents: of all; most_extents: of one.
    lost: bytes taken beside the blocks' own, at the end; spare: bytes left free. used, peak, budget, grown: bytes;
    grown: by how much the process' resident memory is larger than before."""

    puts: int
    reads: int
    in_pieces: int
    extents: int
    most_extents: int
    lost: int
    spare: int
    used: int
    peak: int
    budget: int
    grown: int
    seconds: float

    @property
    def share_lost(self) -> float:
        return (self.lost + self.spare) / self.budget


class Churn:
    """Blocks in a store that is kept full. Each block is of one byte, which its key tells."""

    def __init__(self, budget: int, seed: int) -> None:
        self.store = HostStore(budget)
        self.sizes: dict[bytes, int] = {}
        self.pieces: Counter[int] = Counter()
        self.puts = self.reads = 0
        self._keys: list[bytes] = []
        self._rng = random.Random(seed)
        self._source = np.empty(max(BOUNDS), np.uint8)

    def step(self) -> None:
        """Put a block, after as many others went as had to make room; now and then read one."""
        bound = self._rng.choice(BOUNDS)
        while self.store.used + room(bound) > usable(self.store.max_bytes):
            self._drop()
        nbytes = bound - self._rng.randrange(bound // SPREAD)
        key = self.puts.to_bytes(8, "little")
        self._source[:nbytes] = self.puts % 251
        if self.store.put_all(0, {key: self._source[:nbytes]}):
            raise WrongBytesError(f"a block of {nbytes} bytes was refused with {self.store.available} free")
        self.sizes[key] = nbytes
        self._keys.append(key)
        self.pieces[len(self.store._blocks[0, key].extents)] += 1
        self.puts += 1
        if self.puts % 8 == 0:
            self._read(self._rng.choice(self._keys))

    def finish(self) -> None:
        """Read all that is there, and let it go: every byte must be free again."""
        for key in self.sizes:
            self._read(key)
        self.store.check()
        self.store.drop(0, self.sizes)
        self.store.check()
        if self.store.used or self.store.available != Arena(self.store.max_bytes).nbytes:
            raise WrongBytesError(f"{self.store.used} bytes of an empty store count as used")

    def _drop(self) -> None:
        if not self._keys:
            raise WrongBytesError(f"{self.store.used} bytes of an empty store count as used")
        at = self._rng.randrange(len(self._keys))
        self._keys[at], self._keys[-1] = self._keys[-1], self._keys[at]
        key = self._keys.pop()
        self.store.drop(0, [key])
        del self.sizes[key]

    def _read(self, key: bytes) -> None:
        [buf] = self.store.read(0, [key])
        if buf is None or buf.nbytes != self.sizes[key] or np.any(buf != int.from_bytes(key, "little") % 251):
            raise WrongBytesError("a block came back with other bytes than it was put with")
        self.reads += 1


def measure(budget: int, minutes: float, seed: int, console: Console, least_puts: int = 1000) -> Found:
    """Churn for so long, and until the store was full."""
    before = resident()
    churn = Churn(budget, seed)
    columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
    began = time.monotonic()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("arena", total=60 * minutes)
        while (took := time.monotonic() - began) < 60 * minutes or churn.puts < least_puts:
            churn.step()
            if churn.puts % 200 == 0:
                progress.update(task, completed=took, description=f"arena: {churn.puts} blocks")
    store, pieces = churn.store, churn.pieces
    found = Found(
        puts=churn.puts,
        reads=churn.reads,
        in_pieces=churn.puts - pieces[1],
        extents=sum(count * times for count, times in pieces.items()),
        most_extents=max(pieces),
        lost=store.used - sum(churn.sizes.values()),
        spare=budget - usable(budget),
        used=store.used,
        peak=store.peak,
        budget=budget,
        grown=resident() - before,
        seconds=took,
    )
    churn.finish()
    return found


def resident() -> int:
    """Bytes of this process in RAM."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


def show(found: Found, console: Console) -> None:
    table = Table("", "", box=None, show_header=False)
    mib = 1 / (1 << 20)
    table.add_row("blocks put", f"{found.puts:,} in {found.seconds:.0f} s: {found.puts / found.seconds:,.0f} a second")
    mean = found.extents / found.puts
    pieces = f"{100 * found.in_pieces / found.puts:.1f}%; {mean:.2f} a block, at most {found.most_extents}"
    table.add_row("in several extents", pieces)
    table.add_row("used", f"{found.used * mib:,.1f} MiB of {found.budget * mib:,.1f}, at most {found.peak * mib:,.1f}")
    table.add_row("left free", f"{found.spare:,} bytes")
    table.add_row("lost to fragments", f"{found.lost:,} bytes")
    table.add_row("of the budget", f"{100 * found.share_lost:.3f}% cannot be used")
    table.add_row("memory of the process", f"{found.grown * mib:+,.1f} MiB")
    console.print(table)


def main(
    minutes: Annotated[float, typer.Option(min=0, help="How long blocks come and go.")] = 1,
    budget: Annotated[str, typer.Option(help="Of the store.")] = "512MiB",
    seed: Annotated[int, typer.Option(help="Of sizes and order.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Measure what a RAM tier loses to fragments."""
    console = Console()
    found = measure(TypeAdapter(ByteSize).validate_python(budget), minutes, seed, console)
    show(found, console)
    if json_file is not None:
        json_file.write_text(json.dumps(asdict(found), indent=2), encoding="utf-8")
    raise typer.Exit(int(found.share_lost > MOST_LOST))


if __name__ == "__main__":
    typer.run(main)
