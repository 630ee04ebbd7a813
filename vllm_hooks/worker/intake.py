"""What a thread needs to get codes from the CPU's memory into a GPU's: pinned memory that is read into, buffers on the
device, and streams, so that a batch is copied and decoded while the next one is read."""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from manthan.manager.tiers.tier import Buffer, Found, Landing, TierError
from manthan.vllm_hooks import compat
from manthan.vllm_hooks.worker.staging import Staging

Addresses: TypeAlias = NDArray[np.int64]

SLOT_BYTES = 32 << 20
"""What is read is copied to the GPU in batches of about so many bytes. What lies in RAM already is not read, and goes
in batches as large as the buffers on the device."""
SLOTS = 8
"""Of what a restore reads into: some are read ahead, some are being copied. A prefetch has half as many."""


class Lane:
    """A buffer on the device and the stream that it is used on; on the CPU there is none."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.staging = Staging(nbytes, device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def used(self) -> Iterator[None]:
        """Work in this context comes after what the lane and the current stream were given before."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.staging.codes.device))
        with torch.cuda.stream(self._stream):
            yield

    def record(self) -> torch.cuda.Event | None:
        return None if self._stream is None else self._stream.record_event()

    def wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


class _Copied(NamedTuple):
    """Blocks that the GPU copies: so many of each slot are not needed any more when the event is reached."""

    event: torch.cuda.Event | None
    slots: Counter[int]


class Ring(Landing):
    """Pinned memory in slots that are filled in turn. A slot is filled again when all blocks for which it gave room
    have been copied; if that takes longer, room is given elsewhere, which costs a copy."""

    def __init__(self, slot_nbytes: int, slots: int, device: torch.device) -> None:
        self._slot_nbytes, self._slots, self._device = slot_nbytes, slots, device
        self._lent: list[Buffer] = []
        self._give_back: list[Callable[[], object]] = []
        self._allocate()

    def room(self, nbytes: int, blocks: int = 1) -> Buffer:
        start = self._start(nbytes)
        if start is None:
            return np.empty(nbytes, np.uint8)
        self._at = start + nbytes
        self._out[start // self._slot_nbytes] += blocks
        return self._memory[start : start + nbytes]

    def lend(self, memory: Buffer, give_back: Callable[[], object]) -> None:
        self._lent.append(memory)
        self._give_back.append(give_back)

    def lose(self) -> None:
        """Whoever writes there holds the memory."""
        self._allocate()

    def is_read(self, buf: Buffer) -> bool:
        """Whether a block was read, and not lent."""
        return all(buf.base is not memory for memory in self._lent)

    def are_pinned(self, ats: Addresses) -> NDArray[np.bool_]:
        """Of each address, whether the GPU reads itself what is there."""
        found = self._are_ours(ats)
        for memory in self._lent:
            begin = address(memory)
            found |= (ats >= begin) & (ats < begin + memory.nbytes)
        return found

    def copied(self, ats: Addresses, event: torch.cuda.Event | None) -> None:
        """The blocks there are not needed any more when the event is reached."""
        slots = (ats[self._are_ours(ats)] - self._begin) // self._slot_nbytes
        self._copied.append(_Copied(event, Counter(slots.tolist())))

    def clear(self) -> None:
        """Nothing is copied any more, and what was read is not needed."""
        self._copied.clear()
        self._out.clear()
        self._at = 0
        self._lent.clear()
        while self._give_back:
            self._give_back.pop()()

    def _are_ours(self, ats: Addresses) -> NDArray[np.bool_]:
        return (ats >= self._begin) & (ats < self._end)

    def _allocate(self) -> None:
        pinned = self._device.type == "cuda"
        nbytes = self._slots * self._slot_nbytes
        self._memory: Buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned).numpy()
        self._begin = address(self._memory)
        self._end = self._begin + nbytes
        self._at = 0
        self._out: Counter[int] = Counter()
        """By slot, blocks for which room was given and that are not copied yet."""
        self._copied: deque[_Copied] = deque()

    def _start(self, nbytes: int) -> int | None:
        """Where so many bytes are free, in one slot."""
        slot, used = divmod(self._at, self._slot_nbytes)
        if nbytes > self._slot_nbytes:
            return None
        if slot < self._slots and used and used + nbytes <= self._slot_nbytes:
            return self._at
        following = -(-self._at // self._slot_nbytes) % self._slots
        while self._out[following] and self._copied:
            event, slots = self._copied.popleft()
            if event is not None:
                event.synchronize()
            self._out -= slots
        return None if self._out[following] else following * self._slot_nbytes


class Intake:
    """Of one thread that loads. ring: what is read lands there. lanes: taken by turns."""

    def __init__(self, nbytes: int, lanes: int, slot_nbytes: int, slots: int, device: torch.device) -> None:
        """nbytes: of a lane's buffer."""
        self.ring = Ring(slot_nbytes, slots, device)
        self.nbytes, self._slot_nbytes = nbytes, slot_nbytes
        self._lanes = [Lane(nbytes, device) for _ in range(lanes)]
        self._turn = 0

    def next_lane(self) -> Lane:
        self._turn += 1
        return self._lanes[self._turn % len(self._lanes)]

    def batches(self, bufs: Iterator[Found]) -> Iterator[list[Found]]:
        """What is to be copied at once: as much as fits on the device, or about a slot of what is read, lest the GPU
        waits for long."""
        read = self.nbytes // self._slot_nbytes

        def cost(buf: Buffer) -> int:
            return buf.nbytes * read if self.ring.is_read(buf) else buf.nbytes

        return batches(bufs, cost, self.nbytes)

    def copy(self, bufs: Sequence[Buffer], sizes: Addresses, offsets: Addresses, lane: Lane) -> None:
        """Blocks of these sizes into the lane's buffer, on the current stream, which is the lane's."""
        codes = lane.staging.codes
        ats = np.fromiter(map(address, bufs), np.int64, len(bufs))
        for n in (~self.ring.are_pinned(ats)).nonzero()[0].tolist():
            mine = self.ring.room(bufs[n].nbytes)
            mine[:] = bufs[n]
            ats[n] = address(mine)
            if not self.ring.are_pinned(ats[n : n + 1]).all():  # there was no room: PyTorch copies it, and waits
                codes[int(offsets[n]) : int(offsets[n]) + len(mine)].copy_(torch.from_numpy(mine))
        pinned = self.ring.are_pinned(ats)
        if pinned.any():
            targets = offsets + codes.data_ptr()
            compat.copy_blocks(*(torch.from_numpy(each[pinned]) for each in (ats, targets, sizes)))
        self.ring.copied(ats, lane.record())

    def clear(self) -> None:
        """Wait for what is under way, and give back what was lent."""
        for lane in self._lanes:
            with suppress(Exception):  # a GPU that does not even wait reads nothing either
                lane.wait()
        self.ring.clear()


def batches(bufs: Iterator[Found], cost: Callable[[Buffer], int], most: int) -> Iterator[list[Found]]:
    """Blocks that cost so much together; none behind one that is not there. Raises what `bufs` raises, behind the
    blocks that came before."""
    batch: list[Found] = []
    taken, error = 0, None
    try:
        for buf in bufs:
            batch.append(buf)
            if buf is None or isinstance(buf, str):
                break
            taken += (last := cost(buf))
            if taken + last > most:  # the next one is as large, most likely
                yield batch
                batch, taken = [], 0
    except TierError as raised:
        error = raised
    if batch:
        yield batch
    if error is not None:
        raise error


def address(buf: Buffer) -> int:
    found: int = buf.__array_interface__["data"][0]
    return found
