"""What a return costs the threads beside the model: processor time of each call, without a GPU.

vLLM's own scheduler and KV cache manager, with Manthan's connector, keep two sessions of `--tokens` tokens in a pool
that has room for one and a half of them; no model is run, and what workers would answer is answered at once. That is
all of the scheduler's side of a return, and of an eviction: of a session that has no codes yet (first), and of one that
has (again). The worker's side needs a GPU, and its kernels; what it does on the model's thread is timed there.

    python benchmarks/return_profile.py [--tokens 32000] [--returns 9] [--calls 25]
"""

import cProfile
import os
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.table import Table

from manthan.benchmarks.arms import make_console
from manthan.benchmarks.engines import random_tokens
from manthan.benchmarks.shapes import DEFAULT, PUBLIC, write_model

BLOCK = 16
POOL_SESSIONS = 1.5
SESSIONS = 2
"""Asked in turn: whoever returns was overwritten by the other."""
IDLE_AFTER_S = 1e-3
SIZE = 499_712
"""Of a block's codes, about: wht-5x of Qwen3-8B's."""
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}


class Watch:
    """Processor time of this thread in a lap, in seconds, by what was going on. What runs within another is not counted
    to that."""

    def __init__(self) -> None:
        self.lap: dict[str, float] = {}
        self._inner = [0.0]

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        self._inner.append(0.0)
        began = time.thread_time()
        try:
            yield
        finally:
            spent = time.thread_time() - began
            own = spent - self._inner.pop()
            self._inner[-1] += spent
            self.lap[what] = self.lap.get(what, 0.0) + own

    def around(self, owner: Any, method: str, what: str) -> None:
        """Time a method of an object from now on."""
        wrapped: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.of(what):
                return wrapped(*args, **kwargs)

        setattr(owner, method, timed)


class Lap(NamedTuple):
    """What calls took of the scheduler's thread, and what each step did, in seconds."""

    calls: dict[str, float]
    steps: list[float]


class Engine:
    """vLLM's scheduler with Manthan's connector, stepped by hand; workers that have done everything at once."""

    def __init__(self, folder: Path, tokens: int, shape: str, store: str) -> None:
        os.environ.update({name: value for name, value in ENVIRONMENT.items() if name not in os.environ})
        from vllm import EngineArgs
        from vllm.utils.gc_utils import freeze_gc_heap
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        from manthan.vllm_hooks import kv_transfer_config

        manthan = {"policy": "lru", "idle_after_s": IDLE_AFTER_S, "codec": {"guard": False}}
        cold_store = {"kind": store, "max_bytes": 4 * tokens * 36864}
        args = EngineArgs(
            model=str(write_model(folder, shape)),
            load_format="dummy",
            skip_tokenizer_init=True,
            block_size=BLOCK,
            max_model_len=tokens + 64,
            hf_overrides={"max_position_embeddings": tokens + 64},
            max_num_batched_tokens=8192,
            kv_transfer_config=kv_transfer_config(**manthan, cold_store=cold_store),
        )
        config = args.create_engine_config()
        blocks = int(POOL_SESSIONS * tokens / BLOCK) + 1
        config.cache_config.num_gpu_blocks = blocks
        self.tokens, self.watch = tokens, Watch()
        self.scheduler = Scheduler(
            config, _kv_cache(shape, blocks), StructuredOutputManager(config), block_size=BLOCK, log_stats=True
        )
        self.half = self.scheduler.connector.scheduler
        hashed = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hashed)
        self._hasher = get_request_block_hasher(BLOCK, hashed)
        freeze_gc_heap()  # as vLLM's engine core does when it has started
        self._requests = 0
        self.steps: list[float] = []
        """What each took the scheduler's thread, in seconds."""
        for owner, method, what in (
            (self.scheduler, "add_request", "vLLM: add_request"),
            (self.scheduler, "schedule", "vLLM: schedule"),
            (self.scheduler, "update_from_output", "vLLM: update_from_output"),
            *((self.scheduler.connector, method, method) for method in CONNECTOR),
        ):
            self.watch.around(owner, method, what)

    def request(self, session: int) -> Any:
        """A request of a session, with its hashes: vLLM makes both on another thread."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        self._requests += 1
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        params.update_from_generation_config({}, eos_token_id=None)
        prompt = random_tokens(1, session, self.tokens, 1000)
        return Request(
            f"request-{self._requests}",
            prompt,
            params,
            pooling_params=None,
            block_hasher=self._hasher,
            session_id=f"s{session}",
        )

    def ask(self, request: Any) -> "Lap":
        """Until it has ended."""
        self._begin()
        self.scheduler.add_request(request)
        while self.scheduler.requests:
            self.step()
        return Lap(self.watch.lap, self.steps)

    def rest(self) -> "Lap":
        """Until all is cold, and nothing is left to be done."""
        self._begin()
        time.sleep(2 * IDLE_AFTER_S)
        self.step()
        while self.scheduler.connector.has_pending_push_work():
            self.step()
        return Lap(self.watch.lap, self.steps)

    def _begin(self) -> None:
        self.watch.lap, self.steps = {}, []

    def step(self) -> None:
        began = time.thread_time()
        output = self.scheduler.schedule()
        spent = time.thread_time() - began
        answer = self._answer(output)
        began = time.thread_time()
        self.scheduler.update_from_output(output, answer)
        self.steps.append(spent + time.thread_time() - began)

    def _answer(self, output: Any) -> Any:
        """What workers and the model answer to a step."""
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        names = list(output.num_scheduled_tokens)
        ready = [name for name in names if self._is_last(name)]
        connected = KVConnectorOutput(
            finished_recving={load.request_id for load in output.kv_connector_metadata.loads},
            kv_connector_worker_meta=_report(output.kv_connector_metadata),
        )
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=[[1] if name in ready else [] for name in names],
            kv_connector_output=connected,
        )

    def _is_last(self, name: str) -> bool:
        request = self.scheduler.requests[name]
        return bool(request.num_computed_tokens >= request.num_tokens)


CONNECTOR = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "get_external_cache_hit_sources",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
    "take_events",
    "get_kv_connector_stats",
)


def _kv_cache(shape: str, blocks: int) -> Any:
    """One group of full attention, as vLLM has it of this shape."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    config = PUBLIC[shape].config
    spec = FullAttentionSpec(
        block_size=BLOCK,
        num_kv_heads=config["num_key_value_heads"],
        head_size=config["head_dim"],
        dtype=torch.bfloat16,
    )
    names = [f"model.layers.{n}.self_attn.attn" for n in range(config["num_hidden_layers"])]
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(names, spec)])


def _report(metadata: Any) -> Any:
    from manthan.vllm_hooks.messages import LoadResult, ManthanWorkerMetadata, SpillResult

    return ManthanWorkerMetadata(
        spills=[SpillResult(spill.key, spill.group, None, 1e-3, SIZE) for spill in metadata.spills],
        loads=[LoadResult(load.request_id, [], load.blocks * SIZE, 1e-3) for load in metadata.loads],
    )


# -- what came of it ------------------------------------------------------------------------------------


def median_ms(laps: Sequence[Lap], call: str) -> float:
    return 1e3 * statistics.median(lap.calls.get(call, 0.0) for lap in laps)


def _sum(lap: Lap, is_vllm: bool) -> float:
    return sum(spent for call, spent in lap.calls.items() if call.startswith("vLLM") == is_vllm)


def show(kinds: dict[str, list[Lap]]) -> None:
    """A row for each call, and what the longest step took."""
    calls = {call for laps in kinds.values() for lap in laps for call in lap.calls}
    table = Table("", *kinds, title="processor time, ms (median)", box=None)
    for call in sorted(calls, key=lambda call: -sum(median_ms(laps, call) for laps in kinds.values())):
        table.add_row(call, *(f"{median_ms(laps, call):.2f}" for laps in kinds.values()))
    for what, is_vllm in (("Manthan", False), ("vLLM", True)):
        own = ([_sum(lap, is_vllm) for lap in laps] for laps in kinds.values())
        table.add_row(f"all of {what}", *(f"{1e3 * statistics.median(found):.2f}" for found in own))
    longest = ([max(lap.steps) for lap in laps] for laps in kinds.values())
    table.add_row("longest step", *(f"{1e3 * statistics.median(found):.2f}" for found in longest))
    make_console().print(table)


def main(
    tokens: Annotated[int, typer.Option(help="Of a session.")] = 32000,
    returns: Annotated[int, typer.Option(help="How many are timed.")] = 9,
    shape: Annotated[str, typer.Option(help=f"Of a public model: {', '.join(PUBLIC)}.")] = DEFAULT,
    store: Annotated[str, typer.Option(help="Where codes are: host or device.")] = "host",
    calls: Annotated[int, typer.Option(help="Show so many functions of a profile of the returns, too.")] = 0,
) -> None:
    """Processor time of the scheduler's thread, by call."""
    profile = cProfile.Profile()
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(Path(folder), tokens, shape, store)
        kinds: dict[str, list[Lap]] = {"return": [], "eviction, first": [], "eviction, again": [], "prefill": []}
        for session in range(SESSIONS):
            kinds["prefill"].append(engine.ask(engine.request(session)))
            kinds["eviction, first"].append(engine.rest())
        for number in range(returns + 1):
            request = engine.request(number % SESSIONS)
            if calls:
                profile.enable()
            back = engine.ask(request)
            profile.disable()
            again = engine.rest()
            if number:
                kinds["return"].append(back)
                kinds["eviction, again"].append(again)
        restored = engine.half.telemetry.totals["restored_tokens"]
        if restored < returns * (tokens - 2 * BLOCK):
            raise RuntimeError(f"{restored} tokens were restored in {returns} returns of {tokens}")
        engine.scheduler.shutdown()
    show(kinds)
    if calls:
        pstats.Stats(profile).sort_stats("tottime").print_stats(calls)


if __name__ == "__main__":
    typer.run(main)
