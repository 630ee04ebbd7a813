"""The KV connector that vLLM loads: it hands each call to the half that lives in this process."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from manthan.vllm_hooks.messages import ManthanMetadata, ManthanWorkerMetadata
from manthan.vllm_hooks.scheduler_half import SchedulerHalf
from manthan.vllm_hooks.support import check_supported
from manthan.vllm_hooks.telemetry.metrics import ManthanPromMetrics, ManthanStats
from manthan.vllm_hooks.telemetry.structured import use_format
from manthan.vllm_hooks.transfer_config import from_vllm_config
from manthan.vllm_hooks.worker.half import WorkerHalf

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class ManthanConnector(KVConnectorBase_V1, SupportsHMA):
    """Evicts idle sessions to codes and restores them. See KVConnectorBase_V1 for when vLLM calls what.

    SupportsHMA is declared so that vLLM keeps groups of layers apart.
    """

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_supported(vllm_config)
        use_format(from_vllm_config(vllm_config).log.format)
        if role is KVConnectorRole.SCHEDULER:
            self.scheduler = SchedulerHalf(vllm_config, kv_cache_config)
        else:
            self.worker = WorkerHalf(vllm_config, kv_cache_config)

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a cache: what is not stored is recomputed

    # -- scheduler half -------------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: "BlockPool") -> None:
        self.scheduler.bind(gpu_block_pool)

    def on_new_request(self, request: "Request") -> None:
        self.scheduler.new_request(request)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.scheduler.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        self.scheduler.allocated(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(self, request: "Request", num_external_tokens: int) -> dict[CacheHitSource, int]:
        return self.scheduler.sources(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> ManthanMetadata:
        return self.scheduler.step(
            scheduler_output.total_num_scheduled_tokens, len(scheduler_output.num_scheduled_tokens)
        )

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        if isinstance(report := connector_output.kv_connector_worker_meta, ManthanWorkerMetadata):
            self.scheduler.worker_output(report)
        if connector_output.finished_recving:
            self.scheduler.loaded()

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return False, self.scheduler.finished(request, len(block_ids))

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[self.scheduler.groups.chain.index])

    def has_pending_push_work(self) -> bool:
        return self.scheduler.has_work

    def has_pending_block_frees(self) -> bool:
        return self.scheduler.driver.frees_soon

    def take_events(self) -> "Iterable[KVCacheEvent]":
        return self.scheduler.take_events()

    def reset_cache(self) -> bool:
        self.scheduler.reset()
        return True

    def get_kv_connector_stats(self) -> "KVConnectorStats | None":
        return self.scheduler.telemetry.take() if self.role is KVConnectorRole.SCHEDULER else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> "KVConnectorStats":
        return ManthanStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> "KVConnectorPromMetrics":
        return ManthanPromMetrics(*args)

    # -- worker half ----------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        self.worker.register_kv_caches(kv_caches)

    def unregister_kv_caches(self) -> None:
        """vLLM 0.33 is about to take the cache's memory away (sleep mode), and has reset its prefix cache. The
        addresses stay, and wake up with other memory behind them: there is nothing to restore."""
        self.worker.wait()

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        self.worker.path.submit_loads(self._metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Restores are asynchronous: no layer waits for one."""

    def save_kv_layer(self, layer_name: str, kv_layer: "torch.Tensor", attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are read whole when their session is evicted, not layer by layer."""

    def wait_for_save(self) -> None:
        """vLLM calls this when all of the step's forward passes are under way, the draft's too, or where there is none.

        It hashes blocks when it schedules them, so a block may be named to be encoded in the very step that computes
        it: encodings begin here, behind that. Their blocks are referenced until they are done: nothing to wait for.
        """
        self.worker.submit_spills(self._metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        path = self.worker.path
        if self._metadata.model_rests:
            path.rest()
        return KVConnectorTransferResults(
            finished_recving=path.take_finished_loads(), failed_recving=path.take_failed_loads()
        )

    @property
    def _metadata(self) -> ManthanMetadata:
        metadata: KVConnectorMetadata = self._get_connector_metadata()
        assert isinstance(metadata, ManthanMetadata)
        return metadata

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker.path.take_failed_blocks()

    def build_connector_worker_meta(self) -> ManthanWorkerMetadata | None:
        return self.worker.take_report()

    def shutdown(self) -> None:
        (self.scheduler if self.role is KVConnectorRole.SCHEDULER else self.worker).shutdown()
