"""Primary tier of compressed blocks: pinned RAM. Stores and loads fill it. Behind it: disk, Redis or another rank."""

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from manthan.codec import wire
from manthan.codec.block import exact_of
from manthan.codec.errors import SizeError, WireError
from manthan.codec.gpu.paged import PagedCodec
from manthan.codec.registry import needs_profile
from manthan.manager.tiers.arena import room, usable
from manthan.manager.tiers.tier import STORE_FULL, Buffer, Tier, TierError
from manthan.manager.transfer import Transfer
from manthan.vllm_hooks.worker.engine import MISSING, CancelledError, cause_of, other_causes
from manthan.vllm_hooks.worker.slabs import Name, Slab, Stored


@dataclass(eq=False)
class Reading:
    """Progress of a load in the primary tier."""

    job: Transfer
    group: int  # for the blocks' names in the tier; negative for blocks of this load only
    there: int = 0  # number of the load's first blocks that are in the tier
    unpinned: int = 0  # number of the load's first blocks that may leave the tier
    failed: dict[int, str] = field(default_factory=dict)  # causes of unreadable blocks, by index in the job
    is_read: bool = False  # True if no more blocks will come
    is_stopped: bool = False  # True if no caller needs further blocks


class Primary:
    """Keeps the most recently used blocks in the tier. Evicted blocks remain in the secondary tier.

    slab: the tier. codecs: by KV cache group. lock: of the tier. No bytes are copied while the lock is held. erase:
    begins to erase freed bytes, and returns the event after the erasure. keeps: False if another rank stores the
    blocks. Each load then reads its own copies and drops them, because the storing rank may replace blocks.
    """

    def __init__(
        self,
        slab: Slab,
        codecs: Mapping[int, Sequence[PagedCodec]],
        lock: threading.Condition,
        erase: Callable[[], torch.cuda.Event],
        keeps: bool = True,
    ) -> None:
        self._slab, self._codecs, self._lock, self._erase, self._keeps = slab, codecs, lock, erase, keeps
        self.pins: Counter[Name] = Counter()  # by block, number of loads that use it. Blocks in use are not evicted

    def evict(self, nbytes: int, count: int) -> bool:
        """Drop unpinned blocks, least recently used first. Return True if `count` blocks of `nbytes` bytes have room.

        A little more is dropped, because erasing several blocks together costs little. The caller holds the lock.
        """
        self._slab.grow()
        arena = self._slab.arena
        most = usable(arena.nbytes) - count * room(nbytes)
        goal = most - arena.nbytes // 64 if arena.used > most else most
        while arena.used > goal and (name := self._slab.oldest(self.pins)) is not None:
            self._slab.drop([name])
        return arena.used <= max(most, 0)  # a block larger than `usable` has the tier to itself

    def begin(self, reading: Reading) -> list[bool]:
        """Pin a load's blocks if all are in the tier. Return True for each block in the tier."""
        job = reading.job
        if not self._keeps:
            reading.group = -1 - job.job_id
        names = [(reading.group, key) for key in job.block_hashes]
        with self._lock:
            near = [name in self._slab for name in names]
            if all(near):
                self._pin(names)
                reading.there, reading.is_read = len(job), True
        return near

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
                found, name = None if near[at] else next(values), (reading.group, key)
                with self._lock:
                    if reading.is_stopped:
                        raise CancelledError
                    if is_there := name in self._slab:
                        self._pin([name])
                if not is_there:
                    if near[at]:  # evicted meanwhile
                        found = next(secondary.read(job.group, [key], job.tenant))
                    if found is None or isinstance(found, str):
                        behind = [n for n in far if n > at]
                        failed = {at: found or MISSING, **other_causes(job, behind, found, values, secondary)}
                        return
                    self._bring(reading, name, found)
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

    def _bring(self, reading: Reading, name: Name, buf: Buffer) -> None:
        """Wait for room, copy a block into the tier, pin it.

        Raises WireError if bad, TierError if too large, CancelledError if stopped.
        """
        told = _facts(self._codecs[reading.job.group], buf)
        with self._lock:
            while not self.evict(buf.nbytes, 1):
                if reading.is_stopped:
                    raise CancelledError
                self._lock.wait()
            place = self._slab.arena.allocate(buf.nbytes)
            if place is None:
                raise TierError(f"a block of {buf.nbytes} bytes is larger than this tier", STORE_FULL)
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

    def _pin(self, names: Sequence[Name]) -> None:
        self.pins.update(names)
        for group, key in reversed(names):  # a session's last blocks are evicted first
            self._slab.used(group, [key])


def _facts(codecs: Sequence[PagedCodec], buf: Buffer) -> tuple[int, int, int, int]:
    """Return `exact`, `first_token`, `mark` and `codec` of `Stored` from a block's header. Raises WireError.

    codecs: of the block's group. Decoding later compares the whole header with these numbers.
    """
    front, ends, exact = wire.peek(buf), wire.part_ends(buf), 0
    with suppress(SizeError):  # the block is damaged: the checks below find the cause
        exact = exact_of(wire.peek_sections(buf, front))
    marks = [codec.format.fingerprint for codec in codecs]
    number = marks.index(front.fingerprint) if front.fingerprint in marks else 0
    codec = codecs[number]
    if len(ends) > 1 and not needs_profile(codec.format.codec):
        raise WireError(f"refinements stand behind a block in codec {codec.format.codec}.", "trailing")
    fits = exact <= codec.layout.tokens and codec.form(exact).fits(ends[-1])
    if not fits or front.first_token > wire.PLACE_MAX:
        raise SizeError(f"a block of {ends[-1]} bytes from token {front.first_token} on is not one of this cache.")
    return exact, front.first_token, front.mark, number
