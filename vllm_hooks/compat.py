"""Functions and attributes of vLLM that are no public interface, but that Manthan replaces, reads or sets.

Manthan's connector has two halves: `scheduler_half` in the engine core, and a worker half in each worker.
docs/compatibility.md compares the supported releases of vLLM.
"""

import argparse
import dataclasses
import functools
import importlib
import queue
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

import msgspec
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import BlockHash, get_block_hash, get_group_id, make_block_hash_with_group_id
from vllm.v1.request import RequestStatus

from manthan.manager.pool import Asker, BlockName, FreeBlock, Mark, Marks

if TYPE_CHECKING:
    import torch
    from starlette.datastructures import Headers
    from vllm import EngineArgs
    from vllm.config import ModelConfig, VllmConfig
    from vllm.distributed.kv_events import BlockStored
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.request import Request

    from manthan.vllm_hooks.http.salts import Salts
    from manthan.vllm_hooks.ordering import ReturnsFirstQueue
    from manthan.vllm_hooks.scheduler_half import SchedulerHalf

logger = init_logger("vllm.manthan")

T = TypeVar("T")

PARAMS = "kv_transfer_params"  # key in `SamplingParams.extra_args` of the client's hints, such as to pin a session
HALT_S = 2.0  # most seconds that a reset of the prefix cache waits for transfers to end
PAUSE_S = 1e-3  # seconds between two steps of a reset if the caller steps the engine, so that transfer threads can run
LOADS = ("load_model", "reload_weights", "update_weights", "finish_weight_update")
"""Methods of workers that change weights. Some do so without a call of the model's `load_weights`."""
HARMLESS = (
    *("execute_model", "sample_tokens", "take_draft_token_ids", "execute_dummy_batch"),
    *("check_health", "profile", "add_lora", "remove_lora", "pin_lora", "list_loras"),
    *("get_kv_connector_handshake_metadata", "reset_mm_cache", "reset_encoder_cache", "synchronize_device"),
)
"""Methods of workers that never change the model's weights. Some are called in every step."""
WRAPPED = {
    "vllm.engine.arg_utils.EngineArgs.add_cli_args": "Plugins have no way to add flags.",
    "vllm.engine.arg_utils.EngineArgs.from_cli_args": "The flags choose the connector and the server's middleware.",
    "vllm.engine.arg_utils.EngineArgs.create_engine_config": "Bad settings are refused before any process starts.",
    "vllm.v1.engine.input_processor.InputProcessor.process_inputs": "Requests with unusable hints get status 400.",
    "vllm.v1.engine.core.EngineCore.preprocess_add_request": "Block hashes cover tenants, adapters and media.",
    "vllm.v1.engine.core.EngineCore.reset_prefix_cache": "Manthan must first release the blocks that it references.",
    "vllm.v1.executor.abstract.Executor.collective_rpc": "Connectors are told of no load of weights and no sleep.",
    "vllm.model_executor.model_loader.utils.initialize_model": "No connector is told of a model before its load.",
    "vllm.model_executor.models.llama.LlamaForCausalLM.load_weights": "In each model, to take a weight digest.",
    "vllm.v1.attention.backend.AttentionImpl.forward": "Codec calibration on traffic needs queries.",
    "vllm.v1.core.kv_cache_manager.KVCacheManager.prefix_cache_lookup_enabled": "`get_cached_block` gets no request.",
    "vllm.v1.core.block_pool.BlockPool.get_cached_block": "Lossy blocks are served to the same owner only.",
    "vllm.v1.core.kv_cache_utils.FreeKVCacheBlockQueue.append_n": "Saved blocks are overwritten before others.",
    "vllm.v1.core.kv_cache_coordinator.KVCacheCoordinator.cache_blocks": "Marks blocks, keeps answers' states.",
}
"""Functions of vLLM that Manthan replaces, and the reason for each. Tests check the signatures of vLLM's functions."""
# Every process of vLLM imports this module. Modules that only some processes need are imported inside functions.


def wrap(name: str, owner: Any, ours: Callable[..., Any], kind: Callable[[Any], Any] = lambda made: made) -> None:
    """Replace function `name`, a key in `WRAPPED`, of a class, module or object, unless `wrap` has replaced it before.

    ours: takes vLLM's function and then its arguments. kind: for a class, `staticmethod`, `classmethod` or `method`.
    """
    assert name in WRAPPED, name
    attribute = name.rpartition(".")[2]
    theirs = getattr(owner, attribute)
    if not hasattr(theirs, "manthan"):
        made: Any = functools.update_wrapper(functools.partial(ours, theirs), getattr(theirs, "__func__", theirs))
        made.manthan = True
        setattr(owner, attribute, kind(made))


def method(made: Callable[..., T]) -> Callable[..., T]:
    """Return a plain function that calls `made`, because a `partial` as a class attribute would not get `self`."""
    return functools.wraps(made)(lambda self, *args, **kwargs: made(self, *args, **kwargs))


# -- flags and requests, in the process that takes them -----------------------------------------------


def extend_engine_args(
    add_flags: "Callable[[FlexibleArgumentParser], FlexibleArgumentParser]",
    read_flags: "Callable[[argparse.Namespace], None]",
    configure: "Callable[[EngineArgs, Callable[[], VllmConfig], bool], VllmConfig]",
) -> None:
    """Add flags to vLLM's command line, and have each engine's configuration made by `configure`.

    read_flags: may change the parsed arguments. configure: takes an engine's arguments, vLLM's function that makes the
    configuration, and True for arguments from a command line.
    """
    from vllm.engine.arg_utils import EngineArgs

    def read(from_cli_args: Any, cls: type[EngineArgs], args: argparse.Namespace) -> Any:
        read_flags(args)
        engine_args = from_cli_args.__func__(cls, args)
        engine_args.manthan_from_command_line = True
        return engine_args

    def create(create_engine_config: Any, self: EngineArgs, *args: Any, **kwargs: Any) -> Any:
        make = functools.partial(create_engine_config, self, *args, **kwargs)
        return configure(self, make, hasattr(self, "manthan_from_command_line"))

    name = "vllm.engine.arg_utils.EngineArgs"
    wrap(f"{name}.add_cli_args", EngineArgs, lambda add, parser: add_flags(add(parser)), staticmethod)
    wrap(f"{name}.from_cli_args", EngineArgs, read, classmethod)
    wrap(f"{name}.create_engine_config", EngineArgs, create, method)


def before_engine(check: "Callable[[VllmConfig, Any, str | None], object]") -> None:
    """Have each request checked before the engine gets it. An exception of `check` refuses the request.

    check: takes vLLM's configuration, the request's value of PARAMS, and the session id. Returns the value to use.
    """
    from vllm.v1.engine.input_processor import InputProcessor

    def process(process_inputs: Any, self: InputProcessor, *args: Any, **kwargs: Any) -> Any:
        request = process_inputs(self, *args, **kwargs)
        params = request.sampling_params
        extra = (params and params.extra_args) or {}
        own = extra.get(PARAMS)
        checked = check(self.vllm_config, own, request.session_id)
        if checked is not own and params is not None:
            params.extra_args = {**extra, PARAMS: checked}  # requests may share `extra`, but not `params`
        return request

    wrap("vllm.v1.engine.input_processor.InputProcessor.process_inputs", InputProcessor, process, method)


async def ask_cores(client: Any, name: str, *args: Any) -> list[Any] | None:
    """Return each engine core's answer to the utility call `name`; None if the engine of vLLM's client is dead."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        return None if client.errored else list(await client.engine_core.call_utility_all_async(name, *args))
    except EngineDeadError:
        return None


def key_check(args: argparse.Namespace) -> "Callable[[Headers], bool] | None":
    """Return vLLM's function that is True for headers with a valid API key; None for a server without keys."""
    from vllm import envs
    from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

    async def nobody(*_: Any) -> None: ...

    tokens = [key for key in (args.api_key or [envs.VLLM_API_KEY]) if key]
    return AuthenticationMiddleware(nobody, tokens).verify_token if tokens else None


# -- the engine core and its block pool --------------------------------------------------------------


def _with_content(feature: "MultiModalFeatureSpec") -> "MultiModalFeatureSpec":
    """Return a feature (image, video, audio), identified by a digest of its data; without data, the same feature."""
    from vllm.multimodal.hasher import MultiModalHasher

    if feature.data is None:
        return feature
    item: Any = feature.data
    if not hasattr(item, "manthan_content"):  # computed once, because vLLM's cache keeps the item
        item.manthan_content = MultiModalHasher.hash_kwargs("sha256", **{feature.modality: item.get_data()})
    adapter = feature.identifier.removesuffix(feature.mm_hash or feature.identifier)
    return dataclasses.replace(feature, identifier=adapter + item.manthan_content)


@functools.cache
def manager_of(spec: "KVCacheSpec") -> "SingleTypeKVCacheManager":
    """Return a manager of vLLM for a KV cache group with this spec, made once, to ask it for skipped tokens."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.single_type_kv_cache_manager import get_manager_for_kv_cache_spec

    size = spec.block_size
    return get_manager_for_kv_cache_spec(
        spec,
        max_in_flight_tokens=size,
        max_model_len=size,
        block_pool=BlockPool(1, True, size),
        enable_caching=True,
        kv_cache_group_id=0,
        scheduler_block_size=size,
    )


def tokens_to_load(request: "Request") -> int:
    """Number of tokens that all connectors together load for a newly admitted request; 0 after a preemption."""
    stats = request.prefill_stats
    return 0 if stats is None or request.num_preemptions else stats.num_external_cached_tokens


def under_construction(kind: type[T]) -> T:
    """Return the object of class `kind` whose method is innermost on the call stack.

    vLLM makes connectors inside the constructors of its scheduler and its engine core, and does not pass these objects.
    """
    frame = sys._getframe(1)
    while not isinstance(owner := frame.f_locals.get("self"), kind):
        assert frame.f_back is not None, kind
        frame = frame.f_back
    return owner


def replace_waiting(scheduler: "Scheduler", queue: "ReturnsFirstQueue") -> bool:
    """Make `queue` the scheduler's `waiting`. Return False, and replace nothing, if `waiting` has an unknown class."""
    from vllm.v1.core.sched.request_queue import FCFSRequestQueue, PriorityRequestQueue

    is_known = type(scheduler.waiting) in (FCFSRequestQueue, PriorityRequestQueue)
    if is_known:
        scheduler.waiting = queue
    return is_known


class Core:
    """Access to the engine core that has the connector. Wraps the core's resets and its calls of workers.

    The scheduler half is told of sleeps and of resets of the prefix cache. vLLM resets only while no block is
    referenced, so that Manthan must first release all its blocks. Exceptions of the half do not end the engine.
    """

    def __init__(self, half: "SchedulerHalf") -> None:
        from vllm.v1.engine.core import EngineCore, EngineCoreProc

        self._half = half
        self._tell = functools.partial(half.ask, otherwise=None)
        self.is_halting = False  # True while a reset waits for transfers to end
        self.is_pausing = False  # True while vLLM resets the prefix cache because the engine is paused
        core: Any = under_construction(EngineCore)
        self._core = core
        self._inputs: queue.Queue[Any] | None = core.input_queue if isinstance(core, EngineCoreProc) else None
        """Queue on which an idle engine core waits; None if there is none, because the caller steps the engine."""
        self._call = core.model_executor.collective_rpc
        wrap("vllm.v1.engine.core.EngineCore.reset_prefix_cache", core, self._reset)
        wrap("vllm.v1.executor.abstract.Executor.collective_rpc", core.model_executor, self._call_workers)

    def wake(self) -> None:
        """Wake an idle engine, which runs a step if the connector has work. Any thread may call `wake`."""
        from vllm.v1.engine import EngineCoreRequestType

        if self._inputs is not None:
            self._inputs.put_nowait((EngineCoreRequestType.WAKEUP, None))

    def offer(self, name: str, method: Callable[..., Any]) -> None:
        """Have `method` answer the utility call `name`, on the scheduler's thread between steps; see `ask_cores`."""
        setattr(self._core, name, method)

    def prepare_requests(self, salts: "Salts", by_content: bool) -> None:
        """Have the block hashes of this engine's requests cover tenant, LoRA adapter's files and media.

        by_content: True if hashes cover the content of media instead of names that clients gave to the media.
        """
        core, self._salts = self._core, salts

        def prepare(preprocess: Any, request: "EngineCoreRequest") -> Any:
            extra = (request.sampling_params and request.sampling_params.extra_args) or {}
            features = (request.mm_features if by_content else None) or []
            may_be_sizes = extra.get("ec_transfer_params") or core.vllm_config.ec_transfer_config
            if features and not may_be_sizes:
                if core.mm_receiver_cache is not None:  # the cache has data that the request leaves out
                    features = core.mm_receiver_cache.get_and_update_features(features)
                request = msgspec.structs.replace(request, mm_features=[_with_content(each) for each in features])
            known = not features or (not may_be_sizes and all(each.data is not None for each in features))
            said = extra.get(PARAMS), request.kv_hints, request.cache_salt, request.lora_request
            return preprocess(msgspec.structs.replace(request, cache_salt=salts.of(*said, known)))

        wrap("vllm.v1.engine.core.EngineCore.preprocess_add_request", core, prepare)

    @property
    def is_asleep(self) -> bool:
        """True while the engine sleeps (vLLM's sleep mode), wholly or with a part of its memory."""
        return bool(self._core.model_executor.is_sleeping)

    @property
    def is_ending(self) -> bool:
        """True once vLLM has told the engine core to shut down."""
        from vllm.v1.engine.core import EngineShutdownState

        return getattr(self._core, "shutdown_state", None) not in (None, EngineShutdownState.RUNNING)

    def ask(self, about_weights: Callable[[Any], T]) -> list[T]:
        """Return the results of `about_weights`, called with each worker. The scheduler half is not told."""
        return list(self._call(about_weights))

    @property
    def is_moving(self) -> bool:
        """True while vLLM or Manthan waits for a transfer, or vLLM has still to tell workers of a finished request."""
        scheduler = self._core.scheduler
        return (
            self._half.ask(self._half.is_moving, otherwise=self._half.driver.holds_any())
            or scheduler.has_finished_requests()
            or any(
                request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
                and request.request_id not in scheduler.finished_recving_kv_req_ids
                for request in scheduler.kv_holding_waiting
            )
        )

    # -- resets ---------------------------------------------------------------------------------------

    def _reset(
        self, reset: Callable[[bool, bool], bool], reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        self.is_pausing = sys._getframe(1).f_code.co_name == "_reset_caches"  # a pause, maybe for a sleep
        if self.is_pausing:
            self._tell(self._half.paused, reset_connector and not self.is_asleep)
        scheduler, was_reset, is_halted = self._core.scheduler, False, False
        try:
            if scheduler.running and not reset_running_requests:
                logger.warning("Manthan: the prefix cache is not reset, since %d requests run.", len(scheduler.running))
                self._tell(self._half.doubt)
                return reset(False, reset_connector)
            is_halted = True
            self._tell(self._half.halt)
            if self._come_to_rest(reset_running_requests):
                self._recompute_waiting()
                was_reset = reset(reset_running_requests, reset_connector)
                return was_reset
            logger.warning(
                "Manthan: the prefix cache is not reset, since transfers of blocks have not ended in %g s.", HALT_S
            )
            if reset_connector:
                scheduler.reset_connector_cache()
            return False
        finally:
            if is_halted:
                self._tell(self._half.go_on, was_reset)
            self.is_pausing = False

    def _come_to_rest(self, may_preempt: bool) -> bool:
        """Run steps that compute nothing until every transfer has ended. Return False after HALT_S seconds.

        Workers answer only within steps. A caller that steps the engine never gets the outputs of steps run here.
        For such a caller running requests are preempted first, so that vLLM computes the outputs again.
        """
        from vllm.v1.core.sched.interface import PauseState

        if not (self.is_moving or self._core.batch_queue):
            return True
        scheduler, until = self._core.scheduler, time.monotonic() + HALT_S
        before, has_queue = scheduler.pause_state, self._inputs is not None
        while may_preempt and not has_queue and scheduler.running:
            scheduler._preempt_request(scheduler.running.pop(), time.monotonic(), drop_stale_output=True)
            scheduler.prev_step_scheduled_req_ids.clear()
        scheduler.set_pause_state(PauseState.PAUSED_ALL)
        self.is_halting = True
        try:
            while self.is_moving or self._core.batch_queue:
                if time.monotonic() > until:
                    return False
                if has_queue:
                    self._core._process_engine_step()
                else:
                    self._core.step_fn()
                    time.sleep(PAUSE_S)
            return True
        finally:
            self.is_halting = False
            scheduler.set_pause_state(before)

    def _recompute_waiting(self) -> None:
        """Move all but paused streams from `kv_holding_waiting` to `waiting`, without blocks, to begin anew."""
        scheduler = self._core.scheduler
        waits = {RequestStatus.WAITING_FOR_REMOTE_KVS, RequestStatus.WAITING, RequestStatus.PREEMPTED}
        for request in [request for request in scheduler.kv_holding_waiting if request.status in waits][::-1]:
            scheduler.kv_holding_waiting.remove_request(request)
            scheduler.kv_cache_manager.free(request)
            scheduler.finished_recving_kv_req_ids.discard(request.request_id)
            scheduler.failed_recving_kv_req_ids.discard(request.request_id)
            scheduler.deferred_waiting.discard(request)
            scheduler._inflight_prefills.discard(request)  # else its old reservation blocks its new load
            request.num_computed_tokens = 0
            request.status = RequestStatus.PREEMPTED if request.num_preemptions else RequestStatus.WAITING
            scheduler.waiting.prepend_request(request)

    def _call_workers(self, call: Callable[..., Any], method: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the workers, and note calls that may load weights, free the KV cache, or add an adapter."""
        given = dict(zip(("timeout", "args", "kwargs"), args, strict=False)) | kwargs
        first = next(iter((*given.get("args", ()), *(given.get("kwargs") or {}).values())), None)
        if method == "discard" or (method == "sleep" and first == 1):  # the weights stay
            self._tell(self._half.paused, False)
        if method == "add_lora" and first is not None:
            self._tell(self._salts.adapters.content, first)
        try:
            return call(method, *args, **kwargs)
        finally:
            if method not in HARMLESS:
                self._tell(self._half.called, method in LOADS)


class Lookups:
    """Wraps lookups and insertions of vLLM's prefix cache. A lookup finds only blocks that may serve its request.

    A block's mark tells if its KV is exact, decoded by a lossy codec, or computed behind decoded blocks
    (derived). Lossy means decoded or derived. `Marks.serves` says which requests a lossy block may serve.
    """

    def __init__(self, manager: "KVCacheManager", marks: Marks, half: "SchedulerHalf") -> None:
        from vllm.v1.core.single_type_kv_cache_manager import MambaManager, SlidingWindowManager

        kinds = SlidingWindowManager, MambaManager
        self._coordinator, self._pool = manager.coordinator, manager.block_pool
        self._managers, self._marks, self._half = manager.coordinator.single_type_managers, marks, half
        self._interval = self._coordinator.retention_interval
        self._thins = self._interval is not None and any(isinstance(each, kinds) for each in self._managers)
        self._asker: Asker | None = None
        wrap("vllm.v1.core.kv_cache_manager.KVCacheManager.prefix_cache_lookup_enabled", manager, self._ask)
        wrap("vllm.v1.core.block_pool.BlockPool.get_cached_block", self._pool, self._serve)
        wrap("vllm.v1.core.kv_cache_coordinator.KVCacheCoordinator.cache_blocks", manager.coordinator, self._mark)

    def _ask(self, is_enabled: Callable[..., bool], request: Any) -> bool:
        """Note the request's asker (its session's owner), for `_serve`. vLLM calls `is_enabled` before each lookup."""
        self._asker = self._half.ask(self._half.asker, request, otherwise=None)
        return is_enabled(request)

    def _serve(self, get_cached_block: Callable[..., Any], block_hash: BlockHash, kv_cache_group_ids: list[int]) -> Any:
        first = get_cached_block(block_hash, kv_cache_group_ids)
        if first is None or all(self._marks.serves(block.block_id, self._asker) for block in first):
            return first
        served = []
        for group in kv_cache_group_ids:
            copies = cached_blocks(self._pool, make_block_hash_with_group_id(block_hash, group))
            one = next((block for block in copies if self._marks.serves(block.block_id, self._asker)), None)
            if one is None:
                return None
            served.append(one)
        return served

    def _mark(self, cache_blocks: Callable[..., None], request: Any, num_computed_tokens: int) -> None:
        managers, name, marks = self._managers, request.request_id, self._marks
        for manager in managers if marks else ():
            for source, copy in manager._pending_cow_copies:  # copy-on-write
                if marks[source.block_id]:
                    marks.copy(source.block_id, copy.block_id)
        if request.num_computed_tokens == 0:  # just admitted, with the blocks that vLLM has found
            tables = [manager.req_to_blocks.get(name, ()) for manager in managers] if marks else []
            block_ids = [[block.block_id for block in blocks] for blocks in tables]
            self._half.ask(self._half.found, request, block_ids, otherwise=None)
        before = [manager.num_cached_block.get(name, 0) for manager in managers] if marks else []
        self._enter(cache_blocks, request, num_computed_tokens)
        for manager, first in zip(managers, before, strict=False):
            self._cached(request, manager.req_to_blocks.get(name, ()), first)

    def _enter(self, cache_blocks: Callable[..., None], request: Any, num_computed_tokens: int) -> None:
        """Enter blocks in the prefix cache: in the prompt vLLM's choice, after it all that can be hit.

        Of windows and states, vLLM by default enters only those at the end of a prompt, or of a prefix that prompts
        share; with `--prefix-cache-retention-interval` more or all. The pool reuses the others' blocks at once. Unsaved
        blocks in the prefix cache are overwritten last.
        """
        coordinator = self._coordinator
        size = coordinator.scheduler_block_size
        end = (request.num_prompt_tokens - 1) // size * size
        cache_blocks(request, min(num_computed_tokens, end) if self._thins else num_computed_tokens)
        if self._thins and num_computed_tokens > end:
            coordinator.retention_interval = None  # vLLM keeps windows and states up to the answer's end
            try:
                cache_blocks(request, num_computed_tokens)
            finally:
                coordinator.retention_interval = self._interval

    def _cached(self, request: Any, blocks: "Sequence[KVCacheBlock]", first: int) -> None:
        """Mark newly cached `blocks`, from index `first` on. Uncache lossy copies of the exact blocks among these."""
        new = [block for block in blocks[first:] if block.block_hash is not None and not block.is_null]
        if not new:
            return
        block_ids, marks = [block.block_id for block in new], self._marks
        is_marked = self._half.ask(self._half.computed, request, block_ids, otherwise=False)
        if not is_marked and marks.lossy(block.block_id for block in blocks):
            marks.set(set(block_ids) - marks.lossy(block_ids), Mark.DERIVED, None)
        known, lossy = marks.lossy(block_ids), set[int]()
        for block in new:
            if block.block_id not in known:
                for name in (block.block_hash, *self._pool.cached_block_hashes_by_block.get(block.block_id, ())):
                    lossy |= {copy.block_id for copy in cached_blocks(self._pool, name) if marks[copy.block_id]}
        if lossy:
            overwrite_next(self._pool, [self._pool.blocks[block_id] for block_id in lossy])


def cached_blocks(pool: "BlockPool", name: Any) -> "Iterable[KVCacheBlock]":
    """Return cached blocks with this hash, in vLLM's order. name: block hash with group id."""
    found = pool.cached_block_hash_to_block._cache.get(name)
    return found.values() if isinstance(found, dict) else () if found is None else (found,)


def overwrite_next(pool: "BlockPool", blocks: "Sequence[KVCacheBlock]") -> None:
    """Take blocks out of the prefix cache. Move those without a reference to the head of the free queue."""
    free = [block for block in blocks if block.ref_cnt == 0]
    pool.evict_blocks({block.block_id for block in blocks})
    pool.touch(free)
    pool.free_blocks(free)


class VllmPool:
    """vLLM's block pool with the methods of `manthan.manager.pool.Pool`; see there.

    A saved block has a compressed copy in a tier. A block passed to `give_up` counts as saved, even without a copy.

    block_tokens: number of tokens in a block, by group. event: None if events are off; else makes vLLM's event
    from a block's (group, hash) and the pool's medium.
    """

    def __init__(
        self,
        pool: "BlockPool",
        block_tokens: Mapping[int, int],
        event: "Callable[[BlockName, str], BlockStored | None] | None" = None,
    ) -> None:
        self._pool, self._block_tokens, self._event = pool, block_tokens, event
        self.size = pool.num_gpu_blocks - 1  # the null block is never free
        self.marks = Marks(self._watch)
        self._free, self._saved, self._given_up = pool.free_block_queue, set[int](), set[int]()
        """vLLM's free queue, ids of saved blocks, and ids of blocks given up. Blocks given up are also in `_saved`."""
        self._kept: dict[int, KVCacheBlock] = {}
        """By id, saved blocks in the order of the free queue. Some may have left the queue since."""
        self._finds: dict[int, WeakSet[Request]] = {}  # by block id, requests that expect the block; see `count_on`
        self._bereft: set[Request] = set()
        self._last_empty: KVCacheBlock | None = None  # last unhashed block at the free queue's head; None if unknown
        wrap("vllm.v1.core.kv_cache_utils.FreeKVCacheBlockQueue.append_n", self._free, self._append)

    def _watch(self, block_ids: Iterable[int]) -> None:
        self._pool._reuse_watchers.update(dict.fromkeys(block_ids, self._reused))

    def _reused(self, block: "KVCacheBlock") -> None:
        """Forget all facts about a watched block: the pool hands it out for new KV, or was reset."""
        block_id = block.block_id
        self._unsave(block_id)
        if self.marks[block_id]:
            self.marks.clear((block_id,))
        if block_id in self._finds:
            self._bereft.update(self._finds.pop(block_id))
        if block is self._last_empty:
            self._last_empty = None

    def _unsave(self, block_id: int) -> None:
        self._saved.discard(block_id)
        self._given_up.discard(block_id)
        self._kept.pop(block_id, None)

    def __len__(self) -> int:
        return self._pool.get_num_free_blocks()

    def lookup(self, group: int, block_hashes: "Iterable[bytes]") -> list[int]:
        find = self._pool.cached_block_hash_to_block._cache.get
        suffix: Any = make_block_hash_with_group_id(BlockHash(b""), group)
        found = map(find, [block_hash + suffix for block_hash in block_hashes])
        firsts = (next(iter(blocks.values())) if isinstance(blocks, dict) else blocks for blocks in found)
        return [-1 if block is None else block.block_id for block in firsts]

    def count_on(self, block_id: int, request: "Request") -> None:
        """Have `take_bereft` return `request` once the pool has handed out `block_id`, or was reset."""
        self._finds.setdefault(block_id, WeakSet()).add(request)
        self._watch([block_id])

    def take_bereft(self) -> "set[Request]":
        """Return the requests passed to `count_on` that lost the block since the last call."""
        bereft, self._bereft = self._bereft, set()
        return bereft

    def hold(self, block_ids: "Sequence[int]") -> None:
        self._pool.touch([self._pool.blocks[block_id] for block_id in block_ids])

    def take(self, count: int) -> list[int]:
        return [block.block_id for block in self._pool.get_new_blocks(count)]

    def free(self, block_ids: "Sequence[int]") -> None:
        self._pool.free_blocks([self._pool.blocks[block_id] for block_id in block_ids])

    def cache(self, block_id: int, group: int, block_hash: bytes, position: int) -> None:
        block, name = self._pool.blocks[block_id], make_block_hash_with_group_id(BlockHash(block_hash), group)
        block.set_block_hash(name, num_tokens=(position + 1) * self._block_tokens[group])
        self._pool.cached_block_hash_to_block.insert(name, block)
        if self._event is not None and (told := self._event((group, block_hash), self._pool.medium)) is not None:
            self._pool.kv_event_queue.append(told)

    def release(self, group: int, block_hashes: "Sequence[bytes]") -> None:
        overwrite_next(self._pool, self._copies(group, block_hashes)[::-1])

    def loaded(self, block_ids: "Sequence[int]") -> None:
        self._saved.update(block_ids)
        self._watch(block_ids)

    def keep(self, group: int, block_hashes: "Sequence[bytes]") -> None:
        blocks = self._copies(group, block_hashes)
        block_ids = [block.block_id for block in blocks]
        self.loaded(block_ids)
        self._given_up.difference_update(block_ids)
        free = [block for block in blocks if block.ref_cnt == 0]
        for block in free:
            self._free.remove(block)
        self._insert(free)

    def lead(self, group: int, block_hashes: "Sequence[bytes]") -> None:
        found = self._copies(group, block_hashes)
        self._put_first([block for block in found if block.ref_cnt == 0 and block.block_id in self._saved])

    def give_up(self, group: int, block_hashes: "Sequence[bytes]") -> None:
        blocks = [block for block in self._copies(group, block_hashes)[::-1] if block.ref_cnt == 0]
        block_ids = [block.block_id for block in blocks]
        self.loaded(block_ids)
        self._given_up.update(block_ids)
        self._put_first(blocks)

    def _put_first(self, blocks: "Sequence[KVCacheBlock]") -> None:
        """Move free blocks, in this order, ahead of all other saved blocks in the free queue."""
        for block in blocks:
            self._free.remove(block)
            self._kept.pop(block.block_id, None)
        if blocks:
            behind, self._kept = self._kept, {}
            self._insert(blocks)
            self._kept |= behind

    def forget(self, group: int, block_hashes: "Sequence[bytes]") -> None:
        blocks = [block for block in self._copies(group, block_hashes) if block.block_id in self._saved]
        for block in blocks:
            self._unsave(block.block_id)
        free = [block for block in reversed(blocks) if block.ref_cnt == 0]
        self._pool.touch(free)
        self._pool.free_blocks(free)

    def runway(self, most: int) -> int:
        count = 0
        for count, block in enumerate(islice(self._free.iter_blocks_after(None), most), 1):
            if block.block_hash is not None and block.block_id not in self._saved:
                return count - 1
        return count

    def unsaved(self, most: int) -> Iterator[FreeBlock]:
        for block in list(islice(self._free.iter_blocks_after(None), most)):
            if block.block_hash is not None and block.block_id not in self._saved:
                yield _named(block)

    def saved(self, most: int) -> Iterator[tuple[int, FreeBlock]]:
        for at, block in enumerate(list(islice(self._free.iter_blocks_after(None), most))):
            if block.block_hash is not None and block.block_id in self._saved and block.block_id not in self._given_up:
                yield at, _named(block)

    def redundant(self, spare: int) -> Iterator[FreeBlock]:
        computed = self._saved.difference(self._given_up, self.marks.decoded)
        used = [block for block_id in computed if (block := self._pool.blocks[block_id]).ref_cnt > 0]
        kept = [block for block in self._kept.values() if block.ref_cnt == 0 and block.block_hash is not None]
        later = [block for block in kept[spare:][::-1] if block.block_id in computed]
        return (_named(block) for block in (*used, *later) if block.block_hash is not None)

    def _copies(self, group: int, block_hashes: "Sequence[bytes]") -> "list[KVCacheBlock]":
        names = [make_block_hash_with_group_id(BlockHash(name), group) for name in dict.fromkeys(block_hashes)]
        return [copy for name in names for copy in cached_blocks(self._pool, name)]

    def _append(self, append_n: "Callable[[list[KVCacheBlock]], None]", blocks: "list[KVCacheBlock]") -> None:
        """Append freed blocks to the free queue, but insert saved blocks behind the earlier saved blocks."""
        if self._given_up:  # blocks given up count as unsaved now, because a request has used them
            used = self._given_up.intersection([block.block_id for block in blocks])
            for block_id in used:
                self._unsave(block_id)
        saved = [block for block in blocks if block.block_id in self._saved]
        append_n([block for block in blocks if block.block_id not in self._saved] if saved else blocks)
        self._insert(saved)

    def _insert(self, blocks: "Sequence[KVCacheBlock]") -> None:
        """Link saved blocks into the free queue, behind the saved blocks that are in it."""
        for block in blocks:
            self._kept.pop(block.block_id, None)
        if not blocks:
            return
        last = self._last_kept()
        after = last.next_free_block
        for block in blocks:
            last.next_free_block, block.prev_free_block = block, last
            self._kept[block.block_id] = last = block
        assert after is not None
        last.next_free_block, after.prev_free_block = after, last
        self._free.num_free_blocks += len(blocks)

    def _last_kept(self) -> "KVCacheBlock":
        """Return the free queue's last saved block; if none, the block or fake head before the first with a hash."""
        while self._kept:
            last = next(reversed(self._kept.values()))
            if last.ref_cnt == 0 and last.block_hash is not None:
                return last
            del self._kept[last.block_id]
        if self._last_empty is None:
            blocks = self._free.iter_blocks_after(None)
            first = next((block for block in blocks if block.block_hash is not None), self._free.fake_free_list_tail)
            before = first.prev_free_block
            assert before is not None
            if before is self._free.fake_free_list_head:
                return before
            self._last_empty = before
            self._watch([before.block_id])
        return self._last_empty


def _named(block: "KVCacheBlock") -> FreeBlock:
    assert block.block_hash is not None
    return FreeBlock(get_group_id(block.block_hash), get_block_hash(block.block_hash), block.block_id)


def plan_kv_cache(vllm_config: "VllmConfig") -> "KVCacheConfig":
    """Return the KV cache that vLLM would plan for a built model with 1 PiB of memory. Raises vLLM's exceptions."""
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

    register_all_kvcache_specs(vllm_config)
    specs, memory = [get_kv_cache_spec(vllm_config)], [1 << 50]
    layouts = get_supported_kv_cache_layouts(get_current_attn_backends(vllm_config))
    resolve_kv_cache_layout(vllm_config, [[layout.name for layout in layouts]], list(specs[0].values()))
    planning: Any = kv_cache_utils
    groups = []
    if not hasattr(planning, "get_kv_cache_configs"):
        planning = importlib.import_module("vllm.v1.core.kv_cache_planning")
        groups = [planning.get_global_kv_cache_groups(vllm_config, specs)]
    planned: KVCacheConfig = planning.get_kv_cache_configs(vllm_config, specs, memory, *groups)[0]
    return planned


# -- the model and the device, on workers -------------------------------------------------------------


def rotary_modules(head_dim: int) -> list[Any]:
    """Return this process's RoPE modules that have a `cos_sin_cache` and a head size of `head_dim`."""
    from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT

    modules: list[Any] = [each for each in _ROPE_DICT.values() if getattr(each, "cos_sin_cache", None) is not None]
    return [each for each in modules if each.head_size == head_dim]


def changed_base(module: Any) -> float | None:
    """Return the base of a RoPE module's frequencies if vLLM has scaled the base (dynamic NTK); else None."""
    from vllm.model_executor.layers.rotary_embedding import dynamic_ntk_alpha_rope, dynamic_ntk_scaling_rope

    power = module.rotary_dim / (module.rotary_dim - 2) if module.rotary_dim > 2 else 1.0
    if isinstance(module, dynamic_ntk_scaling_rope.DynamicNTKScalingRotaryEmbedding):
        share = module.max_position_embeddings / module.max_trained_positions
        return float(module.base * (module.scaling_factor * share - (module.scaling_factor - 1)) ** power)
    if isinstance(module, dynamic_ntk_alpha_rope.DynamicNTKAlphaRotaryEmbedding):
        return float(module.base * module.scaling_alpha**power)
    return None


def write_latents(
    module: Any, latents: "torch.Tensor", keys: "torch.Tensor", cache: "torch.Tensor", slots: Any
) -> None:
    """Write tokens into a layer's MLA cache, as vLLM's attention backend does. slots: slot of each token.

    latents: [tokens, numbers of a latent]. keys: parts of the keys with RoPE, [tokens, 1, numbers of such a part].
    """
    scale = getattr(module, "_k_scale", None)  # used for quantized caches only
    cache = cache.squeeze(1) if cache.ndim == 4 else cache  # the backend expects no dimension for heads
    module.impl.do_kv_cache_update(latents, keys, cache, slots, getattr(module, "kv_cache_dtype", "auto"), scale)


def parts_of(name: str, tensor: "torch.Tensor") -> "Iterator[tuple[str, torch.Tensor]]":
    """Yield name and value of each plain tensor in a tensor: several for torchao's or shared weights, else one."""
    from vllm.model_executor.model_loader.weight_checksum import _tensors

    yield from ((each, part.detach()) for each, part in _tensors(name, tensor))


def tensors_of(model: "torch.nn.Module") -> "Iterator[tuple[str, torch.Tensor]]":
    """Yield name and value of a model's parameters, and of buffers in the state dict, as plain tensors."""
    persistent = model.state_dict(keep_vars=True).keys()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in persistent:
            yield from parts_of(name, tensor)


def watch_models(made: "Callable[[VllmConfig, ModelConfig, torch.nn.Module], None]") -> None:
    """Have `made` called with each model of this process, before the weights are loaded.

    A model inside another is loaded with the outer model, so that `made` is called for outer models only.
    """
    from vllm.model_executor.model_loader import utils

    name = "vllm.model_executor.model_loader.utils.initialize_model"
    theirs, is_inner = utils.initialize_model, False

    def watched(initialize: Any, vllm_config: "VllmConfig", *args: Any, **kwargs: Any) -> Any:
        nonlocal is_inner
        if is_inner:
            return initialize(vllm_config, *args, **kwargs)
        is_inner = True
        try:
            model = initialize(vllm_config, *args, **kwargs)
        finally:
            is_inner = False
        made(vllm_config, kwargs.get("model_config") or vllm_config.model_config, model)
        return model

    package = utils.__name__.rpartition(".")[0]
    for module in list(sys.modules.values()):  # loaders import the function by name
        if getattr(module, "__name__", "").startswith(package) and getattr(module, "initialize_model", None) is theirs:
            wrap(name, module, watched)


def model_tensors(worker: Any) -> "Iterator[torch.Tensor]":
    """Yield the tensors of a worker's model, and of its draft model if any; see `tensors_of`."""
    runner = worker.model_runner
    draft = getattr(runner, "get_draft_model", lambda: None)()
    for model in (runner.get_model(), draft):
        if model is not None:
            yield from (tensor for _, tensor in tensors_of(model))


def copy_blocks(sources: "torch.Tensor", targets: "torch.Tensor", sizes: "torch.Tensor") -> None:
    """Copy pieces of memory on the current stream. Addresses, and sizes in bytes, are int64 tensors on the CPU."""
    from vllm import _custom_ops as ops

    ops.swap_blocks_batch(sources, targets, sizes)


def pin(memory: "torch.Tensor") -> None:
    """Page-lock RAM for transfers of the GPU. Raises RuntimeError if that fails."""
    from vllm.v1.simple_kv_offload.cuda_mem_ops import pin_tensor

    pin_tensor(memory)
