"""Codes in stores that the CPU reaches: blocks are encoded, stored, read and decoded on threads beside the model's."""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from vllm.logger import init_logger

from manthan.manager.tiers.tier import Buffer, Found, Tier, TierError
from manthan.manager.work import NEEDED, RESET, FailedBlock, GroupBlocks, Load, LoadResult, SpillBlock, SpillResult
from manthan.vllm_hooks.messages import ManthanMetadata
from manthan.vllm_hooks.worker.blocks import MISSING, Blocks, Copies
from manthan.vllm_hooks.worker.intake import Intake, batches
from manthan.vllm_hooks.worker.path import WorkerPath
from manthan.vllm_hooks.worker.threads import Threads, allowed_cpus

logger = init_logger("vllm.manthan.worker")

UNDER_WAY = 2
"""Batches of a load that the GPU is given while the next one is read."""


class HostPath(WorkerPath):
    """Restores have a thread of their own: they never wait behind evictions or prefetches. So have prefetches.

    blocks: by KV cache group, those of chains first. device: where the paged cache is. On a GPU, a job works on a
    stream of its own, behind what the model's stream was given before. intakes: of the threads that restore and that
    prefetch, where a GPU decodes.
    """

    def __init__(
        self,
        blocks: Mapping[int, Blocks],
        store: Tier,
        encode_threads: int,
        device: torch.device,
        fails_whole: bool = False,
        intakes: tuple[Intake, Intake] | None = None,
    ) -> None:
        super().__init__(fails_whole)
        self._intakes = intakes
        self.blocks, self.store = blocks, store
        self._device = device
        cpus = allowed_cpus() if device.type == "cpu" else set()
        self._cancelled = threading.Event()
        """Of the jobs that were ordered since the last reset."""
        self._unread: dict[int, Sequence[SpillBlock]] = {}
        """Batches that wait for a thread that encodes, and are read by it: a GPU's. A CPU's are copied at once."""
        self._numbers = itertools.count()
        self._encode_threads = encode_threads
        self._copiers = Threads(1, "manthan-copy", cpus)
        self._encoders = Threads(encode_threads, "manthan-encode", cpus)
        self._loaders = Threads(1, "manthan-restore", cpus)
        self._prefetchers = Threads(1, "manthan-prefetch", cpus)

    def warm_up(self, exacts: Mapping[int, Sequence[int]]) -> None:
        """Encode and decode block 0, which the pool does not use, on each thread of a GPU's path, and store nothing.

        Args:
            exacts: by group, numbers of a block's first tokens that may have to be kept exact.
        """
        made: dict[tuple[int, str, int], Buffer] = {}

        def encode() -> None:
            for group, blocks in self.blocks.items():
                for codec in [each.codec for each in blocks.formats]:
                    for exact in exacts[group]:
                        [found] = blocks.encode_all([SpillBlock(b"", group, 0, 0, exact, codec)])
                        if not isinstance(found, str):
                            made[group, codec, exact] = np.array(found)

        def decode(intake: Intake) -> None:
            for (group, _, _), encoded in made.items():
                self.blocks[group].begin([b""], [0], [encoded], intake)()
                intake.clear()

        assert self._intakes is not None
        restores, prefetches = self._intakes
        self._encoders.on_each(encode)
        self._loaders.on_each(lambda: decode(restores))
        self._prefetchers.on_each(lambda: decode(prefetches))

    def submit_loads(self, metadata: ManthanMetadata) -> None:
        """Only the dictionary work of drops is done on the caller's thread."""
        self.begun = []
        if metadata.cancels:
            self._cancelled.set()
            self._cancelled = threading.Event()
        if metadata.revokes:
            self._give_up()
        if metadata.place is not None:
            self.store = self.store.cleared(metadata.place)
        for group, keys in metadata.drops:
            self.store.drop(group, keys)
        model = model_event(self._device) if metadata.loads else None
        for load in metadata.loads:
            with self._lock:
                self._awaited += not load.is_prefetch
            threads = self._prefetchers if load.is_prefetch else self._loaders
            intake = self._intakes[load.is_prefetch] if self._intakes else None
            threads.submit(self._load, load, self.store, model, intake, self._cancelled)
            self.begun.append(load)

    def submit_spills(self, metadata: ManthanMetadata) -> None:
        model = model_event(self._device) if metadata.spills else None
        for group, blocks in self.blocks.items():
            spills = [spill for spill in metadata.spills if spill.group == group]
            batch = min(blocks.batch, max(1, len(spills) // self._encode_threads))
            for start in range(0, len(spills), batch):
                some = spills[start : start + batch]
                self._copiers.submit(self._copy, some, blocks, self.store, model, self._cancelled)
                self.begun += some

    def wait(self) -> None:
        for threads in (self._copiers, self._encoders, self._loaders, self._prefetchers):
            threads.wait()

    def shutdown(self) -> None:
        for threads in (self._copiers, self._encoders, self._loaders, self._prefetchers):
            threads.shutdown()
        self.store.close()

    # -- evict ----------------------------------------------------------------------------------------

    def _put_off(self, spills: Sequence[SpillBlock]) -> int:
        """Number a batch that is read when a thread that encodes has time."""
        with self._lock:
            number = next(self._numbers)
            self._unread[number] = spills
        return number

    def _may_read(self, number: int) -> bool:
        """True if the blocks of a batch are still to be read, which begins now."""
        with self._lock:
            return self._unread.pop(number, None) is not None

    def _give_up(self) -> None:
        """Answer all blocks that are not read yet: requests need them, and nobody knows how long a store takes."""
        with self._lock:
            unread, self._unread = self._unread, {}
        for spills in unread.values():
            self._copied(spills)
            self._spilled([SpillResult(spill.key, spill.group, NEEDED, 0.0) for spill in spills])

    def _copy(
        self,
        spills: Sequence[SpillBlock],
        blocks: Blocks,
        store: Tier,
        model: torch.cuda.Event | None,
        cancelled: threading.Event,
    ) -> None:
        """Copy blocks of one group, so that nobody has to leave them alone while they are encoded, unless that takes no
        longer."""
        if cancelled.is_set():
            self._copied(spills)
            self._spilled([SpillResult(spill.key, spill.group, RESET, 0.0) for spill in spills])
            return
        try:
            with behind(model, self._device):
                copies = blocks.copy(spills)
        except Exception as error:
            logger.warning("Manthan: blocks are not kept cold: %s: %s", type(error).__name__, error)
            self._copied(spills)
            self._spilled([SpillResult(spill.key, spill.group, "internal", 0.0) for spill in spills])
            return
        number = -1
        if copies is not None:
            self._copied(spills)
        else:
            number = self._put_off(spills)
        self._encoders.submit(self._spill, number, spills, copies, blocks, store, model, cancelled)

    def _encode(
        self, spills: Sequence[SpillBlock], copies: Copies | None, blocks: Blocks, model: torch.cuda.Event | None
    ) -> Sequence[Buffer | str]:
        if copies is not None:
            return blocks.encode_all(spills, copies)
        try:
            with behind(model, self._device):
                return blocks.encode_all(spills)
        finally:
            self._copied(spills)

    def _spill(
        self,
        number: int,
        spills: Sequence[SpillBlock],
        copies: Copies | None,
        blocks: Blocks,
        store: Tier,
        model: torch.cuda.Event | None,
        cancelled: threading.Event,
    ) -> None:
        """Encode blocks of one group, then store them together."""
        if copies is None and not self._may_read(number):
            return
        if cancelled.is_set():
            if copies is None:
                self._copied(spills)
            self._spilled([SpillResult(s.key, s.group, RESET, 0.0) for s in spills])
            return
        began = time.monotonic()
        try:
            encoded = dict(zip(spills, self._encode(spills, copies, blocks, model), strict=True))
            bufs = {spill: buf for spill, buf in encoded.items() if not isinstance(buf, str)}
            causes = {spill.key: buf for spill, buf in encoded.items() if isinstance(buf, str)}
            for tenant in dict.fromkeys(spill.tenant for spill in bufs):
                theirs = {spill.key: buf for spill, buf in bufs.items() if spill.tenant == tenant}
                causes |= store.put_all(blocks.format.group, theirs, tenant)
            rooms = {spill.key: store.room(len(buf)) for spill, buf in bufs.items() if spill.key not in causes}
        except Exception as error:  # whatever it is costs these blocks, not the thread
            logger.warning("Manthan: blocks are not kept cold: %s: %s", type(error).__name__, error)
            causes, rooms = {spill.key: "internal" for spill in spills}, {}
        seconds = (time.monotonic() - began) / len(spills)
        self._spilled([SpillResult(s.key, s.group, causes.get(s.key), seconds, rooms.get(s.key, 0)) for s in spills])

    # -- restore --------------------------------------------------------------------------------------

    def _load(
        self,
        load: Load,
        store: Tier,
        model: torch.cuda.Event | None,
        intake: Intake | None,
        cancelled: threading.Event,
    ) -> None:
        began = time.monotonic()
        loaded = _Loaded([(part.group, key) for part in load.parts for key in part.keys], cancelled)
        try:
            with behind(model, self._device):
                if cancelled.is_set():
                    loaded.fail(RESET)
                for part in load.parts if not loaded.failed else ():
                    self._load_part(part, store, load.tenant, intake, loaded)
                    if loaded.failed:
                        break
        except TierError as error:
            loaded.fail(error.cause)
        except Exception as error:  # vLLM must get an answer, whatever happened
            logger.warning("Manthan: a session is recomputed: %s: %s", type(error).__name__, error)
            loaded.fail("internal")
        seconds = time.monotonic() - began
        self._loaded(LoadResult(load.request_id, loaded.failed, loaded.nbytes, seconds, load.is_prefetch))
        if not load.is_prefetch:
            self._finished(load, loaded.good)

    def _finished(self, load: Load, good: int) -> None:
        with self._lock:
            self._awaited -= 1
            super()._finished(load, good)

    def _load_part(self, part: GroupBlocks, store: Tier, tenant: str, intake: Intake | None, loaded: "_Loaded") -> None:
        """Decode the blocks of a group, up to the first that cannot be."""
        with ExitStack() as stack:
            if intake is not None:
                stack.callback(intake.clear)
            values = store.read(part.group, part.keys, tenant, None if intake is None else intake.ring)
            if isinstance(values, Generator):
                stack.callback(values.close)
            done = 0
            for causes, bufs in self._decoding(part, values, intake):
                good = next((n for n, cause in enumerate(causes) if cause is not None), len(bufs))
                loaded.add(bufs[:good])
                done += good
                if good < len(bufs):
                    self._fail(part, done, str(causes[good]), bufs[good], values, store, loaded)
                    return
                if loaded.cancelled.is_set():
                    loaded.fail(RESET)
                    return
            if done < len(part.keys):
                raise ValueError(f"the store has answered for {done} of {len(part.keys)} blocks")

    def _fail(
        self,
        part: GroupBlocks,
        at: int,
        cause: str,
        found: Found,
        following: Iterator[Found],
        store: Tier,
        loaded: "_Loaded",
    ) -> None:
        """The block at this place is not to be had; what follows is of no use. Where one is, there are more: not one a
        return, please."""
        loaded.fail(cause)
        group, rest = part.group, part.keys[at + 1 :]
        if cause == MISSING:
            loaded.failed += [FailedBlock(group, key, MISSING) for key in store.absent(group, rest)]
        elif isinstance(found, str):
            causes = zip(rest, following, strict=True)
            loaded.failed += [FailedBlock(group, key, buf) for key, buf in causes if isinstance(buf, str)]

    def _decoding(
        self, part: GroupBlocks, values: Iterator[Found], intake: Intake | None
    ) -> Iterator[tuple[list[str | None], list[Found]]]:
        """Blocks as they were read, batch by batch, and why each could not be decoded. One batch is read while the GPU
        works on the one before it; none behind a block that is not there."""
        blocks, start = self.blocks[part.group], 0
        if intake is None:
            for bufs in batches(values, lambda buf: 1, blocks.batch):
                some = slice(start, start := start + len(bufs))
                yield blocks.decode_all(part.keys[some], part.block_ids[some], bufs), bufs
            return
        begun: deque[tuple[Callable[[], list[str | None]], list[Found]]] = deque()
        error = None
        try:
            for bufs in intake.batches(values):
                some = slice(start, start := start + len(bufs))
                begun.append((blocks.begin(part.keys[some], part.block_ids[some], bufs, intake), bufs))
                while len(begun) > UNDER_WAY:
                    end, done = begun.popleft()
                    yield end(), done
        except TierError as raised:  # what came before is good
            error = raised
        for end, done in begun:
            yield end(), done
        if error is not None:
            raise error


class _Loaded:
    """How far a load has come. blocks: group and key of each. good: so many of them are decoded. nbytes: of their
    codes. failed: the one behind them, and others that are known to be bad. cancelled: ends it after a batch."""

    def __init__(self, blocks: list[tuple[int, bytes]], cancelled: threading.Event) -> None:
        self.good, self.nbytes = 0, 0
        self.cancelled = cancelled
        self.failed: list[FailedBlock] = []
        self._blocks = blocks

    def add(self, bufs: Sequence[Found]) -> None:
        """The next ones are good, and have these codes."""
        self.good += len(bufs)
        self.nbytes += sum(buf.nbytes for buf in bufs if isinstance(buf, np.ndarray))

    def fail(self, cause: str) -> None:
        """The next one is not, unless one is known already; nor is the last one, if it happened behind that."""
        self.good = min(self.good, len(self._blocks) - 1)
        self.failed = self.failed or [FailedBlock(*self._blocks[self.good], cause)]


def model_event(device: torch.device) -> torch.cuda.Event | None:
    """Return an event behind the work of the model's stream; None on a CPU. Call it on the model's thread."""
    return None if device.type == "cpu" else torch.cuda.current_stream(device).record_event()


@contextmanager
def behind(model: torch.cuda.Event | None, device: torch.device) -> Iterator[None]:
    """GPU work in this context runs on a stream of its own, after what the model's stream was given before."""
    if model is None:
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_event(model)
    with torch.cuda.stream(stream):
        yield
