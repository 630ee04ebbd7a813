"""What Manthan replaces of vLLM, and reads of it without an API: each test fails when vLLM changes that."""

import inspect
import pkgutil
import re

import pytest
from release import fetched

from manthan.vllm_hooks.compat import WRAPPED

PARAMETERS = {
    "EngineArgs.add_cli_args": "parser",
    "EngineArgs.from_cli_args": "args",
    "EngineArgs.create_engine_config": "self, usage_context, headless",
    "InputProcessor.process_inputs": (
        "self, request_id, prompt, params, supported_tasks, arrival_time, lora_request, tokenization_kwargs, "
        "trace_headers, priority, data_parallel_rank, resumable, session_id, kv_hints"
    ),
    "EngineCore.preprocess_add_request": "self, request",
    "EngineCore.reset_prefix_cache": "self, reset_running_requests, reset_connector",
    "Executor.collective_rpc": "self, method, timeout, args, kwargs, non_block",
    "utils.initialize_model": "vllm_config, prefix, model_class, model_config",
    "LlamaForCausalLM.load_weights": "self, weights",
    "AttentionImpl.forward": (
        "self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale"
    ),
    "KVCacheManager.prefix_cache_lookup_enabled": "self, request",
    "BlockPool.get_cached_block": "self, block_hash, kv_cache_group_ids",
    "FreeKVCacheBlockQueue.append_n": "self, blocks",
    "KVCacheCoordinator.cache_blocks": "self, request, num_computed_tokens",
}
READ = {
    "vllm.v1.engine.core.EngineCore._reset_caches": "self.reset_prefix_cache(",
    "vllm.v1.engine.core.EngineCore.preprocess_add_request": "self.mm_receiver_cache.get_and_update_features(",
    "vllm.v1.engine.core.EngineCoreProc._process_engine_step": "self.step_fn()",
    "vllm.v1.executor.abstract.Executor.sleep": 'self.collective_rpc("sleep", kwargs=dict(level=level))',
    "vllm.v1.executor.abstract.Executor.discard": 'self.collective_rpc("discard"',
    "vllm.v1.core.sched.scheduler.Scheduler.reset_prefix_cache": "timestamp, drop_stale_output=True)",
    "vllm.v1.core.sched.scheduler.Scheduler._preempt_request": "self.waiting.prepend_request(request)",
    "vllm.v1.core.sched.scheduler.Scheduler.__init__": "self.waiting = create_request_queue(self.policy)",
    "vllm.v1.core.sched.scheduler.Scheduler.schedule": "request = request_queue.pop_request()",
    "vllm.v1.core.kv_cache_manager.KVCacheManager.get_computed_blocks": "self.prefix_cache_lookup_enabled(request)",
    "vllm.v1.core.kv_cache_manager.KVCacheManager.get_computed_blocks_for_connector": (
        "self.prefix_cache_lookup_enabled(request)"
    ),
    "vllm.v1.core.kv_cache_manager.KVCacheManager.allocate_slots": "self.coordinator.cache_blocks(request",
    "vllm.v1.core.kv_cache_manager.KVCacheManager.cache_blocks": "self.coordinator.cache_blocks(request",
    "vllm.v1.core.single_type_kv_cache_manager.SingleTypeKVCacheManager._apply_cow": "self._pending_cow_copies.append(",
    "vllm.v1.core.block_pool.BlockPool.get_new_blocks": "self._notify_reuse(",
    "vllm.v1.core.block_pool.BlockPool.reset_prefix_cache": "self._notify_reuse(",
    "vllm.v1.core.block_pool.BlockPool.free_blocks": "self.free_block_queue.append_n(blocks_to_evict_last)",
    "vllm.v1.core.kv_cache_utils.generate_block_hash_extra_keys": '("cache_salt", request.cache_salt)',
    "vllm.v1.core.kv_cache_utils._gen_mm_extra_hash_keys": "mm_feature.identifier",
    "vllm.entrypoints.serve.middleware.register.init_entrypoints_middleware": "for middleware in args.middleware",
}
"""Text that must be in the source of functions of vLLM which Manthan does not replace, but depends on."""


def test_at_most_fourteen_functions_are_replaced_each_for_a_reason() -> None:
    assert len(WRAPPED) <= 14
    assert all(reason.endswith(".") for reason in WRAPPED.values())
    assert {".".join(name.split(".")[-2:]) for name in WRAPPED} == {*PARAMETERS}


@pytest.mark.parametrize("name", WRAPPED)
def test_a_replaced_function_has_the_parameters_that_it_had(name: str) -> None:
    found = inspect.signature(pkgutil.resolve_name(name))
    assert ", ".join(found.parameters) == PARAMETERS[".".join(name.split(".")[-2:])]


@pytest.mark.parametrize("name", READ)
def test_a_function_that_is_depended_on_does_what_it_did(name: str) -> None:
    source = inspect.getsource(pkgutil.resolve_name(name))
    assert READ[name] in re.sub(r"\(\n\s+", "(", source)


@pytest.mark.slow
def test_the_next_release_does_what_is_depended_on() -> None:
    release = fetched("0.33.0")
    sources = {name: re.sub(r"\(\n\s+", "(", release.source(name)) for name in READ}
    assert [name for name, source in sources.items() if READ[name] not in source] == []
