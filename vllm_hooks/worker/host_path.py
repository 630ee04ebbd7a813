"""Codes in stores that the CPU reaches: blocks are encoded, stored, read and decoded on threads beside the model's."""

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, islice

import numpy as np
import torch
from vllm.logger import init_logger

from manthan.manager.stores.cold_store import ColdStore, ColdStoreError, Found
from manthan.vllm_hooks.messages import (
    FailedBlock,
    GroupBlocks,
    Load,
    LoadResult,
    ManthanMetadata,
    SpillBlock,
    SpillResult,
)
from manthan.vllm_hooks.worker.blocks import MISSING, Blocks
from manthan.vllm_hooks.worker.calibration import Calibration
from manthan.vllm_hooks.worker.path import WorkerPath
from manthan.vllm_hooks.worker.streams import behind, model_event
from manthan.vllm_hooks.worker.threads import Threads, allowed_cpus

logger = init_logger("vllm.manthan.worker")


class HostPath(WorkerPath):
    """Restores have a thread of their own: they never wait behind evictions or prefetches. So have prefetches.

    blocks: by KV cache group, those of chains first. device: where the paged cache is. On a GPU, a job works on a
    stream of its own, behind what the model's stream was given before. calibration: what is made of the chains' blocks
    besides. is_mine: whether this rank stores the block of a key; of another, which has the same, it is said to be
    stored in no bytes.
    """

    def __init__(
        self,
        blocks: Mapping[int, Blocks],
        store: ColdStore,
        encode_threads: int,
        device: torch.device,
        fails_whole: bool = False,
        calibration: Calibration | None = None,
        is_mine: Callable[[bytes], bool] = lambda key: True,
    ) -> None:
        super().__init__(fails_whole)
        self._is_mine = is_mine
        self.blocks, self.store = blocks, store
        self._chain = next(iter(blocks))
        self._calibration = calibration
        self._device = device
        cpus = allowed_cpus() if device.type == "cpu" else set()
        self._encoders = Threads(encode_threads, "manthan-encode", cpus)
        self._loaders = Threads(1, "manthan-restore", cpus)
        self._prefetchers = Threads(1, "manthan-prefetch", cpus)

    def submit_loads(self, metadata: ManthanMetadata) -> None:
        """Only the dictionary work of drops is done on the caller's thread."""
        if metadata.place is not None:
            self.store = self.store.cleared(metadata.place)
        for group, keys in metadata.drops:
            self.store.drop(group, keys)
        for group, keys in metadata.go_first:
            self.store.go_first(group, keys)
        self.store.reached(metadata.step)
        model = model_event(self._device) if metadata.loads else None
        for load in metadata.loads:
            threads = self._prefetchers if load.is_prefetch else self._loaders
            threads.submit(self._load, load, self.store, model)

    def submit_spills(self, metadata: ManthanMetadata) -> None:
        mine = [spill for spill in metadata.spills if self._is_mine(spill.key)]
        if len(mine) < len(metadata.spills):
            self._spilled([SpillResult(s.key, s.group, None, 0.0) for s in metadata.spills if not self._is_mine(s.key)])
        model = model_event(self._device) if mine else None
        for group, blocks in self.blocks.items():
            spills = [spill for spill in mine if spill.group == group]
            for start in range(0, len(spills), blocks.batch):
                self._encoders.submit(self._spill, spills[start : start + blocks.batch], blocks, self.store, model)

    def wait(self) -> None:
        for threads in (self._encoders, self._loaders, self._prefetchers):
            threads.wait()

    def shutdown(self) -> None:
        for threads in (self._encoders, self._loaders, self._prefetchers):
            threads.shutdown()
        if self._calibration is not None:
            self._calibration.stop()
        self.store.close()

    # -- evict ----------------------------------------------------------------------------------------

    def _spill(
        self, spills: Sequence[SpillBlock], blocks: Blocks, store: ColdStore, model: torch.cuda.Event | None
    ) -> None:
        """Encode blocks of one group, then store them together."""
        began = time.monotonic()
        try:
            with behind(model, self._device):
                if self._calibration is not None and spills[0].group == self._chain:
                    self._calibration.see(spills)
                encoded = dict(zip(spills, blocks.encode_all(spills), strict=True))
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

    def _load(self, load: Load, store: ColdStore, model: torch.cuda.Event | None) -> None:
        began = time.monotonic()
        loaded = _Loaded([(part.group, key) for part in load.parts for key in part.keys])
        try:
            with behind(model, self._device):
                for part in load.parts:
                    self._load_part(part, store, load.tenant, loaded)
                    if loaded.failed:
                        break
        except ColdStoreError as error:
            loaded.fail(error.cause)
        except Exception as error:  # vLLM must get an answer, whatever happened
            logger.warning("Manthan: a session is recomputed: %s: %s", type(error).__name__, error)
            loaded.fail("internal")
        seconds = time.monotonic() - began
        self._loaded(LoadResult(load.request_id, loaded.failed, loaded.nbytes, seconds, load.is_prefetch))
        if not load.is_prefetch:
            self._finished(load, loaded.good)

    def _load_part(self, part: GroupBlocks, store: ColdStore, tenant: str, loaded: "_Loaded") -> None:
        """Decode the blocks of a group, up to the first that cannot be."""
        group, keys, block_ids = part
        blocks = self.blocks[group]
        values = store.read(group, keys, tenant)
        for start in range(0, len(keys), blocks.batch):
            some = slice(start, start + blocks.batch)
            bufs = list(islice(values, blocks.batch))
            for n, cause in enumerate(blocks.decode_all(keys[some], block_ids[some], bufs), start):
                if cause is not None:  # what follows is of no use
                    loaded.fail(cause)
                    # Where one is, there are more: not one a return, please.
                    if cause == MISSING:
                        gone = store.absent(group, keys[n + 1 :])
                        loaded.failed += [FailedBlock(group, key, MISSING) for key in gone]
                    elif isinstance(bufs[n - start], str):
                        rest = zip(keys[n + 1 :], chain(bufs[n - start + 1 :], values), strict=True)
                        loaded.failed += [FailedBlock(group, key, buf) for key, buf in rest if isinstance(buf, str)]
                    return
                loaded.add(bufs[n - start])


class _Loaded:
    """How far a load has come. blocks: group and key of each. good: so many of them are decoded. nbytes: of their
    codes. failed: the one behind them, and others that are known to be bad."""

    def __init__(self, blocks: list[tuple[int, bytes]]) -> None:
        self.good, self.nbytes = 0, 0
        self.failed: list[FailedBlock] = []
        self._blocks = blocks

    def add(self, buf: Found) -> None:
        """The next one is good, and has these codes."""
        self.good += 1
        self.nbytes += len(buf) if isinstance(buf, np.ndarray) else 0

    def fail(self, cause: str) -> None:
        """The next one is not, unless one is known already; nor is the last one, if it happened behind that."""
        self.good = min(self.good, len(self._blocks) - 1)
        self.failed = self.failed or [FailedBlock(*self._blocks[self.good], cause)]
