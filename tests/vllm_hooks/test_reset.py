"""A reset of the prefix cache: nothing resident of before is served, nothing saved of other weights, and it never fails
because of Manthan."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import torch
import worker_store
from sleeper import OTHER, turned
from vllm import EngineArgs, SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm_engine import BLOCK, GPU_BYTES, MODEL, Answer, Engine, Table, fork_engines, restore_worker

from manthan.vllm_hooks import compat
from manthan.vllm_hooks.queries import METHOD
from manthan.vllm_hooks.scheduler_half import SchedulerHalf

pytestmark = pytest.mark.usefixtures("sweeping_engine")


# -- vLLM's scheduler alone -------------------------------------------------------------------------------


class Loads:
    """KV connector that loads every full block of a prompt, and has no more to say."""

    supports_divergent_local_hybrid_hits = False

    def get_num_new_matched_tokens(self, request: Request, computed: int) -> tuple[int, bool]:
        return (request.num_tokens - 1) // BLOCK * BLOCK - computed, True

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int]:
        return (0,)

    def take_events(self) -> tuple[()]:
        return ()

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def test_requests_whose_loads_a_reset_has_ended_are_admitted_again_though_they_fill_the_pool() -> None:
    config = EngineArgs(MODEL, skip_tokenizer_init=True, block_size=BLOCK).create_engine_config()
    config.cache_config.num_gpu_blocks = 31
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.float32)
    groups = KVCacheConfig(31, [], [KVCacheGroupSpec(["0"], spec)])
    init_none_hash(sha256)
    scheduler: Any = Scheduler(config, groups, StructuredOutputManager(config), BLOCK, hash_block_size=BLOCK)
    scheduler.connector, scheduler.requires_kv_delivery = Loads(), False
    for name, blocks in ("long", 18), ("short", 9):
        prompt, params = [blocks] * (blocks * BLOCK - 3), SamplingParams(max_tokens=4)
        hasher = get_request_block_hasher(BLOCK, sha256)
        scheduler.add_request(Request(name, prompt, params, None, block_hasher=hasher))
    statuses = {RequestStatus.WAITING_FOR_REMOTE_KVS}
    scheduler.schedule()
    assert {request.status for request in scheduler.requests.values()} == statuses
    compat.Core._recompute_waiting(SimpleNamespace(_core=SimpleNamespace(scheduler=scheduler)))  # type: ignore[arg-type]
    scheduler.schedule()
    assert {request.status for request in scheduler.requests.values()} == statuses


# -- as a loop of reinforcement learning does it ----------------------------------------------------------


def is_cold(states: dict[str, int]) -> bool:
    return not any(states[state] for state in ("active", "idle"))


class Loop:
    """`LLM` as it comes: its core and its worker are in processes of their own."""

    def __init__(self) -> None:
        from vllm import LLM

        from manthan.vllm_hooks import kv_transfer_config

        fork_engines()
        self.llm = LLM(
            MODEL,
            block_size=BLOCK,
            num_gpu_blocks_override=131,
            max_model_len=2048,
            enforce_eager=True,
            gpu_memory_utilization=0.2,
            kv_cache_memory_bytes=GPU_BYTES,
            kv_transfer_config=kv_transfer_config(idle={"after_s": 0.5, "min_tokens": 64}),
        )
        self.asked = 0

    def ask(self, seed: int) -> tuple[int, int]:
        """Tokens that were found of a prompt, and tokens of its blocks."""
        from vllm import SamplingParams

        prompt, _ = Table(seed).question(0)
        [output] = self.llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        return output.num_cached_tokens, (len(output.prompt_token_ids) - 1) // BLOCK * BLOCK

    def found_whole(self, seed: int) -> bool:
        found, whole = self.ask(seed)
        return found == whole

    def ask_new(self, until: Callable[[dict[str, int]], bool] = is_cold) -> int:
        """Ask what was never asked and wait for a count of sessions by state. Returns its number."""
        self.asked += 1
        assert self.ask(self.asked)[0] == 0
        deadline = time.monotonic() + 60
        while not until(states := self.states()):
            assert time.monotonic() < deadline, states
            time.sleep(0.01)
        return self.asked

    def states(self) -> dict[str, int]:
        client: Any = self.llm.llm_engine.engine_core
        states: dict[str, int] = json.loads(client.call_utility(METHOD, "state", {"bound": None}))["sessions"]
        return states

    def change(self, factor: float) -> None:
        self.on_worker(turned, factor)

    def on_worker(self, function: Callable[..., Any], *args: Any) -> Any:
        cloudpickle.register_pickle_by_value(sys.modules[function.__module__])
        [answer] = self.llm.collective_rpc(function, args=args)
        return answer


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.llm.llm_engine.engine_core.shutdown()


@pytest.mark.parametrize(
    "moment",
    [
        *[pytest.param(moment, marks=pytest.mark.slow) for moment in ("before the reset", "before a sleep")],
        *("after the reset", "in a sleep"),
    ],
)
def test_nothing_of_other_weights_is_served(loop: Loop, moment: str) -> None:
    asked = loop.ask_new()
    if moment.startswith("before"):
        loop.change(OTHER)
    if moment.endswith("reset"):
        assert loop.llm.reset_prefix_cache()
    else:
        loop.llm.sleep(1)
    if not moment.startswith("before"):
        loop.change(OTHER)
    if not moment.endswith("reset"):
        loop.llm.wake_up()
    assert loop.ask(asked)[0] == 0
    again = loop.ask_new()  # what these weights have computed is good for as long as they are
    assert loop.llm.reset_prefix_cache()
    assert loop.found_whole(again)
    loop.change(1 / OTHER)
    assert loop.llm.reset_prefix_cache()
    assert (loop.ask(asked)[0], loop.ask(again)[0]) == (0, 0)


def seen(worker: Any) -> list[str]:
    """Names of the model's parameters that are not packed."""
    return [name for name, tensor in worker.model_runner.get_model().named_parameters() if tensor.numel()]


def flipped(worker: Any, name: str) -> None:
    """New weights: the sign of a parameter's last number."""
    last = dict(worker.model_runner.get_model().named_parameters())[name].data.view(-1)[-1:]
    last.copy_(-last)


def test_each_tensor_in_memory_counts(loop: Loop) -> None:
    names = loop.on_worker(seen)
    assert len(names) >= 10  # the others are packed, if the CPU has the instructions
    for name in names[:: len(names) // 4]:
        asked = loop.ask_new()
        loop.on_worker(flipped, name)
        assert loop.llm.reset_prefix_cache()
        assert loop.ask(asked)[0] == 0, name
        loop.on_worker(flipped, name)
        assert loop.llm.reset_prefix_cache()


class Unseen:
    """A weight transfer engine that leaves no trace where weights can be read."""

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: Any) -> None: ...

    def finish_weight_update(self) -> None: ...

    def reset_weight_update_target(self) -> None: ...


def take_updates(worker: Any) -> None:
    worker.worker.weight_transfer_engine = Unseen()


def reload(loop: Loop) -> None:
    loop.llm.collective_rpc("reload_weights")


def load_one(worker: Any) -> None:
    """As extensions of the worker do it that a loop brings along."""
    model = worker.model_runner.get_model()
    name, tensor = next(iter(model.named_parameters()))
    model.load_weights([(name, tensor.detach().clone())])


def load(loop: Loop) -> None:
    loop.on_worker(load_one)


def update(loop: Loop) -> None:
    loop.on_worker(take_updates)
    loop.llm.start_weight_update()
    loop.llm.update_weights({"update_info": {}})
    loop.llm.finish_weight_update()


def sleep_deeply(loop: Loop) -> None:
    loop.llm.sleep(2)
    loop.llm.wake_up()


def calibrate(worker: Any) -> None:
    """Make the worker take prompts for a profile, whatever was before."""
    from manthan.vllm_hooks.worker.half import running_half

    running_half().calibrator._is_done = False


def takes_no_more(worker: Any) -> bool:
    from manthan.vllm_hooks.worker.half import running_half

    return bool(running_half().calibrator._is_done)


@pytest.mark.parametrize(
    ("change", "is_reset"), [(reload, True), (load, False), (update, True), (update, False), (sleep_deeply, False)]
)
def test_nothing_is_served_once_weights_were_loaded(loop: Loop, change: Callable[[Loop], None], is_reset: bool) -> None:
    """The same weights, as it happens: packed ones cannot be looked at. Without a reset, nothing cold."""
    asked = loop.ask_new()
    assert loop.llm.reset_prefix_cache()
    loop.ask(0)  # these weights are known now
    assert loop.states()["cold"]
    loop.on_worker(calibrate)
    change(loop)
    if is_reset:
        assert loop.llm.reset_prefix_cache()
    assert loop.ask(asked)[0] == 0
    has_loaded = change is not sleep_deeply  # behind which there is nothing to serve until weights are loaded
    assert loop.on_worker(takes_no_more) == has_loaded, "a profile of both would have the name of one"


def test_a_session_that_goes_cold_as_weights_change_is_not_served(loop: Loop) -> None:
    loop.on_worker(slow_store)
    try:
        asked = loop.ask_new(lambda states: loop.on_worker(encodes))
        loop.change(OTHER)
        assert loop.llm.reset_prefix_cache()
        assert loop.ask(asked)[0] == 0
    finally:
        loop.on_worker(restore_worker)
        loop.change(1 / OTHER)
        assert loop.llm.reset_prefix_cache(reset_connector=True)
        loop.ask(0)  # these weights are known now


def test_sessions_come_back_with_the_same_weights(loop: Loop) -> None:
    asked = loop.ask_new()
    for _ in range(2):
        assert loop.llm.reset_prefix_cache()
    found, whole = loop.ask(asked)
    assert found == whole


def test_nothing_comes_back_if_all_is_to_be_dropped(loop: Loop) -> None:
    loop.on_worker(calibrate)
    asked = loop.ask_new()
    assert loop.llm.reset_prefix_cache(reset_connector=True)
    assert loop.ask(asked)[0] == 0
    assert not loop.on_worker(takes_no_more), "the weights are the same"
    assert not loop.states()["cold"]


# -- while something is under way -------------------------------------------------------------------------


def slow_store(worker: Any) -> None:
    """Encoding and reading take a while."""
    import time

    path = get_kv_transfer_group().worker.engine
    path.encodes = False

    def read(group: int, keys: Any, tenant: str = "") -> Any:
        for found in type(path.store).read(path.store, group, keys):
            time.sleep(0.05)
            yield found

    path.store.read = read
    for blocks in path.blocks.values():

        def encode(job: Any, copies: Any, blocks: Any = blocks) -> Any:
            path.encodes = True
            time.sleep(0.3)
            return type(blocks).encode(blocks, job, copies)

        blocks.encode = encode


def encodes(worker: Any) -> bool:
    """True if something was encoded since `slow_store`."""
    return bool(get_kv_transfer_group().worker.engine.encodes)


class Traffic:
    """Requests that run at once."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.asked: list[tuple[Future[Answer], str]] = []

    def ask(self, seed: int, index: int = 0, max_tokens: int = 4) -> Future[Answer]:
        prompt, right = Table(seed).question(index)
        asked = self.engine.start(self.engine.generate(prompt, f"user-{seed}", max_tokens))
        self.asked.append((asked, right))
        return asked

    def end(self) -> None:
        """Every request ends with the right answer, no block is held, and vLLM can reset again."""
        for asked, right in self.asked:
            assert asked.result(60).text.startswith(right)
        self.engine.on_worker(restore_worker)
        self.engine.wait(lambda: self.engine.metric("kv_cache_usage_perc") == 0, "an empty pool")
        assert self.engine.reset()


@pytest.fixture
def traffic(engine: Engine) -> Iterator[Traffic]:
    made = Traffic(engine)
    yield made
    made.end()


def go_cold(engine: Engine, *seeds: int) -> None:
    for seed in seeds:
        engine.ask(Table(seed).question(0)[0], f"user-{seed}")
    engine.wait_until_cold(len(seeds))
    engine.on_worker(slow_store)


@pytest.mark.parametrize(
    ("running", "cold"),
    [
        *[pytest.param(running, not running, marks=pytest.mark.slow) for running in (False, True)],
        *((False, False), (True, True)),
    ],
)
def test_while_sessions_are_loaded(engine: Engine, traffic: Traffic, running: bool, cold: bool) -> None:
    go_cold(engine, 1, 2)
    loading = [traffic.ask(1), traffic.ask(2)]
    engine.wait(lambda: engine.metric("num_requests_waiting") == 2, "two loads")
    assert engine.reset(running, cold)
    assert not any(asked.done() for asked in loading)
    assert (loading[0].result(60).cached_tokens == 0) == cold


def test_a_transfer_that_hangs_is_not_waited_for(engine: Engine, traffic: Traffic) -> None:
    go_cold(engine, 1)
    with worker_store.gate(engine):
        loading = traffic.ask(1)
        engine.wait(lambda: engine.on_worker(worker_store.at_gate) == 1, "a load")
        assert not engine.reset()
        assert not loading.done()
        assert engine.ask(Table(2).question(0)[0]).text == Table(2).question(0)[1]


def test_after_a_reset_that_fails_nothing_cold_is_of_other_weights(engine: Engine, traffic: Traffic) -> None:
    go_cold(engine, 1)
    traffic.ask(2, max_tokens=400)
    engine.wait(lambda: engine.metric("num_requests_running") == 1, "a request")
    engine.on_worker(turned, OTHER)
    try:
        assert not engine.reset()
        assert engine.ask(Table(1).question(0)[0], "user-1").cached_tokens == 0
    finally:
        engine.on_worker(turned, 1 / OTHER)


@pytest.mark.parametrize("cold", [pytest.param(False, marks=pytest.mark.slow), True])
def test_all_at_once(engine: Engine, traffic: Traffic, cold: bool) -> None:
    go_cold(engine, 1, 2)
    running = traffic.ask(3, max_tokens=500)
    for seed in (4, 5):
        traffic.ask(seed).result(60)
    engine.wait(lambda: engine.on_worker(encodes), "an eviction")
    loading = traffic.ask(1)
    engine.wait(lambda: engine.metric("num_requests_waiting") == 1, "a load")
    assert engine.reset(running=True, cold=cold)
    assert not running.done()
    assert not loading.done()
    assert (loading.result(60).cached_tokens == 0) == cold
    assert (traffic.ask(2).result(60).cached_tokens == 0) == cold


def test_workers_that_cannot_be_asked_are_no_reason_to_drop_what_is_cold() -> None:
    """One that was killed, say: a disk's sessions are there when the engine starts again."""

    def died(*_: object) -> None:
        raise RuntimeError("cancelled")

    half, core = object.__new__(SchedulerHalf), object.__new__(compat.Core)
    core._core, core._call = object(), died
    half.driver, half._core = SimpleNamespace(rests=True), core
    half._was_called, half._is_unsure, half._weights, half._drops = True, False, [(1, "state")], False
    with pytest.raises(RuntimeError, match="cancelled"):
        half._begin_again()
    assert not half._drops
