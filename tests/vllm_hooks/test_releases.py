"""Each name of vLLM that Manthan uses is there in both releases. 0.33 is read, because it runs on no CPU."""

import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest
import vllm
from release import Release, fetched, names_used

from manthan.vllm_hooks.compat import HARMLESS, LOADS, WRAPPED

NEXT = "0.33.0"
SITE = Path(vllm.__file__).parents[1]
READS: dict[str, tuple[str, ...]] = {
    "vllm.config.CompilationConfig": ("static_forward_context",),
    "vllm.distributed.kv_transfer.kv_connector.factory.KVConnectorFactory": ("register_connector",),
    "vllm.entrypoints.serve.middleware.authenticate.AuthenticationMiddleware": ("verify_token",),
    "vllm.model_executor.layers.rotary_embedding": ("_ROPE_DICT",),
    "vllm.model_executor.layers.rotary_embedding.base.RotaryEmbedding": (
        *("head_size", "rotary_dim", "is_neox_style", "cos_sin_cache", "base", "max_position_embeddings"),
    ),
    "vllm.model_executor.layers.rotary_embedding.dynamic_ntk_alpha_rope.DynamicNTKAlphaRotaryEmbedding": (
        "scaling_alpha",
    ),
    "vllm.model_executor.layers.rotary_embedding.dynamic_ntk_scaling_rope.DynamicNTKScalingRotaryEmbedding": (
        *("scaling_factor", "max_trained_positions"),
    ),
    "vllm.multimodal.hasher.MultiModalHasher": ("hash_kwargs",),
    "vllm.multimodal.inputs.MultiModalFeatureSpec": ("data", "modality", "identifier", "mm_hash"),
    "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl": ("do_kv_cache_update",),
    "vllm.v1.attention.backends.flash_attn.FlashAttentionImpl": ("do_kv_cache_update",),
    "vllm.v1.attention.backends.mla.cpu_mla.CPUMLAImpl": ("do_kv_cache_update",),
    "vllm.v1.core.block_pool.BlockHashToBlockMap": ("_cache", "insert"),
    "vllm.v1.core.block_pool.BlockPool": (
        *("blocks", "num_gpu_blocks", "free_block_queue", "cached_block_hash_to_block", "cached_block_hashes_by_block"),
        *("get_new_blocks", "get_num_free_blocks", "touch", "free_blocks", "evict_blocks"),
        *("_reuse_watchers", "kv_event_queue", "medium"),
    ),
    "vllm.v1.core.kv_cache_coordinator.KVCacheCoordinator": ("single_type_managers", "block_pool"),
    "vllm.v1.core.kv_cache_manager.KVCacheManager": ("block_pool", "coordinator", "free"),
    "vllm.v1.core.kv_cache_utils.FreeKVCacheBlockQueue": (
        *("fake_free_list_head", "fake_free_list_tail", "num_free_blocks", "iter_blocks_after", "remove"),
    ),
    "vllm.v1.core.kv_cache_utils.KVCacheBlock": (
        *("block_id", "ref_cnt", "block_hash", "is_null", "prev_free_block", "next_free_block", "set_block_hash"),
    ),
    "vllm.v1.core.sched.interface.PauseState": ("PAUSED_ALL",),
    "vllm.v1.core.sched.scheduler.Scheduler": (
        *("running", "waiting", "kv_holding_waiting", "deferred_waiting", "kv_cache_manager", "has_finished_requests"),
        *("finished_recving_kv_req_ids", "failed_recving_kv_req_ids", "prev_step_scheduled_req_ids"),
        *("pause_state", "set_pause_state", "_preempt_request", "reset_connector_cache"),
    ),
    "vllm.v1.core.single_type_kv_cache_manager.SingleTypeKVCacheManager": (
        *("num_cached_block", "req_to_blocks", "_pending_cow_copies"),
    ),
    "vllm.v1.engine.EngineCoreRequest": ("sampling_params", "mm_features", "kv_hints", "cache_salt", "lora_request"),
    "vllm.v1.engine.EngineCoreRequestType": ("WAKEUP",),
    "vllm.v1.engine.async_llm.AsyncLLM": ("engine_core", "errored"),
    "vllm.v1.engine.core.EngineCore": (
        *("vllm_config", "model_executor", "scheduler", "batch_queue", "step_fn", "mm_receiver_cache", "_reset_caches"),
    ),
    "vllm.v1.engine.core.EngineCoreProc": ("input_queue", "shutdown_state", "_process_engine_step"),
    "vllm.v1.engine.core.EngineShutdownState": ("RUNNING",),
    "vllm.v1.engine.core_client.AsyncMPClient": ("call_utility_all_async",),
    "vllm.v1.engine.input_processor.InputProcessor": ("vllm_config",),
    "vllm.v1.executor.abstract.Executor": ("is_sleeping",),
    "vllm.v1.metrics.stats.PrefillStats": ("num_external_cached_tokens",),
    "vllm.v1.request.Request": ("request_id", "status", "num_computed_tokens", "num_preemptions", "prefill_stats"),
    "vllm.v1.request.RequestStatus": ("WAITING", "WAITING_FOR_REMOTE_KVS", "PREEMPTED"),
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner": ("get_model", "get_draft_model"),
    "vllm.v1.worker.gpu_worker.Worker": ("model_runner", *LOADS, *HARMLESS),
}
"""Attributes and methods that `compat.py` reads and does not replace, by class or module of vLLM."""
ATTRIBUTES = [f"{owner}.{name}" for owner, names in READS.items() for name in names]


@pytest.fixture(scope="module")
def release() -> Release:
    return fetched(NEXT)


def test_names_are_collected() -> None:
    used = names_used()
    assert ("vllm.v1.core.block_pool", "BlockPool") in used
    assert ("vllm.v1.engine.core", "") in used
    assert len(used) > 100


@pytest.mark.parametrize(("module", "name"), names_used())
def test_the_installed_release_has_each_name(module: str, name: str) -> None:
    found = importlib.import_module(module)
    assert not name or hasattr(found, name) or importlib.import_module(f"{module}.{name}")


@pytest.mark.parametrize("path", ATTRIBUTES)
def test_the_installed_release_has_each_attribute(path: str) -> None:
    owner, _, name = path.rpartition(".")
    made = pkgutil.resolve_name(owner)
    bases = [base for base in getattr(made, "__mro__", ()) if base.__module__.startswith("vllm")]
    assert hasattr(made, name) or any(
        f"self.{name}" in (text := inspect.getsource(base)) or f"\n    {name}: " in text for base in bases
    )


def test_names_that_are_not_there_are_found_missing() -> None:
    release = Release(SITE)
    assert release.has("vllm.v1.core.block_pool", "BlockPool")
    assert not release.has("vllm.v1.core.block_pool", "NoPool")
    assert not release.has("vllm.v1.no_module", "")
    assert release.member("vllm.v1.core.block_pool.BlockPool.touch")
    assert not release.member("vllm.v1.core.block_pool.BlockPool.no_method")


@pytest.mark.parametrize("path", [*ATTRIBUTES, *WRAPPED])
def test_reading_finds_what_running_finds(path: str) -> None:
    assert Release(SITE).member(path)


@pytest.mark.slow
def test_the_next_release_has_each_name(release: Release) -> None:
    assert [f"{module}.{name}" for module, name in names_used() if not release.has(module, name)] == []


@pytest.mark.slow
def test_the_next_release_has_each_attribute(release: Release) -> None:
    assert [path for path in (*ATTRIBUTES, *WRAPPED) if not release.member(path)] == []


@pytest.mark.slow
def test_the_next_release_has_the_parameters_of_what_is_replaced(release: Release) -> None:
    installed = Release(SITE)
    assert [path for path in WRAPPED if release.parameters(path) != installed.parameters(path)] == []


@pytest.mark.slow
def test_the_next_release_plans_caches_as_it_is_asked_to(release: Release) -> None:
    utils, planning = "vllm.v1.core.kv_cache_utils", "vllm.v1.core.kv_cache_planning"
    arguments = ["vllm_config", "kv_cache_specs", "available_memory"]
    assert Release(SITE).parameters(f"{utils}.get_kv_cache_configs") == arguments
    assert not release.has(utils, "get_kv_cache_configs")
    assert release.parameters(f"{planning}.get_kv_cache_configs") == [*arguments, "global_kv_cache_groups"]
    assert release.parameters(f"{planning}.get_global_kv_cache_groups") == arguments[:2]
