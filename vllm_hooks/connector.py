"""KV connector that vLLM loads: passes each call on to its scheduler half in the engine core, or to its worker half."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.forward_context import ForwardContext
from vllm.logger import init_logger
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from manthan.vllm_hooks.messages import ManthanMetadata, ManthanWorkerMetadata
from manthan.vllm_hooks.scheduler_half import SchedulerHalf
from manthan.vllm_hooks.support import check_supported
from manthan.vllm_hooks.telemetry.metrics import ManthanPromMetrics, ManthanStats
from manthan.vllm_hooks.worker.half import WorkerHalf, running_half

logger = init_logger("vllm.manthan")

T = TypeVar("T")
U = TypeVar("U")


class ManthanConnector(KVConnectorBase_V1, SupportsHMA):
    """Saves and restores the KV of sessions (conversations). KVConnectorBase_V1 says when vLLM calls each method.

    SupportsHMA has vLLM keep its KV cache groups: without it, all layers would become one group.

    Args:
        role: SCHEDULER in the engine core: makes `self.scheduler`. WORKER on each rank: makes `self.worker`.

    Raises: ConfigError for unusable settings; UnsupportedError, of that class, for models and settings of vLLM.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_supported(vllm_config)
        self._is_broken = False
        """True once `_ask` has caught an exception of the scheduler half. From then on `_ask` calls nothing."""
        self._promised: dict[str, Sequence[int]] = {}
        """By request id, ids of the blocks of each load that vLLM waits for and no worker has been told of."""
        self._logged: set[str] = set()
        """Names of methods whose exception `_try` has logged. Each is logged once."""
        self._errors: list[str] = []
        """Names of the worker half's methods that raised an exception since the last report to the scheduler half."""
        self._told_blocks: set[int] = set()  # ids of blocks that could not be loaded, until vLLM asks for them
        if role is KVConnectorRole.SCHEDULER:
            self.scheduler = SchedulerHalf(vllm_config, kv_cache_config, self._ask)
            self._has_worker = vllm_config.parallel_config.distributed_executor_backend == "uni"
            """True if the only worker is in this process, on this thread, and can be asked between two of its steps."""
        else:
            self.worker = WorkerHalf(vllm_config, kv_cache_config)

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # stores may be given up: later requests then compute the blocks again

    # -- errors ---------------------------------------------------------------------------------------

    def _ask(self, call: Callable[..., T], *args: Any, otherwise: U) -> T | U:
        """Return the result of `call`, a method of the scheduler half; `otherwise` from the first exception on.

        An exception must not end the engine. After an exception the scheduler half is not used any more, because its
        tables may be half changed.
        """
        if self._is_broken:
            return otherwise
        try:
            return call(*args)
        except Exception:
            self._is_broken = True
            name = call.__name__
            logger.exception("Manthan: an error in %s: vLLM serves as without Manthan until the next start.", name)
            self._try(self.scheduler.give_up, otherwise=None)
            self._count(name)
            return otherwise

    def _try(self, call: Callable[..., T], *args: Any, otherwise: U) -> T | U:
        try:
            return call(*args)
        except Exception:
            name = call.__name__
            if name not in self._logged:
                self._logged.add(name)
                logger.exception("Manthan: an error in %s costs a recompute.", name)
            self._count(name)
            return otherwise

    def _count(self, name: str) -> None:
        if self.role is KVConnectorRole.SCHEDULER:
            self.scheduler.telemetry.count("errors", label=name)
        else:
            self._errors.append(name)

    # -- scheduler half -------------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self.scheduler.bind(gpu_block_pool)

    def on_new_request(self, request: Request) -> None:
        self._ask(self.scheduler.new_request, request, otherwise=None)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._ask(self.scheduler.match, request, num_computed_tokens, otherwise=(0, False))

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if num_external_tokens:
            ids = blocks.get_block_ids()[self.scheduler.groups.main.index]
            told = request.request_id, ids, num_external_tokens
            self._promised[request.request_id] = self._try(self.scheduler.loaded_into, *told, otherwise=ids)
        self._ask(self.scheduler.allocated, request, blocks, num_external_tokens, otherwise=None)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        return self._ask(self.scheduler.sources, request, num_external_tokens, otherwise={})

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ManthanMetadata:
        scheduled = scheduler_output.total_num_scheduled_tokens, len(scheduler_output.num_scheduled_tokens)
        metadata = self._ask(self.scheduler.step, *scheduled, otherwise=None)
        if metadata is not None:
            self.scheduler.driver.sent()
            for job in metadata.loads:
                self._promised.pop(job.request_id or "", None)
            return metadata
        failed, self._promised = self._promised, {}
        return ManthanMetadata(tokens=scheduled[0], failed=failed)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if isinstance(report := connector_output.kv_connector_worker_meta, ManthanWorkerMetadata):
            for name in report.errors:
                self._count(name)
            self._ask(self.scheduler.worker_output, report, otherwise=None)
            if self._is_broken:
                self._try(self.scheduler.drain, report, otherwise=None)
        if self._has_worker:
            loaded = self._try(running_half().engine.take_loaded, otherwise=set())
            connector_output.finished_recving = (connector_output.finished_recving or set()) | loaded

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._promised.pop(request.request_id, None)
        return False, self._ask(self.scheduler.finished, request, len(block_ids), otherwise=None)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[self.scheduler.groups.main.index])

    def has_pending_push_work(self) -> bool:
        has_work = self._ask(self.scheduler.has_work, otherwise=None)
        return self.scheduler.driver.holds_any() if has_work is None else has_work

    def has_pending_block_frees(self) -> bool:
        """True during a prefetch, which gives the pool's blocks back when it ends."""
        return not self._is_broken and self.scheduler.driver.prefetcher.load is not None

    def take_events(self) -> Iterable[KVCacheEvent]:
        return self._ask(self.scheduler.take_events, otherwise=())

    def reset_cache(self) -> bool:
        self._ask(self.scheduler.reset, otherwise=None)
        return True

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self.role is not KVConnectorRole.SCHEDULER:
            return None
        return self._try(self.scheduler.telemetry.take, otherwise=None)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return ManthanStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> KVConnectorPromMetrics:
        return ManthanPromMetrics(*args)

    # -- worker half ----------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.worker.register_kv_caches(kv_caches)

    def unregister_kv_caches(self) -> None:
        """Wait for transfers. vLLM 0.33 then frees the cache's memory and keeps the virtual addresses (sleep mode)."""
        self.worker.engine.wait()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin a step. vLLM calls this before the forward pass, but may call `start_load_kv` after the pass."""
        assert isinstance(connector_metadata, ManthanMetadata)
        super().bind_connector_metadata(self.worker.of_this_rank(connector_metadata))
        self._try(self.worker.engine.begin_step, otherwise=None)
        for each in (self.worker.guard, self.worker.calibrator):
            if each is not None:
                self._try(each.begin_step, self._metadata, otherwise=None)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        metadata, engine = self._metadata, self.worker.engine
        engine.fail_requests(metadata.failed)
        if self._try(engine.submit_loads, metadata, otherwise=False) is False:
            engine.fail(metadata.loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: all loads are asynchronous, so that vLLM computes a request only after its load has ended."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: stores read whole blocks after the step, not layer by layer."""

    def wait_for_save(self) -> None:
        """Begin this step's stores after the forward pass, because a step may store blocks that it computes.

        Do not wait for stores: their blocks stay referenced until workers have gathered (copied or encoded) the KV.
        """
        metadata, engine = self._metadata, self.worker.engine
        if self._try(engine.submit_stores, metadata, otherwise=False) is False:
            engine.fail(metadata.stores)
        if self.worker.guard is not None:
            self._try(self.worker.guard.submit, metadata.stores, otherwise=None)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self._try(self._transfer_results, otherwise=KVConnectorTransferResults())

    def _transfer_results(self) -> KVConnectorTransferResults:
        engine = self.worker.engine
        if not self._metadata.tokens:
            self._try(engine.rest, otherwise=None)
        ended = engine.take_ended()
        self._told_blocks |= ended.bad_blocks
        return KVConnectorTransferResults(finished_recving=ended.requests, failed_recving=ended.failed)

    @property
    def _metadata(self) -> ManthanMetadata:
        metadata: KVConnectorMetadata = self._get_connector_metadata()
        assert isinstance(metadata, ManthanMetadata)
        return metadata

    def get_block_ids_with_load_errors(self) -> set[int]:
        told, self._told_blocks = self._told_blocks, set()
        return told

    def build_connector_worker_meta(self) -> ManthanWorkerMetadata | None:
        guard = self.worker.guard
        report = self._try(self.worker.engine.take_report, otherwise=None) or ManthanWorkerMetadata()
        if guard is not None:
            report.verdicts = self._try(guard.take, otherwise=[])
            report.measured = self._try(guard.take_progress, otherwise={})
        report.candidate = self.worker.take_candidate()  # after the guard's verdicts: one may be on the candidate
        report.errors, self._errors = self._errors, []
        return report if report != ManthanWorkerMetadata() else None

    def shutdown(self) -> None:
        half = self.scheduler if self.role is KVConnectorRole.SCHEDULER else self.worker
        self._try(half.shutdown, otherwise=None)
