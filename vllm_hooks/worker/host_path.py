"""Encoding and decoding on the CPU's cores, on threads of their own."""

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice

import torch
from vllm.logger import init_logger

from manthan.manager.stores.cold_store import Buffer, ColdStore, ColdStoreError
from manthan.vllm_hooks.messages import Load, LoadResult, ManthanMetadata, SpillBlock, SpillResult
from manthan.vllm_hooks.worker.block_codec import Blocks
from manthan.vllm_hooks.worker.exact_blocks import ExactBlocks, parts_of
from manthan.vllm_hooks.worker.path import WorkerPath

logger = init_logger("vllm.manthan.worker")

MISSING = "missing"


class HostPath(WorkerPath):
    """Restores have a thread of their own: they never wait behind evictions or prefetches. So have prefetches.

    device: where the paged cache is. On a GPU, a job works on a stream of its own, behind what the model's stream was
    given before. copies: makes exact copies, if there are to be any.
    """

    def __init__(
        self,
        blocks: Blocks,
        store: ColdStore,
        encode_threads: int,
        device: torch.device,
        copies: ExactBlocks | None = None,
    ) -> None:
        super().__init__()
        self.blocks, self.store, self.copies = blocks, store, copies
        self._device = device
        self._encoders = ThreadPoolExecutor(encode_threads, "manthan-encode", initializer=_leave_core)
        self._loaders = ThreadPoolExecutor(1, "manthan-restore", initializer=_leave_core)
        self._prefetchers = ThreadPoolExecutor(1, "manthan-prefetch", initializer=_leave_core)

    def submit(self, metadata: ManthanMetadata) -> None:
        """Only the dictionary work of drops is done on the caller's thread."""
        if metadata.place is not None:
            self.store = self.store.cleared(metadata.place)
        self.store.drop(metadata.drops)
        if self.copies is not None:
            self.store.drop(parts_of(metadata.drops + metadata.copy_drops, self.copies.parts))
        self.store.go_first(metadata.go_first)
        if not (metadata.spills or metadata.loads):
            return
        on_gpu = self._device.type != "cpu"
        model = torch.cuda.current_stream(self._device).record_event() if on_gpu else None
        for start in range(0, len(metadata.spills), self.blocks.batch):
            self._encoders.submit(self._spill, metadata.spills[start : start + self.blocks.batch], self.store, model)
        for load in metadata.loads:
            threads = self._prefetchers if load.is_prefetch else self._loaders
            threads.submit(self._load, load, self.store, model)

    def shutdown(self) -> None:
        for threads in (self._encoders, self._loaders, self._prefetchers):
            threads.shutdown(wait=True, cancel_futures=True)
        self.store.close()

    @contextmanager
    def _behind(self, model: torch.cuda.Event | None) -> Iterator[None]:
        """GPU work in this context runs on a stream of its own, after what the model's stream was given before."""
        if model is None:
            yield
            return
        stream = torch.cuda.Stream(self._device)
        stream.wait_event(model)
        with torch.cuda.stream(stream):
            yield

    def _spill(self, spills: list[SpillBlock], store: ColdStore, model: torch.cuda.Event | None) -> None:
        """Encode blocks, then store them together."""
        began = time.monotonic()
        causes: dict[bytes, str] = {}
        granted = [spill for spill in spills if self._has_room(spill, store, causes)]
        encoded = {}
        for spill, buf in zip(granted, self._encode(granted, model), strict=True):
            if isinstance(buf, str):
                causes[spill.key] = buf
                store.unreserve(self.blocks.nbytes)
            else:
                encoded[spill.key] = buf
        refused = self._put(encoded, store)
        for _ in refused:
            store.unreserve(self.blocks.nbytes)
        causes |= refused
        to_copy = [spill for spill in spills if spill.exact and spill.key not in causes]
        copy_causes = self._copy(to_copy, store, model) if to_copy else {}
        seconds = (time.monotonic() - began) / len(spills)
        self._spilled([SpillResult(s.key, causes.get(s.key), seconds, copy_causes.get(s.key)) for s in spills])

    def _has_room(self, spill: SpillBlock, store: ColdStore, causes: dict[bytes, str]) -> bool:
        try:
            store.reserve(self.blocks.nbytes)
        except ColdStoreError as error:
            causes[spill.key] = error.cause
            return False
        return True

    def _encode(self, spills: list[SpillBlock], model: torch.cuda.Event | None) -> list[Buffer | str]:
        try:
            with self._behind(model):
                return self.blocks.encode_all([spill.key for spill in spills], [spill.block_id for spill in spills])
        except Exception as error:  # whatever it is costs these blocks, not the thread
            logger.warning("Manthan: blocks are not kept cold: %s: %s", type(error).__name__, error)
            return ["internal"] * len(spills)

    def _copy(
        self, spills: list[SpillBlock], store: ColdStore, model: torch.cuda.Event | None
    ) -> dict[bytes, str | None]:
        """Keep exact copies of blocks whose codes are in the store."""
        assert self.copies is not None
        try:
            with self._behind(model):
                return {spill.key: self.copies.keep(spill.key, spill.block_id, store) for spill in spills}
        except Exception as error:  # whatever it is costs these copies, not the codes
            logger.warning("Manthan: blocks are kept without exact copies: %s: %s", type(error).__name__, error)
            return dict.fromkeys([spill.key for spill in spills], "internal")

    def _put(self, encoded: dict[bytes, Buffer], store: ColdStore) -> dict[bytes, str]:
        try:
            return store.put_all(encoded)
        except Exception as error:
            logger.warning("Manthan: blocks are not kept cold: %s: %s", type(error).__name__, error)
            return dict.fromkeys(encoded, "internal")

    def _load(self, load: Load, store: ColdStore, model: torch.cuda.Event | None) -> None:
        began = time.monotonic()
        good, failed, copies = 0, [], {}
        try:
            with self._behind(model):
                copies = self._restore_copies(load, store)
                values = store.read(load.keys)
                while good < len(load.keys) and not failed:
                    good, failed = self._decode(load, good, list(islice(values, self.blocks.batch)), copies)
            if failed and failed[0][1] == MISSING:  # where one is, there are more: not one a return, please
                failed += [(key, MISSING) for key in store.absent(load.keys[good + 1 :])]
        except ColdStoreError as error:
            failed = failed or [(load.keys[good], error.cause)]
        except Exception as error:  # vLLM must get an answer, whatever happened
            logger.warning("Manthan: a session is recomputed: %s: %s", type(error).__name__, error)
            failed = [(load.keys[good], "internal")]
        spoiled = [(key, cause) for key, cause in copies.items() if cause is not None]
        nbytes = good * self.blocks.nbytes
        self._loaded(LoadResult(load.request_id, failed, nbytes, time.monotonic() - began, load.is_prefetch, spoiled))
        if not load.is_prefetch:
            self._finished(load, good)

    def _restore_copies(self, load: Load, store: ColdStore) -> dict[bytes, str | None]:
        """Write back what has an exact copy: None for each block that is exact now, and the cause for each other."""
        if self.copies is None:
            return {}
        exact = [pair for pair in zip(load.keys, load.block_ids, strict=True) if pair[0] in load.exact]
        return {key: self.copies.restore(key, block_id, store) for key, block_id in exact}

    def _decode(
        self, load: Load, start: int, bufs: list[Buffer | None], copies: dict[bytes, str | None]
    ) -> tuple[int, list[tuple[bytes, str]]]:
        """Decode the next blocks of a load; how many are good now, and the first that is not, with its cause."""
        end = start + len(bufs)
        at = [i for i in range(start, end) if copies.get(load.keys[i], "") is not None]
        keys, block_ids = [load.keys[i] for i in at], [load.block_ids[i] for i in at]
        causes = self.blocks.decode_all(keys, block_ids, [bufs[i - start] for i in at])
        for good, cause in zip(at, causes, strict=True):
            if cause is not None:  # what follows is of no use
                return good, [(load.keys[good], cause)]
        return end, []


def _leave_core() -> None:
    """vLLM pins a CPU worker to its cores, and threads inherit that: ours would only run when the model does not."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))  # 0 is the calling thread
