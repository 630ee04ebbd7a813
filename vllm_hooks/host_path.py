"""Encoding and decoding on the CPU's cores, on threads of their own."""

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from vllm.logger import init_logger

from manthan.codec import CodecError
from manthan.manager.cold_store import Buffer, ColdStore, ColdStoreError
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

    def __init__(self, blocks: BlockCodec, store: ColdStore, encode_threads: int, device: torch.device) -> None:
        super().__init__()
        self.blocks, self.store = blocks, store
        self._device = device
        self._encoders = ThreadPoolExecutor(encode_threads, "manthan-encode", initializer=_leave_core)
        self._loaders = ThreadPoolExecutor(1, "manthan-restore", initializer=_leave_core)

    def submit(self, metadata: ManthanMetadata) -> None:
        """Only the dictionary work of drops is done on the caller's thread."""
        if metadata.place is not None:
            self.store = self.store.cleared(metadata.place)
        self.store.drop(metadata.drops)
        if not (metadata.spills or metadata.loads):
            return
        on_gpu = self._device.type != "cpu"
        model = torch.cuda.current_stream(self._device).record_event() if on_gpu else None
        for start in range(0, len(metadata.spills), SPILLS_PER_JOB):
            self._encoders.submit(self._spill, metadata.spills[start : start + SPILLS_PER_JOB], self.store, model)
        for load in metadata.loads:
            self._loaders.submit(self._load, load, self.store, model)

    def shutdown(self) -> None:
        self._encoders.shutdown(wait=True, cancel_futures=True)
        self._loaders.shutdown(wait=True, cancel_futures=True)
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
        encoded, causes = {}, {}
        with self._behind(model):
            for spill in spills:
                buf = self._encode(spill, store)
                (causes if isinstance(buf, str) else encoded)[spill.key] = buf
        refused = self._put(encoded, store)
        for _ in refused:
            store.unreserve(self.blocks.nbytes)
        causes |= refused
        seconds = (time.monotonic() - began) / len(spills)
        self._spilled([SpillResult(spill.key, causes.get(spill.key), seconds) for spill in spills])

    def _encode(self, spill: SpillBlock, store: ColdStore) -> Buffer | str:
        """The codes of a block, for which room is set aside then; or why there are none."""
        nbytes = self.blocks.nbytes
        try:
            store.reserve(nbytes)
        except ColdStoreError as error:
            return error.cause
        try:
            return self.blocks.encode(spill.key, spill.block_id)
        except Exception as error:  # whatever it is costs this block, not the thread
            store.unreserve(nbytes)
            logger.warning("Manthan: a block is not kept cold: %s: %s", type(error).__name__, error)
            return "encode" if isinstance(error, CodecError) else "internal"

    def _put(self, encoded: dict[bytes, Buffer], store: ColdStore) -> dict[bytes, str]:
        try:
            return store.put_all(encoded)
        except Exception as error:
            logger.warning("Manthan: blocks are not kept cold: %s: %s", type(error).__name__, error)
            return dict.fromkeys(encoded, "internal")

    def _load(self, load: Load, store: ColdStore, model: torch.cuda.Event | None) -> None:
        began = time.monotonic()
        good, failed = 0, []
        try:
            with self._behind(model):
                for key, block_id, buf in zip(load.keys, load.block_ids, store.read(load.keys), strict=True):
                    cause = "missing" if buf is None else self.blocks.decode(key, block_id, buf)
                    if cause is not None:  # what follows is of no use
                        failed = [(key, cause)]
                        if buf is None:  # where one is missing there are more: not one a return, please
                            failed += [(other, cause) for other in store.absent(load.keys[good + 1 :])]
                        break
                    good += 1
        except ColdStoreError as error:
            failed = failed or [(load.keys[good], error.cause)]
        except Exception as error:  # vLLM must get an answer, whatever happened
            logger.warning("Manthan: a session is recomputed: %s: %s", type(error).__name__, error)
            failed = [(load.keys[good], "internal")]
        nbytes = good * self.blocks.nbytes
        self._loaded(LoadResult(load.request_id, failed, nbytes, time.monotonic() - began))
        self._finished(load.request_id, load.block_ids[good:])


def _leave_core() -> None:
    """vLLM pins a CPU worker to its cores, and threads inherit that: ours would only run when the model does not."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))  # 0 is the calling thread
