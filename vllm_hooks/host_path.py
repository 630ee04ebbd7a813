"""Encoding and decoding on the CPU's cores, on threads of their own."""

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from vllm.logger import init_logger

from manthan.codec import CodecError
from manthan.manager.cold_store import ColdStoreError, HostStore
from manthan.vllm_hooks.block_codec import BlockCodec
from manthan.vllm_hooks.messages import Load, LoadResult, ManthanMetadata, SpillBlock, SpillResult
from manthan.vllm_hooks.worker_path import WorkerPath

logger = init_logger("vllm.manthan.worker")

SPILLS_PER_JOB = 16


class HostPath(WorkerPath):
    """Restores have a thread of their own: they never wait behind evictions.

    device: where the paged cache is. On a GPU, a job works on a stream of its own, behind what the model's stream was
    given before.
    """

    def __init__(self, blocks: BlockCodec, store: HostStore, encode_threads: int, device: torch.device) -> None:
        super().__init__()
        self.blocks, self.store = blocks, store
        self._device = device
        self._encoders = ThreadPoolExecutor(encode_threads, "manthan-encode", initializer=_leave_core)
        self._loaders = ThreadPoolExecutor(1, "manthan-restore", initializer=_leave_core)

    def submit(self, metadata: ManthanMetadata) -> None:
        """Only the dictionary work of drops is done on the caller's thread."""
        if metadata.clear:
            self.store.clear()
        self.store.drop(metadata.drops)
        if not (metadata.spills or metadata.loads):
            return
        on_gpu = self._device.type != "cpu"
        model = torch.cuda.current_stream(self._device).record_event() if on_gpu else None
        for start in range(0, len(metadata.spills), SPILLS_PER_JOB):
            self._encoders.submit(self._spill, metadata.spills[start : start + SPILLS_PER_JOB], model)
        for load in metadata.loads:
            self._loaders.submit(self._load, load, model)

    def shutdown(self) -> None:
        self._encoders.shutdown(wait=True, cancel_futures=True)
        self._loaders.shutdown(wait=True, cancel_futures=True)

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

    def _spill(self, spills: list[SpillBlock], model: torch.cuda.Event | None) -> None:
        with self._behind(model):
            for spill in spills:
                began = time.monotonic()
                cause = self._encode_and_put(spill)
                self._spilled([SpillResult(spill.key, cause, time.monotonic() - began)])

    def _encode_and_put(self, spill: SpillBlock) -> str | None:
        nbytes = self.blocks.nbytes
        try:
            self.store.reserve(nbytes)
        except ColdStoreError as error:
            return error.cause
        try:
            self.store.put(spill.key, self.blocks.encode(spill.key, spill.block_id))
            return None
        except Exception as error:  # whatever it is costs this block, not the thread
            self.store.unreserve(nbytes)
            logger.warning("Manthan: a block is not kept cold: %s: %s", type(error).__name__, error)
            return "encode" if isinstance(error, CodecError) else "internal"

    def _load(self, load: Load, model: torch.cuda.Event | None) -> None:
        began = time.monotonic()
        try:
            with self._behind(model):
                good, failed = self._decode_run(load)
        except Exception as error:  # vLLM must get an answer, whatever happened
            logger.warning("Manthan: a session is recomputed: %s: %s", type(error).__name__, error)
            good, failed = 0, [(load.keys[0], "internal")]
        nbytes = good * self.blocks.nbytes
        self._loaded(LoadResult(load.request_id, failed, nbytes, time.monotonic() - began))
        self._finished(load.request_id, load.block_ids[good:])

    def _decode_run(self, load: Load) -> tuple[int, list[tuple[bytes, str]]]:
        """Decode blocks up to the first that cannot be used; how many, and that one with its cause."""
        codes = self.store.get(load.keys)
        for good, (key, block_id, buf) in enumerate(zip(load.keys, load.block_ids, codes, strict=True)):
            cause = "missing" if buf is None else self.blocks.decode(key, block_id, buf)
            if cause is not None:
                return good, [(key, cause)]
        return len(load.keys), []


def _leave_core() -> None:
    """vLLM pins a CPU worker to its cores, and threads inherit that: ours would only run when the model does not."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))  # 0 is the calling thread
