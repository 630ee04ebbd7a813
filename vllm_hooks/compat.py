"""What Manthan touches of vLLM that vLLM does not offer to connectors; written for 0.32 and compared with
0.33; docs/compatibility.md says what ran on which.

Everything here may change with any release of vLLM; everything else in `vllm_hooks` keeps to the connector API and to
what vLLM documents.
"""

import argparse
import dataclasses
import functools
import queue
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, cast

import msgspec
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    get_block_hash,
    get_group_id,
    make_block_hash_with_group_id,
    resolve_block_hashes,
)

from manthan.manager.sessions.marks import Mark, Marks, Owner
from manthan.manager.sessions.session import BlockName

if TYPE_CHECKING:
    import torch
    from fastapi import FastAPI
    from starlette.datastructures import Headers
    from vllm import EngineArgs
    from vllm.config import ModelConfig, VllmConfig
    from vllm.distributed.kv_events import BlockStored
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.kv_hints import KvHintsEnvelope

    from manthan.manager.work import Name
    from manthan.vllm_hooks.adapters import Adapters

logger = init_logger("vllm.manthan")

T = TypeVar("T")

HALT_S = 2.0
"""Seconds for which a reset waits for transfers to end, at most."""
PAUSE_S = 1e-3
"""Seconds between two steps of that, which leave the interpreter to threads that transfer."""
LOADS = ("load_model", "reload_weights", "update_weights", "finish_weight_update")
"""Methods of workers that change weights. Not all of them do so by the model's `load_weights`."""
ADAPTER_CONTENT = "manthan_adapter_content"
"""Of a request: what stands for the content of its LoRA adapter."""

# Every process of vLLM loads plugins: what only some of them need is imported where it is used.

# -- flags and requests, in the process that takes them -----------------------------------------------


def register_connector(name: str, module: str) -> bool:
    """Register a connector by its class's name and module; returns whether it was not yet."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if name in KVConnectorFactory._registry:
        return False
    KVConnectorFactory.register_connector(name, module, name)
    return True


def extend_engine_args(
    add_flags: "Callable[[FlexibleArgumentParser], FlexibleArgumentParser]",
    read_flags: "Callable[[argparse.Namespace], None]",
    precheck: "Callable[[EngineArgs, bool], None]",
    check: "Callable[[VllmConfig, bool], None]",
) -> None:
    """Have a say in vLLM's command line: plugins get no hook for flags of their own, so EngineArgs is wrapped.

    add_flags: adds to the parser. read_flags: may change what was parsed before vLLM reads it. precheck, check: are
    told each engine's arguments and its configuration once that is made, before any process starts, and whether they
    came from a command line.
    """
    from vllm.engine.arg_utils import EngineArgs

    wrapped: Any = EngineArgs  # mypy allows nobody to assign to methods
    add_cli_args, from_cli_args = wrapped.add_cli_args, wrapped.from_cli_args.__func__
    create_engine_config = wrapped.create_engine_config

    @functools.wraps(add_cli_args)
    def with_flags(parser: "FlexibleArgumentParser") -> "FlexibleArgumentParser":
        with_theirs: FlexibleArgumentParser = add_cli_args(parser)
        return add_flags(with_theirs)

    @functools.wraps(from_cli_args)
    def with_read(cls: type[EngineArgs], args: argparse.Namespace) -> Any:
        read_flags(args)
        engine_args = from_cli_args(cls, args)
        engine_args.manthan_from_command_line = True
        return engine_args

    @functools.wraps(create_engine_config)
    def with_check(self: EngineArgs, *args: Any, **kwargs: Any) -> "VllmConfig":
        from_command_line = hasattr(self, "manthan_from_command_line")
        precheck(self, from_command_line)
        vllm_config: VllmConfig = create_engine_config(self, *args, **kwargs)
        check(vllm_config, from_command_line)
        return vllm_config

    wrapped.add_cli_args = staticmethod(with_flags)
    wrapped.from_cli_args = classmethod(with_read)
    wrapped.create_engine_config = with_check


def before_engine(
    check: "Callable[[VllmConfig, Any], object]", params_key: str, check_id: Callable[[str | None], None]
) -> None:
    """Have each request's `params_key`, and its session's id, checked on its way to the engine; what `check` and
    `check_id` raise refuses the request.

    What `check` returns takes the place of what it was given.
    """
    from vllm.v1.engine.input_processor import InputProcessor

    wrapped: Any = InputProcessor
    process_inputs = wrapped.process_inputs

    @functools.wraps(process_inputs)
    def with_check(self: InputProcessor, *args: Any, **kwargs: Any) -> Any:
        request = process_inputs(self, *args, **kwargs)
        check_id(request.session_id)
        params = request.sampling_params
        if params is not None:
            extra = params.extra_args or {}
            own = extra.get(params_key)
            checked = check(self.vllm_config, own)
            if checked is not own:
                params.extra_args = {**extra, params_key: checked}  # these are the request's own, but `extra` is not
        return request

    wrapped.process_inputs = with_check


def before_answer(
    check: "Callable[[VllmConfig, Any], object]", params_key: str, check_id: Callable[[str | None], None]
) -> None:
    """The same before the server begins to answer, so that a streamed answer has the right status too."""
    from vllm.entrypoints.generate.base.serving import GenerateBaseServing
    from vllm.entrypoints.serve.engine.serving import BaseServing

    serving: Any = GenerateBaseServing
    # From the body, a header or vllm_xargs; routes whose bodies have none ask for the header alone.
    for name in ("_get_session_id", "_get_session_id_from_headers"):
        setattr(serving, name, staticmethod(_checking(getattr(serving, name), check_id)))

    wrapped: Any = BaseServing
    check_model = wrapped._check_model

    @functools.wraps(check_model)
    async def with_check(self: BaseServing, request: Any) -> Any:
        error = await check_model(self, request)
        processor = getattr(self, "input_processor", None)
        if error is None and processor is not None:
            check(processor.vllm_config, getattr(request, params_key, None))
        return error

    wrapped._check_model = with_check


def _checking(get_session_id: Callable[..., str | None], check_id: Callable[[str | None], None]) -> Any:
    @functools.wraps(get_session_id)
    def get_checked_id(*args: Any, **kwargs: Any) -> str | None:
        session_id = get_session_id(*args, **kwargs)
        check_id(session_id)
        return session_id

    return get_checked_id


def hash_media_by_content(refuse: Callable[[], Exception]) -> None:
    """Have block hashes hold what images and the like contain, not the ids that clients gave them: an id means another
    image tomorrow. `refuse` makes the error for an id without content."""
    from vllm.multimodal import hasher
    from vllm.multimodal.processing.inputs import ProcessorInputs

    wrapped: Any = ProcessorInputs
    get_hashes = wrapped.get_mm_hashes
    if hasattr(get_hashes, "manthan"):
        return

    @functools.wraps(get_hashes)
    def of_content(self: ProcessorInputs, *args: Any, **kwargs: Any) -> Any:
        if not any(given is not None for items in (self.mm_uuid_items or {}).values() for given in items or ()):
            return get_hashes(self, *args, **kwargs)
        for items in self.mm_data_items.values():
            if any(item is None for item in items.get_all_items_for_hash()):
                raise refuse()
        return get_hashes(dataclasses.replace(self, mm_uuid_items=None), *args, **kwargs)

    of_content.manthan = True  # type: ignore[attr-defined]
    wrapped.get_mm_hashes = of_content
    hasher._get_image_id_bytes = lambda image: None  # vLLM would take an id in the image's EXIF for its content


def hash_features_by_content(refuse: Callable[[], Exception]) -> None:
    """The same where a client sends media as another server has prepared them (`--enable-scale-out`), with hashes."""
    from hashlib import sha256

    from vllm.entrypoints.scale_out.token_in_token_out import mm_features

    decode = mm_features.mm_kwargs_from_features
    if hasattr(decode, "manthan"):
        return

    @functools.wraps(decode)
    def of_content(features: Any) -> Any:
        for modality, hashes in features.mm_hashes.items():
            data = (features.kwargs_data or {}).get(modality, [None])
            if None in data:
                raise refuse()
            more = (features.mm_metadata or {}).get(modality, [""] * len(data))
            parts = [f"{len(item)} {item} {beside}" for item, beside in zip(data, more, strict=True)]
            hashes[:] = [sha256(part.encode()).hexdigest() for part in parts]
        return decode(features)

    of_content.manthan = True  # type: ignore[attr-defined]
    mm_features.mm_kwargs_from_features = of_content  # before the route that has a name of its own for it is made


class Asked(NamedTuple):
    """What came of a question to engine cores: an answer of each; or none, for they are dead."""

    answers: list[Any]
    is_dead: bool = False


async def ask_cores(client: Any, name: str, *args: Any) -> Asked:
    """Call what each engine core behind this client (`app.state.engine_client`) was told to `offer`.

    vLLM's own way to its workers, `collective_rpc`, does not lead to the scheduler; its sleep mode and its prefix cache
    are reached like this.
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    if client.errored:
        return Asked([], is_dead=True)
    try:
        return Asked(await client.engine_core.call_utility_all_async(name, *args))
    except EngineDeadError:
        return Asked([], is_dead=True)


def add_routes(attach: "Callable[[FastAPI], None]") -> None:
    """Have `attach` add routes to each API server that is built for an engine, behind vLLM's own.

    This is what vLLM calls an endpoint plugin. vLLM looks for such a plugin only where VLLM_PLUGINS names it, and then
    for no plugin of any kind that is not named there. Manthan's flags are what turns ours on, so the search is wrapped.
    """
    from vllm import plugins

    class Endpoints:
        name, required_tasks = "manthan", ("generate",)

        def attach_router(self, app: "FastAPI") -> None:
            attach(app)

        async def init_state(self, *_: Any) -> None:
            """Routes find the engine's client in the app."""

    load = plugins.load_endpoint_plugins

    @functools.wraps(load)
    def with_ours(supported_tasks: Any = None) -> Any:
        found = load(supported_tasks)
        return [*found, Endpoints()] if "generate" in (supported_tasks or ()) else found

    plugins.load_endpoint_plugins = with_ours


def key_check(args: argparse.Namespace) -> "Callable[[Headers], bool] | None":
    """What tells whether a request has one of the API keys of a server with these flags; None where there is no key.

    It is that of vLLM's own guard, which looks at paths that begin with /v1 and the like only.
    """
    from vllm import envs
    from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

    async def nobody(*_: Any) -> None: ...

    tokens = [key for key in (args.api_key or [envs.VLLM_API_KEY]) if key]
    return AuthenticationMiddleware(nobody, tokens).verify_token if tokens else None


# -- the engine core and its block pool, on the scheduler's thread ------------------------------------


def tell_adapters_apart(adapters: "Adapters") -> None:
    """Have blocks' hashes hold what LoRA adapters contain in place of their paths, in this process.

    vLLM hashes requests as they come, off the scheduler's thread; a request keeps what its first block was given.
    """
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.engine.core import EngineCore

    def keys(request: Any) -> list[tuple[str, str, str]]:
        adapter = request.lora_request
        if not adapter:
            return []
        if getattr(request, ADAPTER_CONTENT, None) is None:
            setattr(request, ADAPTER_CONTENT, adapters.content(adapter))
        return [("lora", adapter.lora_name, getattr(request, ADAPTER_CONTENT))]

    core: Any = EngineCore
    add_lora = getattr(core.add_lora, "__wrapped__", core.add_lora)  # an earlier engine of this process may have had it

    @functools.wraps(add_lora)
    def with_content(self: EngineCore, adapter: Any) -> Any:
        with adapters.loading(adapter):
            return add_lora(self, adapter)

    kv_cache_utils._gen_lora_extra_hash_keys, core.add_lora = keys, with_content


def salt_requests(salt: "Callable[[Any, KvHintsEnvelope | None, str | None], str | None]", params_key: str) -> None:
    """Have each request of the engine under construction take the cache salt that `salt` makes of its `params_key`, its
    envelope and its own salt.

    vLLM hashes a request where it makes it of what came in, before any connector hears of it.
    """
    from vllm.v1.engine import EngineCoreRequest

    core = _core_under_construction()
    if core is None:  # somebody else makes the requests, in tests
        return
    preprocess = core.preprocess_add_request

    @functools.wraps(preprocess)
    def with_salt(request: EngineCoreRequest) -> Any:
        extra = (request.sampling_params and request.sampling_params.extra_args) or {}
        salted = salt(extra.get(params_key), request.kv_hints, request.cache_salt)
        return preprocess(msgspec.structs.replace(request, cache_salt=salted))

    core.preprocess_add_request = with_salt


def engine_waker() -> Callable[[], None]:
    """A function, for any thread, that makes the engine under construction run a step if its connector has work.

    An engine with nothing to do blocks on its input queue, and vLLM hands connectors no way to that queue. Where there
    is none (an in-process engine, stepped by its caller), the function does nothing: sweeps wait for the next step.
    """
    from vllm.v1.engine.core import EngineCoreProc

    core = _core_under_construction()
    return _ring(core) if isinstance(core, EngineCoreProc) else lambda: None


def press_on(goes_on: Callable[[], bool]) -> None:
    """Have the engine under construction take its next step at once, where it would pause since the model had nothing
    to compute, if `goes_on` says so.

    vLLM pauses a millisecond each time, for threads that load; with its asynchronous scheduling that is twice for a
    restore, and longer than decoding takes. It does so if a step says that the model was not run, and asks that of
    nothing else but engines of data parallelism, which are left as they are.
    """
    from vllm.v1.engine.core import DPEngineCoreProc, EngineCoreProc

    core = _core_under_construction()
    if not isinstance(core, EngineCoreProc) or isinstance(core, DPEngineCoreProc):
        return

    def brisk(step: Callable[[], tuple[Any, bool]]) -> Callable[[], tuple[Any, bool]]:
        @functools.wraps(step)
        def without_pause() -> tuple[Any, bool]:
            outputs, was_run = step()
            return outputs, was_run or goes_on()

        return without_pause

    own: Any = core  # one of these becomes its `step_fn` in a moment
    own.step, own.step_with_batch_queue = brisk(own.step), brisk(own.step_with_batch_queue)


def ask_workers(ask: Callable[[Any], Any]) -> list[Any] | None:
    """What `ask` returns of each worker of the engine under construction; None where there is no engine core."""
    core = _core_under_construction()
    return None if core is None else core.model_executor.collective_rpc(ask)


def offer(name: str, method: Callable[..., Any]) -> None:
    """Have the engine core under construction answer `ask_cores` by this method: on the scheduler's thread, between two
    steps, or at once while there are none. What it returns is made of what msgpack knows."""
    core = _core_under_construction()
    if core is not None:
        setattr(core, name, method)


def _core_under_construction() -> Any:
    """The EngineCore, or None: the scheduler half is built inside its constructor, so it is found on the stack."""
    from vllm.v1.engine.core import EngineCore

    frame = sys._getframe(1)
    while frame is not None:
        core = frame.f_locals.get("self")
        if isinstance(core, EngineCore):
            return core
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _ring(core: "EngineCoreProc") -> Callable[[], None]:
    from vllm.v1.engine import EngineCoreRequestType

    inputs: queue.Queue[Any] = core.input_queue
    return lambda: inputs.put_nowait((EngineCoreRequestType.WAKEUP, None))


class Halting(Protocol):
    """The scheduler half as sleeps and resets see it."""

    def before_sleep(self) -> None:
        """Begin what is to be done before an engine sleeps with its weights."""

    def halt(self) -> None:
        """Begin no transfer, and end those that are under way as soon as that is safe."""

    @property
    def is_moving(self) -> bool:
        """True while a transfer is under way."""

    def go_on(self, was_reset: bool) -> None:
        """Undo `halt`. was_reset: True if vLLM's prefix cache is empty now."""

    def doubt(self) -> None:
        """A reset failed that may have been asked for since the weights are others."""

    def called(self, has_loaded: bool) -> None:
        """Workers did something that a caller asked for. has_loaded: True if that was to load weights."""


class Resets:
    """Sleeps, and resets of the prefix cache, of the engine under construction.

    vLLM resets only while no block is referenced, so Manthan lets go of its blocks first. Connectors are not told, so
    methods of the engine core are wrapped. Where there is no engine core, nothing is.

    Args:
        half: told before vLLM resets, and after.
    """

    def __init__(self, half: Halting) -> None:
        self._half = half
        self._due = 0
        """Resets to come that belong to a sleep, which keeps the weights."""
        self._keeps = False
        """True during such a reset."""
        self.is_halting = False
        """True while transfers are waited for."""
        self._core = core = _core_under_construction()
        if core is not None:
            core.reset_prefix_cache = self._halted(core.reset_prefix_cache)
            core.sleep = self._asleep(core.sleep)
            core.collective_rpc = self._calling(core.collective_rpc)
            core._reset_caches = self._keeping(core._reset_caches)
            if (release := getattr(core, "release_kv_cache_memory", None)) is not None:
                core.release_kv_cache_memory = self._releasing(release)

    @property
    def is_asleep(self) -> bool:
        """True if memory is gone: the KV cache's, or all of it."""
        return self._core is not None and bool(self._core.model_executor.is_sleeping)

    def ask(self, about_weights: Callable[[Any], T]) -> list[T] | None:
        """Return what `about_weights` returns of each worker; None if no worker can be asked."""
        if self._core is None:
            return None
        try:
            answers: list[T] = self._core.model_executor.collective_rpc(about_weights)
        except Exception as error:  # whatever it is, the engine goes on
            logger.warning("Manthan: it cannot be told whether weights change: %s: %s", type(error).__name__, error)
            return None
        return answers

    @property
    def is_moving(self) -> bool:
        """True while vLLM, or this connector, waits for a transfer."""
        from vllm.v1.request import RequestStatus

        scheduler = self._core.scheduler
        return (
            self._half.is_moving
            or scheduler.has_finished_requests()
            or any(
                request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
                and request.request_id not in scheduler.finished_recving_kv_req_ids
                for request in scheduler.kv_holding_waiting
            )
        )

    # -- resets ---------------------------------------------------------------------------------------

    def _halted(self, reset: Callable[[bool, bool], bool]) -> Callable[..., bool]:
        @functools.wraps(reset)
        def once_halted(reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
            scheduler, reset_connector = self._core.scheduler, reset_connector and not self._keeps
            if scheduler.running and not reset_running_requests:
                logger.warning("Manthan: the prefix cache is not reset, since %d requests run.", len(scheduler.running))
                self._half.doubt()
                return reset(False, reset_connector)
            was_reset = False
            self._half.halt()
            try:
                if self._come_to_rest():
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
                self._half.go_on(was_reset)

        return once_halted

    def _come_to_rest(self) -> bool:
        """Take steps in which vLLM computes nothing, until every transfer has ended; False if that takes too long.

        Workers answer with steps only.
        """
        from vllm.v1.core.sched.interface import PauseState

        if not (self.is_moving or self._core.batch_queue):
            return True
        scheduler, until = self._core.scheduler, time.monotonic() + HALT_S
        before, told = scheduler.pause_state, list[tuple[Any, bool]]()
        scheduler.set_pause_state(PauseState.PAUSED_ALL)
        self.is_halting = True
        try:
            while self.is_moving or self._core.batch_queue:
                if time.monotonic() > until:
                    return False
                self._step(told)
            return True
        finally:
            self.is_halting = False
            scheduler.set_pause_state(before)
            if told:
                self._tell_later(told)

    def _step(self, told: list[tuple[Any, bool]]) -> None:
        """Take a step. told: gets its outputs, where an engine core has no queue for them."""
        from vllm.v1.engine.core import EngineCoreProc

        if isinstance(self._core, EngineCoreProc):
            self._core._process_engine_step()
            return
        outputs, was_run = self._core.step_fn()
        if outputs:
            told.append((outputs, was_run))
        time.sleep(PAUSE_S)

    def _tell_later(self, told: list[tuple[Any, bool]]) -> None:
        """Return the outputs of steps that were taken to the caller of the next ones."""
        step = self._core.step_fn

        def from_before() -> tuple[Any, bool]:
            if told:
                return told.pop(0)
            self._core.step_fn = step
            outputs: tuple[Any, bool] = step()
            return outputs

        self._core.step_fn = from_before

    def _recompute_waiting(self) -> None:
        """Free the blocks of waiting requests, whose KV was loaded: they begin anew."""
        from vllm.v1.request import RequestStatus

        scheduler = self._core.scheduler
        waits = {RequestStatus.WAITING_FOR_REMOTE_KVS, RequestStatus.WAITING, RequestStatus.PREEMPTED}
        for request in [request for request in scheduler.kv_holding_waiting if request.status in waits][::-1]:
            scheduler.kv_holding_waiting.remove_request(request)
            scheduler.kv_cache_manager.free(request)
            scheduler.finished_recving_kv_req_ids.discard(request.request_id)
            scheduler.failed_recving_kv_req_ids.discard(request.request_id)
            scheduler.deferred_waiting.discard(request)
            request.num_computed_tokens = 0
            request.status = RequestStatus.PREEMPTED if request.num_preemptions else RequestStatus.WAITING
            scheduler.waiting.prepend_request(request)

    # -- weights --------------------------------------------------------------------------------------

    def _calling(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Callers load weights by this, and do other things with workers."""

        @functools.wraps(call)
        def with_notice(method: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return call(method, *args, **kwargs)
            finally:
                self._half.called(method in LOADS)

        return with_notice

    # -- sleep ----------------------------------------------------------------------------------------

    def _asleep(self, sleep: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(sleep)
        def with_notice(level: int = 1, mode: str = "abort") -> Any:
            if level == 1:
                self._half.before_sleep()
                self._due += 1
                self._drain()
            try:
                return sleep(level, mode)
            except Exception:
                self._due = 0
                raise

        return with_notice

    def _releasing(self, release: Callable[[], None]) -> Callable[[], None]:
        @functools.wraps(release)
        def with_notice() -> None:
            self._due += 1
            try:
                release()
            except Exception:
                self._due = 0
                raise

        return with_notice

    def _keeping(self, reset: Callable[..., None]) -> Callable[..., None]:
        """vLLM resets its caches when the engine has come to rest, which may be long after it was asked to sleep."""

        @functools.wraps(reset)
        def with_reason(*args: Any, **kwargs: Any) -> None:
            self._keeps, self._due = self._due > 0, max(0, self._due - 1)
            try:
                reset(*args, **kwargs)
            finally:
                self._keeps = False

        return with_reason

    def _drain(self) -> None:
        """An engine core in a process of its own comes to rest by itself; one that its caller steps would not."""
        from vllm.v1.engine.core import EngineCoreProc

        core = self._core
        if not isinstance(core, EngineCoreProc):
            while core.scheduler.connector.has_pending_push_work() and not core.scheduler.has_unfinished_requests():
                core.step_fn()


class Lookups(Protocol):
    """Who asks for cached blocks, and what came of it; see `watch_lookups`."""

    def asker(self, request: Any) -> Owner | None:
        """Owner of the request's session; None if the request wants exact KV only."""

    def found(self, request: Any, block_ids: Sequence[Sequence[int]]) -> None:
        """vLLM has found these blocks of each KV cache group for the request."""

    def computed(self, request: Any, block_ids: Sequence[int]) -> bool:
        """vLLM is about to enter these blocks of the request, loaded or computed, into its prefix cache.

        Returns: False if they could not be marked.
        """


class Boundary(Halting, Lookups, Protocol):
    """Boundary between vLLM and the scheduler half. None of its calls raises."""


def watch_lookups(pool: "BlockPool", marks: Marks, lookups: Lookups) -> None:
    """Serve each request only those cached blocks that it may have, and mark what it computes behind decoded ones.

    vLLM offers connectors no say in its local prefix cache. 0.33's cap on the hit's length would not do either: another
    block of the same hash may be exact.
    """
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    own: Any = pool
    own.manthan_lookups = lookups
    for name in ("get_computed_blocks", "get_computed_blocks_for_connector"):
        lookup = getattr(KVCacheManager, name, None)
        if lookup is not None and not hasattr(lookup, "manthan"):
            setattr(KVCacheManager, name, _asking(lookup))

    get_cached, cache_full, cache_partial = pool.get_cached_block, pool.cache_full_blocks, pool.cache_partial_block
    own.manthan_asks = False

    @functools.wraps(get_cached)
    def get_served(block_hash: BlockHash, kv_cache_group_ids: list[int]) -> "list[KVCacheBlock] | None":
        if own.manthan_asks is False or not marks:
            return get_cached(block_hash, kv_cache_group_ids)
        served = []
        for group in kv_cache_group_ids:
            copies = _copies(pool, make_block_hash_with_group_id(block_hash, group))
            one = next((block for block in copies if marks.serves(block.block_id, own.manthan_asks)), None)
            if one is None:
                return None
            served.append(one)
        return served

    @functools.wraps(cache_full)
    def cache_marked(
        request: Any,
        blocks: "list[KVCacheBlock]",
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: list[bool] | None = None,
    ) -> None:
        if marks:
            new = blocks[num_cached_blocks:num_full_blocks]
            settle(request, new, any(marks[block.block_id] for block in blocks[:num_full_blocks]))
            hashes = resolve_block_hashes(request.block_hashes, pool.hash_block_size, block_size)
            entered = [
                (hashes[num_cached_blocks + at], block)
                for at, block in enumerate(new)
                if not block.is_null and (block_mask is None or block_mask[at])
            ]
            take_hashes(entered, kv_cache_group_id)
        cache_full(request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id, block_mask)

    @functools.wraps(cache_partial)
    def cache_partial_marked(
        request: Any,
        block: "KVCacheBlock",
        num_tokens: int,
        kv_cache_group_id: int,
        block_size: int,
        replace_existing_hashes: bool = False,
    ) -> Any:
        if marks and not block.is_null:
            settle(request, [block], True)
            take_hashes([(pool._get_partial_block_hash(request, num_tokens), block)], kv_cache_group_id)
        return cache_partial(request, block, num_tokens, kv_cache_group_id, block_size, replace_existing_hashes)

    def settle(request: Any, new: "Sequence[KVCacheBlock]", may_be_lossy: bool) -> None:
        """Have blocks marked. may_be_lossy: they are taken for derived if that fails."""
        block_ids = [block.block_id for block in new if not block.is_null]
        if not lookups.computed(request, block_ids) and may_be_lossy:
            marks.set((block_id for block_id in block_ids if not marks[block_id]), Mark.DERIVED, None)

    def take_hashes(entered: "Iterable[tuple[BlockHash, KVCacheBlock]]", group: int) -> None:
        """Evict lossy blocks whose hashes exact blocks are about to have."""
        lossy = set()
        for block_hash, block in entered:
            if not marks[block.block_id]:
                copies = _copies(pool, make_block_hash_with_group_id(block_hash, group))
                lossy |= {copy.block_id for copy in copies if marks[copy.block_id]}
        if lossy:
            pool.evict_blocks(lossy)

    own.get_cached_block, own.cache_full_blocks = get_served, cache_marked
    own.cache_partial_block = cache_partial_marked


def _asking(lookup: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(lookup)
    def for_asker(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        lookups: Lookups | None = getattr(self.block_pool, "manthan_lookups", None)
        if lookups is None:
            return lookup(self, request, *args, **kwargs)
        before, self.block_pool.manthan_asks = self.block_pool.manthan_asks, lookups.asker(request)
        try:
            found = lookup(self, request, *args, **kwargs)
        finally:
            self.block_pool.manthan_asks = before
        lookups.found(request, found[0].get_block_ids())
        return found

    for_asker.manthan = True  # type: ignore[attr-defined]
    return for_asker


def _copies(pool: "BlockPool", name: Any) -> "Iterable[KVCacheBlock]":
    """The cached blocks of a hash, the one that vLLM would take first."""
    found = pool.cached_block_hash_to_block._cache.get(name)
    if found is None:
        return ()
    return found.values() if isinstance(found, dict) else (found,)


def keep_marks(pool: "BlockPool", marks: Marks) -> None:
    """Clear a block's mark when it is allocated, and copy it with the block."""
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

    own: Any = pool
    own.manthan_marks = marks
    get_new, move = pool.get_new_blocks, pool.move_block_hashes

    @functools.wraps(get_new)
    def get_cleared(num_blocks: int) -> "list[KVCacheBlock]":
        blocks = get_new(num_blocks)
        marks.clear(block.block_id for block in blocks)
        return blocks

    @functools.wraps(move)
    def move_marked(src_block: "KVCacheBlock", dst_block: "KVCacheBlock") -> None:
        move(src_block, dst_block)
        marks.copy(src_block.block_id, dst_block.block_id)

    own.get_new_blocks, own.move_block_hashes = get_cleared, move_marked

    manager: Any = SingleTypeKVCacheManager
    if hasattr(manager._apply_cow, "manthan"):
        return
    apply_cow = manager._apply_cow

    @functools.wraps(apply_cow)
    def apply_marked(
        self: Any, request_id: str, block_idx: int, source_block: "KVCacheBlock", cow_block: "KVCacheBlock"
    ) -> None:
        apply_cow(self, request_id, block_idx, source_block, cow_block)
        if (kept := getattr(self.block_pool, "manthan_marks", None)) is not None:
            kept.copy(source_block.block_id, cow_block.block_id)

    apply_marked.manthan = True  # type: ignore[attr-defined]
    manager._apply_cow = apply_marked


class VllmPool:
    """vLLM's block pool as the driver sees it: the blocks of one KV cache group; others only where they are named.

    event: what vLLM's KV events say of a block that is stored, by its name and the medium; None where they are off.
    """

    def __init__(
        self,
        pool: "BlockPool",
        group: int,
        block_tokens: int,
        event: "Callable[[Name, str], BlockStored | None] | None" = None,
    ) -> None:
        self._event = event
        self._pool, self._group, self._block_tokens = pool, group, block_tokens
        self.marks = Marks(pool.num_gpu_blocks)
        keep_marks(pool, self.marks)

    def __len__(self) -> int:
        return self._pool.get_num_free_blocks()

    def names(self) -> Iterator[BlockName | None]:
        for block in self._pool.free_block_queue.iter_blocks_after(None):
            if block.block_hash is None:
                yield None
            else:
                group, key = get_group_id(block.block_hash), get_block_hash(block.block_hash)
                yield key if group == self._group else (group, key)

    def mark(self, name: BlockName) -> Mark | None:
        """Mark of the block that the prefix cache finds under this name; None if it finds none."""
        group, key = (self._group, name) if isinstance(name, bytes) else name
        found = self._pool.cached_block_hash_to_block.get_one_block(
            make_block_hash_with_group_id(BlockHash(key), group)
        )
        return None if found is None else self.marks[found.block_id]

    def get(self, key: bytes) -> "KVCacheBlock | None":
        of_group = make_block_hash_with_group_id(BlockHash(key), self._group)
        return self._pool.cached_block_hash_to_block.get_one_block(of_group)

    def block_ids(self, blocks: "Sequence[KVCacheBlock]") -> list[int]:
        return [block.block_id for block in blocks]

    def hold(self, key: bytes) -> "KVCacheBlock | None":
        block = self.get(key)
        if block is not None:
            self._pool.touch([block])
        return block

    def hold_all(self, keys: "Sequence[bytes]") -> "list[KVCacheBlock | None]":
        return [self.hold(key) for key in keys]

    def hold_beside(self, group: int, key: bytes) -> "KVCacheBlock | None":
        found = self._pool.get_cached_block(BlockHash(key), [group])
        if not found:
            return None
        self._pool.touch(found)
        return found[0]

    def take(self, count: int) -> "list[KVCacheBlock]":
        return self._pool.get_new_blocks(count)

    def cache(self, block: "KVCacheBlock", key: bytes, depth: int, group: int | None = None) -> None:
        """Enter a block into the prefix cache, as vLLM does with one that it has computed."""
        group = self._group if group is None else group
        of_group = make_block_hash_with_group_id(BlockHash(key), group)
        block.set_block_hash(of_group, num_tokens=(depth + 1) * self._block_tokens)
        self._pool.cached_block_hash_to_block.insert(of_group, block)
        if self._event is not None and (told := self._event((group, key), self._pool.medium)) is not None:
            self._pool.kv_event_queue.append(told)

    def give_back(self, blocks: "Sequence[KVCacheBlock]") -> None:
        self._pool.free_blocks(blocks)

    def release(self, keys: "Sequence[bytes]") -> None:
        """Take blocks that no request uses out of the prefix cache, and put them at the head of the free queue."""
        released: list[KVCacheBlock] = []
        left = list(dict.fromkeys(keys))
        while left:  # once more for those of which there are several
            found = [(key, block) for key in left if (block := self.get(key)) is not None and block.ref_cnt == 0]
            blocks = [block for _, block in found]
            self._pool.touch(blocks)
            self._pool.evict_blocks({block.block_id for block in blocks})
            released += blocks
            left = [key for key, _ in found]
        self._pool.free_blocks(reversed(released))

    @property
    def usable_blocks(self) -> int:
        return self._pool.num_gpu_blocks - 1  # the null block is never free


# -- the model and the device, on workers -------------------------------------------------------------


def attention_modules(vllm_config: "VllmConfig") -> dict[str, Any]:
    """The model's attention layers by name, as they write to the KV cache."""
    modules: dict[str, Any] = vllm_config.compilation_config.static_forward_context
    return modules


class RotaryModule(NamedTuple):
    """A rotary embedding that vLLM has made. cos_sin: [places, 2 * pairs], cosines and then sines, with the factor that
    some kinds have. base: of its frequencies, where vLLM changed the model's (dynamic NTK); else None."""

    head_dim: int
    turned: int
    interleaved: bool
    cos_sin: "torch.Tensor"
    base: float | None


def rotary_modules() -> list[RotaryModule]:
    """Those of the models in this process; models that turn no keys have none, some make their own otherwise."""
    from vllm.model_executor.layers import rotary_embedding as made

    return [
        RotaryModule(module.head_size, module.rotary_dim, not module.is_neox_style, module.cos_sin_cache, _base(module))
        for module in made._ROPE_DICT.values()
        if getattr(module, "cos_sin_cache", None) is not None
    ]


def _base(module: Any) -> float | None:
    """vLLM fixes dynamic NTK for the longest prompt that it allows, as these classes reckon it; Transformers follows
    each prompt."""
    from vllm.model_executor.layers.rotary_embedding import dynamic_ntk_alpha_rope, dynamic_ntk_scaling_rope

    power = module.rotary_dim / (module.rotary_dim - 2) if module.rotary_dim > 2 else 1.0
    if isinstance(module, dynamic_ntk_scaling_rope.DynamicNTKScalingRotaryEmbedding):
        share = module.max_position_embeddings / module.max_trained_positions
        return float(module.base * (module.scaling_factor * share - (module.scaling_factor - 1)) ** power)
    if isinstance(module, dynamic_ntk_alpha_rope.DynamicNTKAlphaRotaryEmbedding):
        return float(module.base * module.scaling_alpha**power)
    return None


def write_kv(module: Any, key: "torch.Tensor", value: "torch.Tensor", cache: "torch.Tensor", slots: Any) -> None:
    """Write keys and values, [tokens, heads, head_dim] each, into a layer's paged cache as its backend does."""
    module.impl.do_kv_cache_update(module, key, value, cache, slots)


def write_latents(
    module: Any, latents: "torch.Tensor", keys: "torch.Tensor", cache: "torch.Tensor", slots: Any
) -> None:
    """Write latents [tokens, numbers] and RoPE's part of keys [tokens, 1, numbers] into a layer's paged cache (MLA), as
    its backend does."""
    scale = getattr(module, "_k_scale", None)  # the CPU's takes none; a cache that is not quantized has no use for it
    cache = cache.squeeze(1) if cache.ndim == 4 else cache  # without heads, as the layer itself has it
    module.impl.do_kv_cache_update(latents, keys, cache, slots, "auto", scale)


def parts_of(name: str, tensor: "torch.Tensor") -> "Iterator[tuple[str, torch.Tensor]]":
    """Tensors with memory of their own, by name, that make up a tensor; torchao's have several."""
    from vllm.model_executor.model_loader.weight_checksum import _tensors

    yield from ((each, part.detach()) for each, part in _tensors(name, tensor))


def tensors_of(model: "torch.nn.Module") -> "Iterator[tuple[str, torch.Tensor]]":
    """Parameters and buffers of a model by name, as tensors with memory of their own."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield from parts_of(name, tensor)


def watch_models(made: "Callable[[VllmConfig, ModelConfig, torch.nn.Module], None]") -> None:
    """Have `made` called with each model that vLLM makes in this process, before its weights are loaded.

    Connectors hear of no weights, and the tensors that a model keeps are sharded, fused and packed ones. A model that
    another one has in it is loaded with that one, and is not told of.
    """
    from vllm.model_executor.model_loader import utils

    initialize = utils.initialize_model
    if hasattr(initialize, "manthan"):
        return
    is_inner = False

    @functools.wraps(initialize)
    def initialize_watched(vllm_config: "VllmConfig", *args: Any, **kwargs: Any) -> Any:
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

    initialize_watched.manthan = True  # type: ignore[attr-defined]
    package = utils.__name__.rpartition(".")[0]
    for name, module in list(sys.modules.items()):  # each loader has a name of its own for it
        if name.startswith(package) and getattr(module, "initialize_model", None) is initialize:
            cast(Any, module).initialize_model = initialize_watched


def model_tensors(worker: Any) -> "Iterator[torch.Tensor]":
    """The parameters and buffers of a worker's model, and of its draft, as tensors with memory of their own."""
    runner = worker.model_runner
    draft = getattr(runner, "get_draft_model", lambda: None)()
    for model in (runner.get_model(), draft):
        if model is not None:
            yield from (tensor for _, tensor in tensors_of(model))


def copy_blocks(sources: "torch.Tensor", targets: "torch.Tensor", sizes: "torch.Tensor") -> None:
    """Copy between addresses, all int64 on the CPU, by the GPU's copy engines, on the current stream."""
    from vllm import _custom_ops as ops

    ops.swap_blocks_batch(sources, targets, sizes)


def pin(memory: "torch.Tensor") -> None:
    """Pin RAM for the GPU. Raises RuntimeError."""
    from vllm.v1.simple_kv_offload.cuda_mem_ops import pin_tensor

    pin_tensor(memory)


def unpin(memory: "torch.Tensor") -> None:
    """Undo `pin` of the same memory. Raises RuntimeError."""
    import torch

    error = torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
    if error.value != 0:
        raise RuntimeError(f"cudaHostUnregister failed: {error}")


def leave_captures_alone() -> None:
    """What this thread asks of CUDA from now on does not end another thread's capture of a graph."""
    from cuda.bindings import runtime

    runtime.cudaThreadExchangeStreamCaptureMode(runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed)
