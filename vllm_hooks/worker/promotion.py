"""Primary tier of compressed blocks: pinned RAM. Loads fill it from the secondary tier: disk, Redis or another rank."""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from manthan.manager.tiers.arena import room, usable
from manthan.manager.tiers.tier import Buffer, Tier
from manthan.manager.transfer import Transfer
from manthan.vllm_hooks.worker.engine import MISSING, CancelledError, cause_of, other_causes
from manthan.vllm_hooks.worker.slabs import Name, Slab, Stored


@dataclass(eq=False)
class Reading:
    """Progress of a load in the primary tier. there: number of the load's first blocks that are in the tier.

    group: number for the blocks' names in the tier; negative for blocks of this load only. unpinned: number of the
    load's first blocks that may leave the tier. failed: causes of unreadable blocks, by index in the job. is_read: True
    if no more blocks will come. is_stopped: True if no caller needs further blocks.
    """

    job: Transfer
    group: int
    there: int = 0
    unpinned: int = 0
    failed: dict[int, str] = field(default_factory=dict)
    is_read: bool = False
    is_stopped: bool = False


class Primary:
    """Keeps the most recently used blocks in the tier. Evicted blocks remain in the secondary tier.

    slab: the tier. look_into: see `Codecs.look_into`. lock: of the tier. No bytes are copied while the lock is held.
    erase: begins to erase freed bytes, and returns the event after the erasure. keeps: False if another rank stores the
    blocks. Each load then reads its own copies and drops them, because the storing rank may replace blocks.
    """

    def __init__(
        self,
        slab: Slab,
        look_into: Callable[[int, Buffer], tuple[int, int, int, int] | str],
        lock: threading.Condition,
        erase: Callable[[], torch.cuda.Event],
        keeps: bool = True,
    ) -> None:
        self._slab, self._look_into, self._lock, self._erase, self._keeps = slab, look_into, lock, erase, keeps
        self.pins: Counter[Name] = Counter()
        """By block, number of loads that use the block. Blocks in use are not evicted."""

    def evict(self, nbytes: int, count: int) -> bool:
        """Drop the least recently used blocks, if need be. Return True if `count` blocks of `nbytes` bytes have room.

        A little more is dropped, because erasing several blocks together costs little.
        """
        self._slab.grow()
        arena = self._slab.arena
        most = usable(arena.nbytes) - count * room(nbytes)
        goal = most - arena.nbytes // 64 if arena.used > most else most
        while arena.used > goal and (name := self._slab.oldest(self.pins)) is not None:
            self._slab.drop([name])
        return arena.used <= most

    def begin(self, job: Transfer) -> tuple[Reading, list[bool]]:
        """Pin a load's blocks if all are in the tier. Return the progress, and True for each block in the tier."""
        group = job.group if self._keeps else -1 - job.job_id
        names = [(group, key) for key in job.block_hashes]
        with self._lock:
            near = [name in self._slab for name in names]
            if all(near):
                self._pin(names)
        return Reading(job, group, len(job) if all(near) else 0, is_read=all(near)), near

    def unpin(self, reading: Reading, end: int) -> None:
        """Unpin a load's blocks up to index `end`, exclusive."""
        with self._lock:
            for key in reading.job.block_hashes[reading.unpinned : end]:
                name = reading.group, key
                self.pins[name] -= 1
                if not self.pins[name]:
                    del self.pins[name]
                    if not self._keeps:
                        self._slab.drop([name])
            reading.unpinned = end
            self._lock.notify_all()

    def read(self, reading: Reading, near: Sequence[bool], secondary: Tier) -> None:
        """Read a load's blocks into the tier, in order, and pin each. near: as `begin` returned."""
        job, at, failed = reading.job, 0, dict[int, str]()
        far = [n for n, is_near in enumerate(near) if not is_near]
        try:
            values = secondary.read(job.group, [job.block_hashes[n] for n in far], job.tenant)
            for at, key in enumerate(job.block_hashes):
                found = None if near[at] else next(values)
                if not self._is_there(reading, (reading.group, key)):
                    if near[at]:  # evicted meanwhile
                        found = next(secondary.read(job.group, [key], job.tenant))
                    if found is None or isinstance(found, str):
                        behind = [n for n in far if n > at]
                        failed = {at: found or MISSING, **other_causes(job, behind, found, values, secondary)}
                        return
                    cause = self._bring(reading, key, found)
                    if cause is not None:
                        failed = {at: cause}
                        return
                with self._lock:
                    reading.there += 1
                    self._lock.notify_all()
        except Exception as error:  # vLLM must get an answer, whatever happened
            failed = {at: cause_of(error)}
        finally:
            with self._lock:
                for n, cause in failed.items():
                    reading.failed.setdefault(n, cause)
                reading.is_read = True
                self._lock.notify_all()

    def _is_there(self, reading: Reading, name: Name) -> bool:
        """Pin a block if the tier has the block, and return True then. Raises CancelledError if the load is stopped."""
        with self._lock:
            if reading.is_stopped:
                raise CancelledError
            if is_there := name in self._slab:
                self._pin([name])
            return is_there

    def _bring(self, reading: Reading, key: bytes, buf: Buffer) -> str | None:
        """Wait for room in the tier, copy a block there, and pin the block. Return the cause for a bad block."""
        told, name = self._look_into(reading.job.group, buf), (reading.group, key)
        if isinstance(told, str):
            return told
        with self._lock:
            while not self.evict(buf.nbytes, 1):
                if reading.is_stopped:
                    raise CancelledError
                self._lock.wait()
            place = self._slab.arena.allocate(buf.nbytes)
            assert place is not None
            erased = self._erase()
        erased.synchronize()
        self._slab.write(place, buf)
        with self._lock:
            if reading.is_stopped or name in self._slab:
                self._slab.free(place)
            else:
                self._slab.put({name: Stored(place, buf.nbytes, *told)})
            if reading.is_stopped:
                raise CancelledError
            self._pin([name])
        return None

    def _pin(self, names: Sequence[Name]) -> None:
        self.pins.update(names)
        for group, key in reversed(names):  # a session's last blocks are evicted first
            self._slab.used(group, [key])
