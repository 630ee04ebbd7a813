"""A real vLLM engine, driven like a server drives it, and questions that it answers rightly or not."""

import asyncio
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import prometheus_client
import pytest
import torch

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # tests send functions to the worker
    # One thread for a model, where other tests run beside: two that wait for each other would take all there is.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}

MODEL = str(Path(__file__).parents[1] / "data" / "tiny-llama")
NAMES = [a + b + c for a in "bcdfghjklmnprstvz" for b in "aeiou" for c in "bcdfghjklmnprstvz"]
BLOCK = 32
GPU_BYTES = 1 << 30 if torch.cuda.device_count() else None
"""For the pool and our tiers: vLLM would measure what is left, which fails while another engine starts next to it."""


class Table:
    """16 lines `name = 4821`, four times over, about 570 tokens, and lookups in it.

    Said once, the model gets one lookup in sixty wrong with exact KV already: no basis for asserting answers.
    """

    def __init__(self, seed: int, head: str = "") -> None:
        rng = random.Random(seed)
        self.values = {name: str(rng.randrange(1000, 10000)) for name in rng.sample(NAMES, 16)}
        self.text = head + 4 * "".join(f"{name} = {value}\n" for name, value in self.values.items())

    def question(self, index: int) -> tuple[str, str]:
        """The prompt for the index-th entry, and the right answer."""
        name = list(self.values)[index]
        return f"{self.text}assert {name} == ", self.values[name]


@dataclass(frozen=True)
class Answer:
    text: str
    prompt_tokens: int
    cached_tokens: int

    @property
    def full_blocks(self) -> int:
        return self.prompt_tokens // BLOCK


class Completion(NamedTuple):
    """What a model without a tokenizer goes on with."""

    tokens: list[int]
    logprobs: list[float]
    cached_tokens: int


def fork_engines() -> None:
    """From now on engines are forked from one process that has imported vLLM; with a GPU, which a test may have used,
    each begins anew."""
    from vllm.platforms import current_platform
    from vllm.v1.engine import utils

    if current_platform.is_cpu():
        multiprocessing.set_forkserver_preload(["warm_vllm"])
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
            forkserver.ensure_running()
        utils.get_mp_context = lambda: multiprocessing.get_context("forkserver")
    else:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"


class Engine:
    """A vLLM engine with Manthan, its core and its worker in processes of their own."""

    def __init__(
        self,
        blocks: int,
        ranks: int = 1,
        eager: bool = True,
        model: str = MODEL,
        flags: Mapping[str, Any] | None = None,
        **manthan: Any,
    ) -> None:
        """flags: further ones of vLLM."""
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        from manthan.vllm_hooks import kv_transfer_config

        fork_engines()
        prometheus_client.REGISTRY._names_to_collectors.clear()  # an earlier engine's
        prometheus_client.REGISTRY._collector_to_names.clear()
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.model = model
        args = AsyncEngineArgs(
            model,
            num_gpu_blocks_override=blocks,
            max_model_len=2048,
            enforce_eager=eager,
            gpu_memory_utilization=0.2,  # of no meaning on the CPU
            kv_cache_memory_bytes=GPU_BYTES,
            **({"tensor_parallel_size": ranks} if ranks > 1 else {}),
            kv_transfer_config=kv_transfer_config(**{"idle.min_tokens": 64} | manthan),
            **({"block_size": BLOCK} | dict(flags or {})),
        )

        async def start() -> AsyncLLM:
            return AsyncLLM.from_engine_args(args)

        self.llm = self.start(start()).result(timeout=600)
        self._registry = prometheus_client.CollectorRegistry(auto_describe=False)
        for collector in set(prometheus_client.REGISTRY._collector_to_names):
            self._registry.register(collector)  # until another engine's are there instead
        self._requests = 0

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.start(coroutine).result(timeout=240)

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    async def generate(
        self, prompt: str, session: str | None = None, max_tokens: int = 4, hints: dict[str, Any] | None = None
    ) -> Answer:
        last = await self._answered(prompt, session, hints, max_tokens=max_tokens)
        return Answer(last.outputs[0].text, len(last.prompt_token_ids), last.num_cached_tokens)

    async def complete(
        self, prompt: Sequence[int], session: str, max_tokens: int, hints: dict[str, Any] | None = None
    ) -> Completion:
        asked = {"prompt_token_ids": list(prompt)}
        last = await self._answered(asked, session, hints, max_tokens=max_tokens, detokenize=False, logprobs=1)
        told = last.outputs[0]
        logprobs = [next(iter(each.values())).logprob for each in told.logprobs]
        return Completion(list(told.token_ids), logprobs, last.num_cached_tokens)

    async def _answered(self, prompt: Any, session: str | None, hints: dict[str, Any] | None, **options: Any) -> Any:
        from vllm import SamplingParams

        self._requests += 1
        extra = {"kv_transfer_params": {"manthan": hints}} if hints else None
        params = SamplingParams(temperature=0, ignore_eos=True, extra_args=extra, **options)
        async for output in self.llm.generate(prompt, params, f"request-{self._requests}", session_id=session):
            last = output
        return last

    def ask(self, prompt: str, session: str | None = None, max_tokens: int = 4, **hints: Any) -> Answer:
        return self.run(self.generate(prompt, session, max_tokens, hints))

    def on_worker(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run `function(worker, *args)` in the first worker's process, and in those of all other ranks."""
        return self.on_workers(function, *args)[0]

    def on_workers(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        cloudpickle.register_pickle_by_value(sys.modules[function.__module__])  # workers cannot import the tests
        return self.run(self.llm.collective_rpc(function, args=args))

    def reset(self, running: bool = False, cold: bool = False) -> bool:
        """Do what POST /reset_prefix_cache does.

        Args:
            running: reset even if requests run.
            cold: drop what is cold as well.
        """
        return self.run(self.llm.reset_prefix_cache(running, cold))

    def metric(self, name: str, **labels: str) -> float:
        labels = {"model_name": self.model, "engine": "0"} | labels
        return self._registry.get_sample_value(f"vllm:{name}", labels) or 0.0

    def failures(self) -> float:
        """Blocks that could not be stored or restored, whatever the cause."""
        samples = [sample for family in self._registry.collect() for sample in family.samples]
        return sum(sample.value for sample in samples if sample.name == "vllm:manthan_failures_total")

    def sessions(self, state: str) -> float:
        return self.metric("manthan_sessions", state=state)

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not come to pass"
            time.sleep(0.02)

    def wait_until_cold(self, count: int, resident: bool = False) -> None:
        """Wait until all is saved. What returns is restored then, unless it is left `resident`."""
        self.wait(
            lambda: self.sessions("cold") == count and not any(map(self.sessions, ("active", "idle"))),
            f"{count} cold sessions",
        )
        if not resident:
            self.empty_pool()

    def empty_pool(self) -> None:
        """Empty the prefix cache. What is saved stays."""
        self.wait(self.reset, "an empty pool")

    @property
    def handed(self) -> float:
        """Blocks that the encoder was given since the start: the pool may not overwrite them before they are copied."""
        return sum(self.metric("manthan_encodings_total", mark=mark) for mark in ("exact", "derived"))

    def wait_until_quiet(self) -> None:
        """Wait until no request runs and nothing is being encoded."""
        before = -1.0

        def is_quiet() -> bool:
            nonlocal before
            earlier, before = before, self.handed
            self.on_workers(wait_for_transfers)
            return before == earlier and not self.sessions("active")

        self.wait(is_quiet, "quiet")

    def kill(self) -> None:
        """The core and its worker end at once; stop it nevertheless."""
        os.kill(self.on_worker(process_of), signal.SIGKILL)

    def start_afresh(self) -> None:
        """Have nothing resident, nothing saved, and nothing patched."""
        self.on_worker(restore_worker)
        self.wait_until_quiet()
        self.wait(lambda: self.reset(cold=True), "a reset")
        self.ask("x")  # the reset reaches the metrics with the next step
        self.wait(lambda: self.metric("manthan_cold_bytes") == 0 and self.sessions("cold") == 0, "an empty store")

    def stop(self) -> None:
        async def finish_tasks() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self.llm.shutdown()
        self.run(finish_tasks())
        self.loop.call_soon_threadsafe(self.loop.stop)


def process_of(worker: Any) -> int:
    return os.getpid()


def wait_for_transfers(worker: Any) -> None:
    """Wait until the worker has nothing under way."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    get_kv_transfer_group().worker.engine.wait()


def restore_worker(worker: Any) -> None:
    """Undo what tests have put over the worker's store and codec."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    path = get_kv_transfer_group().worker.engine
    if not hasattr(path, "blocks"):  # an engine on a GPU
        return
    for part in (path.store, *path.blocks.values()):
        for name in [name for name in vars(part) if name in ("read", "put_all", "encode", "decode")]:
            delattr(part, name)


@contextmanager
def until_killed(blocks: int = 131, **options: Any) -> Iterator[Engine]:
    """An engine that is killed at the end, not stopped. Sessions go cold after a fifth of a second."""
    engine = Engine(blocks, **{"idle": 0.2} | options)
    try:
        yield engine
        engine.kill()
    finally:
        engine.stop()


def running(**options: Any) -> Iterator[Engine]:
    """The body of a fixture that gives an engine."""
    engine = Engine(**options)
    yield engine
    engine.stop()
