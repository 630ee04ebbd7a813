"""vLLM engine for benchmarks, in a measuring process: options, requests, and metrics.

The measuring process calls the function `serve`. `arms.py` starts the process, waits for its end and reads the results.
Importing this module imports no vLLM.
"""

import asyncio
import json
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

WAIT_S = 60.0
POLL_S = 0.02


class WrongPathError(RuntimeError):
    """A prompt's KV has a wrong source, or the engine did not reach an awaited state, so the figure would be wrong."""


# -- options ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EngineOptions:
    """Options of an engine. blocks: number of blocks of the KV pool. eager: True for no CUDA graphs.

    offload_nbytes: room for vLLM's CPU offload; 0 for none. manthan: Manthan's options; None without Manthan.
    made_up_weights: True for vLLM's dummy weights: the model's folder needs none, and answers mean nothing.
    """

    model: str
    block_size: int
    blocks: int
    max_model_len: int
    max_num_seqs: int = 8
    batched_tokens: int = 8192
    eager: bool = False
    offload_nbytes: int = 0
    manthan: dict[str, Any] | None = None
    made_up_weights: bool = True

    def engine_args(self) -> dict[str, Any]:
        """Return the arguments of AsyncEngineArgs."""
        args: dict[str, Any] = {
            "model": self.model,
            "load_format": "dummy" if self.made_up_weights else "auto",
            "dtype": "bfloat16",
            "skip_tokenizer_init": True,
            "block_size": self.block_size,
            "num_gpu_blocks_override": self.blocks,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.batched_tokens,
            "gpu_memory_utilization": 0.9,
            "enable_prefix_caching": True,
        }
        if self.eager:
            args["enforce_eager"] = True
        else:
            args["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        if self.offload_nbytes:
            args["kv_offloading_size"] = self.offload_nbytes / 2**30
        if find_spec("flashinfer") is None:
            args["gdn_prefill_backend"] = "triton"  # vLLM's default on Hopper needs flashinfer
        if self.manthan is not None:
            from manthan.vllm_hooks import kv_transfer_config

            args["kv_transfer_config"] = kv_transfer_config(**self.manthan)
        return args


def random_tokens(seed: int, index: int, count: int, vocabulary: int) -> list[int]:
    """Return `count` random token ids. The ids of different indices have no block in common."""
    return np.random.default_rng([seed, index]).integers(0, vocabulary, count).tolist()


# -- the engine -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """Answer to a request. cached_tokens: number of prompt tokens that were not computed.

    external_tokens: number of the cached tokens that came from outside the pool.
    """

    ttft_s: float
    prompt_tokens: int
    cached_tokens: int
    external_tokens: int


class Engine:
    """AsyncLLM as in a server, with the engine core in a separate process."""

    def __init__(self, options: EngineOptions) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.options = options
        self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**options.engine_args()))
        self._requests = 0

    async def ask(self, tokens: list[int], session: str | None = None, **hints: Any) -> Answer:
        """Return the answer of one token to a prompt. hints: session hints for Manthan, in kv_transfer_params.

        external_tokens comes from a metric, so it is right only if no other request loads from outside meanwhile.
        """
        external = self.metrics("external_prefix_cache_hits_total")
        began = time.perf_counter()
        ttft_s, cached = 0.0, 0
        async for output in self.generate(tokens, 1, session, hints):  # one output, of the only token
            ttft_s, cached = time.perf_counter() - began, output.num_cached_tokens or 0
        await asyncio.sleep(POLL_S)  # vLLM updates a step's metrics after it hands out the outputs
        external = self.metrics("external_prefix_cache_hits_total") - external
        return Answer(ttft_s, len(tokens), cached, round(external))

    def generate(
        self, tokens: list[int], max_tokens: int, session: str | None = None, hints: Mapping[str, Any] | None = None
    ) -> Any:
        """Return vLLM's stream of outputs; each holds only new tokens. hints: see `ask`."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._requests += 1
        params = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={"kv_transfer_params": {"manthan": dict(hints)}} if hints else None,
        )
        prompt = {"prompt_token_ids": tokens}
        return self._llm.generate(prompt, params, f"request-{self._requests}", session_id=session)

    def metrics(self, name: str, **labels: str) -> float:
        """Return the sum of metric `vllm:NAME` over all series with these labels; 0 without such series."""
        found = self._samples(f"vllm:{name}")
        return sum(value for has, value in found if labels.items() <= has.items())

    def manthan_metrics(self) -> dict[str, float]:
        """Return Manthan's metrics by name and label state or cause: gauges, counters, histograms' sums and counts."""
        totals: dict[str, float] = {}
        for name, labels, value in _registry():
            if name.startswith("vllm:manthan_") and not name.endswith(("_bucket", "_created")):
                key = name + "".join(f"{{{labels[label]}}}" for label in ("state", "cause") if label in labels)
                totals[key] = totals.get(key, 0.0) + value
        return totals

    def sessions(self, state: str) -> float:
        return self.metrics("manthan_sessions", state=state)

    async def forget_resident(self) -> None:
        """Empty vLLM's prefix cache, but not Manthan's store. Cold (saved) sessions then have KV in the store only."""
        if not await self._llm.reset_prefix_cache(reset_connector=False):
            raise WrongPathError("vLLM would not empty its prefix cache: a request still holds blocks")

    async def until_cold(self, sessions: int | None = None) -> None:
        """Return when every session is cold (saved in the store), and their number is `sessions` if given."""

        def done() -> bool:
            still = sum(map(self.sessions, ("active", "idle")))
            return not still and (sessions is None or self.sessions("cold") == sessions)

        await self.until(done, f"{sessions or 'all'} sessions were not cold")

    async def until(self, done: Callable[[], bool], complaint: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not done():
            if time.monotonic() > deadline:
                raise WrongPathError(f"{complaint} within {WAIT_S:.0f} s; Manthan says {self.manthan_metrics()}")
            await asyncio.sleep(POLL_S)

    def stop(self) -> None:
        self._llm.shutdown()

    @staticmethod
    def _samples(name: str) -> list[tuple[Mapping[str, str], float]]:
        return [(labels, value) for found, labels, value in _registry() if found == name]


def _registry() -> list[tuple[str, Mapping[str, str], float]]:
    import prometheus_client

    return [
        (sample.name, sample.labels, sample.value)
        for family in prometheus_client.REGISTRY.collect()
        for sample in family.samples
    ]


# -- the measuring process ------------------------------------------------------------------------------


class Report:
    """Messages from the measuring process to the waiting process, a line of JSON each."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def step(self, text: str) -> None:
        self.tell(step=text)

    def tell(self, **what: Any) -> None:
        self._file.write(json.dumps(what) + "\n")


Measurement = Callable[..., Awaitable[dict[str, Any]]]
"""Function called as `measure(engine, report, **parameters)`. Its result is written as JSON."""


def serve(job_file: Path, measurements: Mapping[str, Measurement]) -> None:
    """Do the job in `job_file`, written by arms.run_arm: build the engine, measure, report."""
    job = json.loads(job_file.read_text())
    report = Report(Path(job["report"]))
    try:
        asyncio.run(_serve(job, report, measurements[job["measurement"]]))
    except BaseException as error:
        traceback.print_exc()
        report.tell(error=f"{type(error).__name__}: {error}")
        raise SystemExit(1) from None


async def _serve(job: dict[str, Any], report: Report, measure: Measurement) -> None:
    report.step("the engine starts")
    began = time.monotonic()
    engine = Engine(EngineOptions(**job["engine"]))
    started_s = time.monotonic() - began
    try:
        result = await measure(engine, report, **job["parameters"])
        report.tell(result=result | {"start_s": round(started_s, 1), "manthan": engine.manthan_metrics()})
    finally:
        engine.stop()
