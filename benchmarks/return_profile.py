"""What a return costs vLLM's two threads beside the model: processor time of each call, without a GPU.

vLLM's own scheduler and KV cache manager, with Manthan's connector, keep sessions of `--tokens` tokens in a pool of one
and a half of them; a model is not run, and what workers would answer is answered at once. On the scheduler's side that
is the whole of a return and of an eviction. The worker's side is its planning: what it does for a load and for a spill
apart from the kernels, which play no part here. `--steps` tells what each step of the engine costs, for long sessions.

    python benchmarks/return_profile.py [--tokens 32000] [--returns 9] [--side scheduler|worker] [--steps] [--calls 25]
"""

import cProfile
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

from manthan.benchmarks.engines import random_tokens
from manthan.benchmarks.shapes import PUBLIC, write_model
from manthan.manager.sessions.session import SessionState

BLOCK = 16
POOL_SESSIONS = 1.5
SESSIONS = 2
"""Asked in turn: whoever returns was overwritten by the other."""
IDLE_AFTER_S = 1e-3
SIZE = 499_712
"""Of a block's codes, about: wht-5x of Qwen3-8B's."""
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}


class Side(StrEnum):
    """Whose calls are timed."""

    scheduler = "scheduler"
    worker = "worker"


class Watch:
    """Processor time of this thread, in seconds, by what was going on; one value for each lap.

    What runs within another is not counted to it. profile: of the laps, but for the first."""

    def __init__(self) -> None:
        self.laps: list[dict[str, float]] = []
        self.profile: cProfile.Profile | None = None
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
            if self.laps:
                self.laps[-1][what] = self.laps[-1].get(what, 0.0) + own

    def lap(self) -> None:
        self.laps.append({})

    def around(self, owner: Any, method: str, what: str) -> None:
        """Time a method of an object from now on."""
        wrapped: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.of(what):
                return wrapped(*args, **kwargs)

        setattr(owner, method, timed)


# -- the scheduler's side -------------------------------------------------------------------------------


class Engine:
    """vLLM's scheduler with Manthan's connector, stepped by hand; workers that have done everything at once."""

    def __init__(self, folder: Path, tokens: int, shape: str, store: str) -> None:
        os.environ.update({name: value for name, value in ENVIRONMENT.items() if name not in os.environ})
        from vllm import EngineArgs
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
        self._requests = 0
        self.steps: list[float] = []
        """Of the scheduler's thread, in seconds, since they were cleared."""
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

    def ask(self, request: Any) -> int:
        """Until it has ended; how many of its tokens were restored."""
        self.scheduler.add_request(request)
        while self.scheduler.requests:
            self.step()
        return int(request.num_external_computed_tokens if hasattr(request, "num_external_computed_tokens") else 0)

    def rest(self) -> None:
        """Until all is cold."""
        time.sleep(2 * IDLE_AFTER_S)
        while sum(map(self.half.manager.table.states.__getitem__, (SessionState.IDLE, SessionState.EVICTING))):
            self.step()
        self.step()

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
