"""The worker half of the connector: one rank's blocks to codes and back, on threads of its own."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from manthan.codec import CodecError
from manthan.manager.cold_store import COLD_STORES, ColdStore, ColdStoreError
from manthan.vllm_hooks.block_codec import BlockCodec
from manthan.vllm_hooks.fingerprint import fingerprint
from manthan.vllm_hooks.messages import (
    Load,
    LoadResult,
    ManthanMetadata,
    ManthanWorkerMetadata,
    SpillBlock,
    SpillResult,
)
from manthan.vllm_hooks.support import full_attention_spec
from manthan.vllm_hooks.transfer_config import from_vllm_config

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger("vllm.manthan.worker")

SPILLS_PER_JOB = 16


class WorkerHalf:
    """Takes a step's metadata, works in the background, and reports what has ended.

    The scheduler half holds a reference on every block that is named here until it is answered for, so no block is
    written to by anybody else meanwhile. Restores have a thread of their own: they never wait behind evictions.
    """

    def __init__(self, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> None:
        self._vllm_config = vllm_config
        self._config = from_vllm_config(vllm_config)
        self._spec = full_attention_spec(kv_cache_config)
        self._num_blocks = kv_cache_config.num_blocks
        store = self._config.cold_store
        self.store: ColdStore = COLD_STORES[store.kind](store.max_bytes // vllm_config.parallel_config.world_size)
        self._blocks: BlockCodec | None = None
        self._encoders = ThreadPoolExecutor(self._config.encode_threads, "manthan-encode", initializer=_leave_core)
        self._loaders = ThreadPoolExecutor(1, "manthan-restore", initializer=_leave_core)
        self._lock = threading.Lock()
        self._report = ManthanWorkerMetadata()
        self._finished_loads: set[str] = set()
        self._failed_blocks: set[int] = set()

    def register_kv_caches(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        layers: dict[str, Any] = self._vllm_config.compilation_config.static_forward_context
        self._blocks = BlockCodec(
            codec_name=self._config.codec,
            backend=self._config.backend,
            caches=kv_caches,
            layers=layers,
            spec=self._spec,
            num_blocks=self._num_blocks,
            fingerprint=fingerprint(self._vllm_config, self._spec, self._config.codec),
        )

    def submit(self, metadata: ManthanMetadata) -> None:
        """Carry out a step's metadata; only the dictionary work of drops is done on the caller's thread."""
        if metadata.clear:
            self.store.clear()
        self.store.drop(metadata.drops)
        for start in range(0, len(metadata.spills), SPILLS_PER_JOB):
            self._encoders.submit(self._spill, metadata.spills[start : start + SPILLS_PER_JOB])
        for load in metadata.loads:
            self._loaders.submit(self._load, load)

    def take_finished_loads(self) -> set[str]:
        with self._lock:
            taken, self._finished_loads = self._finished_loads, set()
            return taken

    def take_failed_blocks(self) -> set[int]:
        with self._lock:
            taken, self._failed_blocks = self._failed_blocks, set()
            return taken

    def take_report(self) -> ManthanWorkerMetadata | None:
        with self._lock:
            taken, self._report = self._report, ManthanWorkerMetadata()
            return taken if taken.spills or taken.loads else None

    def shutdown(self) -> None:
        self._encoders.shutdown(wait=True, cancel_futures=True)
        self._loaders.shutdown(wait=True, cancel_futures=True)

    def _spill(self, spills: list[SpillBlock]) -> None:
        for spill in spills:
            began = time.monotonic()
            cause = self._encode_and_put(spill)
            result = SpillResult(spill.key, cause, time.monotonic() - began)
            with self._lock:
                self._report.spills.append(result)

    def _encode_and_put(self, spill: SpillBlock) -> str | None:
        assert self._blocks is not None
        nbytes = self._blocks.nbytes
        try:
            self.store.reserve(nbytes)
        except ColdStoreError as error:
            return error.cause
        try:
            self.store.put(spill.key, self._blocks.encode(spill.key, spill.block_id))
            return None
        except Exception as error:  # whatever it is costs this block, not the thread
            self.store.unreserve(nbytes)
            logger.warning("Manthan: a block is not kept cold: %s: %s", type(error).__name__, error)
            return "encode" if isinstance(error, CodecError) else "internal"

    def _load(self, load: Load) -> None:
        assert self._blocks is not None
        began = time.monotonic()
        try:
            good, failed = self._decode_run(load)
        except Exception as error:  # vLLM must get an answer, whatever happened
            logger.warning("Manthan: a session is recomputed: %s: %s", type(error).__name__, error)
            good, failed = 0, [(load.keys[0], "internal")]
        result = LoadResult(load.request_id, failed, good * self._blocks.nbytes, time.monotonic() - began)
        with self._lock:
            self._failed_blocks.update(load.block_ids[good:])
            self._finished_loads.add(load.request_id)
            self._report.loads.append(result)

    def _decode_run(self, load: Load) -> tuple[int, list[tuple[bytes, str]]]:
        """Decode blocks up to the first that cannot be used; how many, and that one with its cause."""
        assert self._blocks is not None
        codes = self.store.get(load.keys)
        for good, (key, block_id, buf) in enumerate(zip(load.keys, load.block_ids, codes, strict=True)):
            cause = "missing" if buf is None else self._blocks.decode(key, block_id, buf)
            if cause is not None:
                return good, [(key, cause)]
        return len(load.keys), []


def _leave_core() -> None:
    """vLLM pins a CPU worker to its cores, and threads inherit that: ours would only run when the model does not."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))  # 0 is the calling thread
