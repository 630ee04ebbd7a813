"""Schedule of the soak from a seed: faults of the servers' disk and of their Redis, resets, sleeps and kills."""

import contextlib
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import pytest
from disk_faults import Faults, resize, small_disk
from redis_server import RedisServer

PAGE = 4096
LITTLE = 16 * PAGE
"""What a full disk has left."""
FILLS = 100
"""Number of tries to make a disk as small as its files."""
FLIPPED = PAGE // 4
SPARE = 1.5
"""Size of the disk, in times of the store's budget. It is full when it is made smaller."""
SHORTEST_SHARE, LONGEST_SHARE = 0.5, 0.7
"""Share of its turn that a fault lasts."""


class Fault(StrEnum):
    """Faults of a disk, as in docs/disk.md, and of Redis."""

    full = "full"
    read_only = "read-only"
    slow = "slow"
    hang = "hang"
    hang_writes = "hang-writes"
    eio = "EIO"
    truncated = "truncated"
    flipped = "flipped"
    deleted = "file deleted"
    redis_frozen = "Redis frozen"
    redis_killed = "Redis killed"


TOLD = {
    Fault.full: "enospc",  # where the disk cannot be made smaller
    Fault.read_only: "erofs",
    Fault.slow: "slow",
    Fault.hang: "hang",
    Fault.hang_writes: "hang-writes",
    Fault.eio: "eio",
}
"""Names of faults in the preloaded library."""
OF_REDIS = {Fault.redis_frozen, Fault.redis_killed}
FELT_LATER = {Fault.deleted}
"""A file that is open can be read when it has no name any more: what was in it is missing at the next start."""


class Order(StrEnum):
    """Orders of an operator to one server."""

    kill = "kill -9"
    sleep = "sleep"
    reset = "reset"
    reset_all = "reset of all"


AHEAD = 4
"""Turns between a reset of all and the kill of that server: its sessions are shared again after its start."""


class Event(NamedTuple):
    """Turn of `seconds`. The fault or order begins after `calm_s` and lasts `lasts_s`. server: of an order."""

    what: Fault | Order
    server: int
    calm_s: float
    lasts_s: float
    seconds: float


def schedule(seed: int, seconds: float, rounds: int, kills: int, part: tuple[int, int] = (1, 1)) -> list[Event]:
    """Return every fault, a sleep and a reset once a round, in the round's own order, and kills far from each other.

    Servers take turns. part: (1, 2) for the first half of them, with all seconds.
    """
    chance = random.Random(seed)
    what: list[tuple[Fault | Order, int]] = []
    for number in range(rounds):
        each = [(fault, 0) for fault in Fault] + [(Order.sleep, number % 2), (Order.reset, (number + 1) % 2)]
        what += chance.sample(each, len(each))
    places = [round((number + 1) * len(what) / (kills + 1)) for number in range(kills)]
    for number, place in reversed(list(enumerate(places))):
        what.insert(place, (Order.kill, number % 2))
        what.insert(max(0, place - AHEAD), (Order.reset_all, number % 2))
    begin, end = (number * len(what) // part[1] for number in (part[0] - 1, part[0]))
    what = what[begin:end]
    each_s = seconds / len(what)
    events = []
    for one, server in what:
        lasts = each_s * chance.uniform(SHORTEST_SHARE, LONGEST_SHARE)
        events.append(Event(one, server, (each_s - lasts) * chance.uniform(0.1, 0.5), lasts, each_s))
    return events


@contextlib.contextmanager
def redis_failing(server: RedisServer, fault: Fault) -> Iterator[None]:
    """Stop Redis with SIGSTOP and let it go on, or kill it and start it again, empty, on the same port."""
    is_frozen = fault is Fault.redis_frozen
    (server.pause if is_frozen else server.kill)()
    try:
        yield
    finally:
        (server.resume if is_frozen else server.start)()


class Disk:
    """Folder that fails. is_small: True if it is a file system of its own, which can be full."""

    def __init__(self, folder: Path, faults: Faults, nbytes: int, seed: int, *, is_small: bool) -> None:
        self.folder, self.environment, self.is_small = folder, faults.environment, is_small
        self._faults, self._nbytes, self._chance = faults, nbytes, random.Random(seed)

    @contextlib.contextmanager
    def failing(self, fault: Fault) -> Iterator[None]:
        """Let the disk fail. Files that were damaged stay so."""
        try:
            if fault not in TOLD:
                self.damage(fault)
            elif fault is Fault.full and self.is_small:
                self._fill()
            else:
                self._faults.now(TOLD[fault])
            yield
        finally:
            self._faults.now("")
            if self.is_small:
                resize(self.folder, self._nbytes)

    def damage(self, fault: Fault) -> None:
        """Damage half of the files, once or once more. Do nothing if it is no fault of files."""
        damage = {Fault.truncated: cut, Fault.flipped: self._flip, Fault.deleted: Path.unlink}.get(fault)
        paths = sorted(self.folder.rglob("blocks"))
        for path in self._chance.sample(paths, -(-len(paths) // 2)) if damage else ():
            with contextlib.suppress(FileNotFoundError):
                damage(path)

    def _fill(self) -> None:
        """Make the disk as small as its files. Try again if servers have written meanwhile."""
        for _ in range(FILLS):
            with contextlib.suppress(subprocess.CalledProcessError):
                return resize(self.folder, shutil.disk_usage(self.folder).used + LITTLE)
        raise AssertionError("the disk is never as small as its files")

    def _flip(self, path: Path) -> None:
        """Change a run of bytes in every page that has some."""
        with path.open("r+b", buffering=0) as file:
            for begin in range(0, os.fstat(file.fileno()).st_size, PAGE):
                at = begin + self._chance.randrange(PAGE - FLIPPED)
                run = os.pread(file.fileno(), FLIPPED, at)
                if any(run):
                    os.pwrite(file.fileno(), bytes(255 - byte for byte in run), at)


def cut(path: Path) -> None:
    """Cut off the second half of what a sparse file has on the disk."""
    os.truncate(path, path.stat().st_blocks * 512 // 2)


@contextlib.contextmanager
def disk(run: Path, budget: int, seed: int) -> Iterator[Disk]:
    """Make a disk in RAM of limited size where something can be mounted, else below `run`."""
    folder, nbytes = run / "disk", int(SPARE * budget)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        faults = Faults(run)
        try:
            stack.enter_context(small_disk(folder, nbytes))
            is_small = True
        except pytest.skip.Exception:
            is_small = False
        yield Disk(folder, faults, nbytes, seed, is_small=is_small)
