"""What Manthan costs the others: output tokens/s of a steady batch while long sessions come and go beside it.

Two engines with the same pool, plain vLLM and Manthan, each first with the batch alone, then with long sessions that
return in turn, a turn longer each time. On plain vLLM they were overwritten meanwhile and are computed again; on
Manthan they went cold and are restored. What was evicted, restored and cached inside the measured windows is checked.

    python benchmarks/interference.py [--out FOLDER] [--store device] [--arms plain,manthan]
    python benchmarks/interference.py --plot-only FOLDER/interference.json
"""

import asyncio
import contextlib
import itertools
import json
import math
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from manthan.benchmarks.arms import OUT, Arm, leave_on_signals, make_console, new_report, run_arms, write_report
from manthan.benchmarks.engines import Engine, EngineOptions, Report, WrongPathError, random_tokens, serve
from manthan.benchmarks.interference_report import ENGINES, show
from manthan.benchmarks.shapes import Shape, write_model

POOL_SESSIONS = 2
"""Long sessions that the pool holds beside the batch."""
MANTHAN = {"policy": "lru", "idle_after_s": 0.3, "sweep_interval_s": 0.05}
COUNTERS = ("evictions", "restores", "encoded_blocks", "restored_blocks")
LEAST_RATIO = 4.0
"""How much smaller codes are, at least: the store has room for all long sessions."""
MOST_TURNS = 24
"""A long session may grow by so many turns; then it returns as it is."""
STEADY_WITHIN = 0.05
FEWEST_PERIODS, MOST_PERIODS = 3, 12
KEPT_SHARE = 0.95
GONE_SHARE = 0.05


@dataclass(frozen=True)
class Load:
    """The batch and the sessions beside it. every_s: seconds from the start of one return to that of the next."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    sessions: int
    tokens: int
    turn_tokens: int
    every_s: float
    windows: int
    window_s: float
    vocabulary: int
    seed: int

    @property
    def longest(self) -> int:
        """Tokens of a long session that has grown as far as it may."""
        return self.tokens + MOST_TURNS * self.turn_tokens

    @property
    def batch_tokens(self) -> int:
        return self.requests * (self.prompt_tokens + self.output_tokens)


# -- in the measuring process ---------------------------------------------------------------------------


class Batch:
    """So many requests run at any time. produced: output tokens since the start."""

    def __init__(self, engine: Engine, load: Load) -> None:
        self.produced = 0
        self._engine, self._load = engine, load
        self._numbers = itertools.count(1)

    async def stream(self, place: int) -> None:
        """One request after another; the first ends early, so that the ends of all are spread evenly."""
        load = self._load
        tokens = max(1, load.output_tokens * (place + 1) // load.requests)
        while True:
            prompt = random_tokens(load.seed + 1, next(self._numbers), load.prompt_tokens, load.vocabulary)
            async for output in self._engine.generate(prompt, tokens):
                self.produced += len(output.outputs[0].token_ids)
            tokens = load.output_tokens


class Return(NamedTuple):
    """A long session came back. began: on time.monotonic. before: tokens that it had when it left."""

    began: float
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int
    before: int


class Background:
    """Long sessions that return in turn, each a turn longer than it left."""

    def __init__(self, engine: Engine, load: Load) -> None:
        self.returns: list[Return] = []
        self._engine, self._load = engine, load
        self._prompts = [
            random_tokens(load.seed, index, load.longest, load.vocabulary) for index in range(load.sessions)
        ]
        self._lengths = [load.tokens] * load.sessions

    async def begin(self, index: int) -> None:
        """The session's first turn."""
        await self._ask(index)

    async def run(self) -> None:
        """A return every every_s seconds, or when the one before is done if that is later."""
        for index in itertools.cycle(range(self._load.sessions)):
            began = time.monotonic()
            before = self._lengths[index]
            self._lengths[index] = min(before + self._load.turn_tokens, self._load.longest)
            answer = await self._ask(index)
            self.returns.append(
                Return(began, answer.ttft_s, answer.prompt_tokens, answer.cached_tokens, before),
            )
            await asyncio.sleep(max(0.0, began + self._load.every_s - time.monotonic()))

    async def _ask(self, index: int) -> Any:
        return await self._engine.ask(self._prompts[index][: self._lengths[index]], f"long-{index}")


class Meter:
    """Counts what happens between two looks."""

    def __init__(self, engine: Engine, batch: Batch) -> None:
        self._engine, self._batch = engine, batch
        self._last = self._now()

    def _now(self) -> dict[str, float]:
        now = {"began": time.monotonic(), "tokens": self._batch.produced}
        return now | {name: self._engine.metrics(f"manthan_{name}_total") for name in COUNTERS}

    def look(self) -> dict[str, float]:
        last, self._last = self._last, self._now()
        window = {name: self._last[name] - last[name] for name in ("tokens", *COUNTERS)}
        seconds = self._last["began"] - last["began"]
        return {"began": last["began"], "seconds": seconds, "tokens_per_s": window["tokens"] / seconds} | window


async def measure(engine: Engine, report: Report, *, load: dict[str, Any], block_size: int) -> dict[str, Any]:
    """The batch alone, and with the long sessions beside it."""
    setting, found = Load(**load), {}
    for phase in ("alone", "background"):
        batch = Batch(engine, setting)
        async with running([batch.stream(place) for place in range(setting.requests)]) as check:
            if phase == "alone":
                found[phase] = {"windows": await _measure_windows(report, phase, Meter(engine, batch), setting, check)}
            else:
                found[phase] = await _measure_background(engine, report, batch, setting, check)
                _check_returns(found[phase], setting, block_size, ours=engine.options.manthan is not None)
    return {"phases": found}


async def _measure_background(
    engine: Engine, report: Report, batch: Batch, load: Load, check: Callable[[], None]
) -> dict[str, Any]:
    background = Background(engine, load)
    for index in range(load.sessions):
        report.step(f"background: first turn of long session {index + 1} of {load.sessions}")
        await background.begin(index)
        check()
    async with running([background.run()]) as check_background:

        def check_both() -> None:
            check()
            check_background()

        windows = await _measure_windows(report, "background", Meter(engine, batch), load, check_both)
    begin, end = windows[0]["began"], windows[-1]["began"] + windows[-1]["seconds"]
    inside = [found._asdict() for found in background.returns if begin <= found.began and found.began < end]
    return {"windows": windows, "returns": inside}


async def _measure_windows(
    report: Report, phase: str, meter: Meter, load: Load, check: Callable[[], None]
) -> list[dict[str, float]]:
    """Warm up until the throughput is steady, then the windows."""
    rates: list[float] = []
    round_s = load.every_s * load.sessions if phase == "background" else 0.0
    fewest = max(FEWEST_PERIODS, math.ceil(round_s / load.every_s))  # each long session has come back once
    meter.look()
    while len(rates) < fewest or (not _is_steady(rates) and len(rates) < max(MOST_PERIODS, fewest)):
        report.step(f"{phase}: warming up, {rates[-1] if rates else 0:,.0f} tokens/s")
        await asyncio.sleep(load.every_s)
        check()
        rates.append(meter.look()["tokens_per_s"])
    windows = []
    for number in range(load.windows):
        report.step(f"{phase}: window {number + 1} of {load.windows}, {rates[-1]:,.0f} tokens/s")
        await asyncio.sleep(load.window_s)
        check()
        windows.append(meter.look())
        rates.append(windows[-1]["tokens_per_s"])
    return windows


def _is_steady(rates: list[float]) -> bool:
    last = rates[-FEWEST_PERIODS:]
    return max(last) - min(last) <= STEADY_WITHIN * max(last)


@contextlib.asynccontextmanager
async def running(coroutines: list[Any]) -> AsyncIterator[Callable[[], None]]:
    """Run these until the end of the block; calling what it gives raises what one of them raised."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]

    def check() -> None:
        for task in tasks:
            if task.done():
                task.result()

    try:
        yield check
    finally:
        for task in tasks:
            task.cancel()  # vLLM aborts the request
        await asyncio.gather(*tasks, return_exceptions=True)


def _check_returns(found: dict[str, Any], load: Load, block_size: int, *, ours: bool) -> None:
    """Refuse windows in which sessions did not come back as their arm says."""
    if not found["returns"]:
        raise WrongPathError("no long session came back inside the windows")
    for back in found["returns"]:
        full = min(back["before"], back["prompt_tokens"] - 1) // block_size * block_size
        share = back["cached_tokens"] / full
        if (share < KEPT_SHARE) if ours else (share > GONE_SHARE):
            raise WrongPathError(f"a long session came back with {share:.0%} of its blocks not computed: {back}")
    happened = {name: sum(window[name] for window in found["windows"]) for name in COUNTERS}
    if ours and not (happened["evictions"] and happened["restores"]):
        raise WrongPathError(f"Manthan did not both evict and restore inside the windows: {happened}")


# -- the arms -------------------------------------------------------------------------------------------


def engine_arm(name: str, load: Load, model: Path, block_size: int, store: str, min_tokens: int, **more: Any) -> Arm:
    """Both engines have the same pool: for the batch and POOL_SESSIONS long sessions."""
    pool_tokens = load.batch_tokens + POOL_SESSIONS * load.longest
    manthan = None
    if name == "manthan":
        nbytes = math.ceil(load.sessions * load.longest * Shape.of(model).token_nbytes / LEAST_RATIO)
        manthan = MANTHAN | {"min_tokens": min_tokens, "cold_store": {"kind": store, "max_bytes": nbytes}}
    engine = EngineOptions(
        model=str(model),
        block_size=block_size,
        blocks=math.ceil(pool_tokens / block_size) + 2 * load.requests,
        max_model_len=max(load.longest, load.prompt_tokens + load.output_tokens) + 64,
        max_num_seqs=load.requests + 4,
        manthan=manthan,
        **more,
    )
    return Arm(name, "interference", engine, {"load": asdict(load), "block_size": block_size})


def main(
    context: typer.Context,
    sessions: Annotated[int, typer.Option(help="Long sessions that come and go.")] = 4,
    tokens: Annotated[int, typer.Option(help="Prompt tokens of each of them at first.")] = 32000,
    turn_tokens: Annotated[int, typer.Option(help="Tokens that a long session has more whenever it returns.")] = 256,
    every: Annotated[float, typer.Option(help="Seconds from one return to the next.")] = 2.0,
    store: Annotated[str, typer.Option(help="Manthan's cold store: host or device.")] = "host",
    min_tokens: Annotated[
        int, typer.Option(help="Manthan leaves shorter sessions be; below 1,024 it also evicts what the batch leaves.")
    ] = 2048,
    requests: Annotated[int, typer.Option(help="Requests that always run.")] = 32,
    prompt_tokens: Annotated[int, typer.Option(help="Prompt tokens of each.")] = 512,
    output_tokens: Annotated[int, typer.Option(help="Output tokens of each.")] = 512,
    windows: Annotated[int, typer.Option(help="Measured windows of each arm.")] = 5,
    window: Annotated[float, typer.Option(help="Seconds of a window.")] = 6.0,
    arms: Annotated[str, typer.Option(help="Only these engines, with commas between: plain, manthan.")] = "",
    model: Annotated[Path | None, typer.Option(help="Folder with a config.json; else Qwen3-8B's shape.")] = None,
    block_size: Annotated[int, typer.Option(help="Tokens of a block.")] = 16,
    batched_tokens: Annotated[int, typer.Option(help="Most tokens that vLLM computes in a step.")] = 8192,
    eager: Annotated[bool, typer.Option("--eager", help="No CUDA graphs.")] = False,
    seed: Annotated[int, typer.Option(help="Of the token ids.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds that an engine may take.")] = 300,
    out: Annotated[Path, typer.Option(help="Folder for JSON, plot and logs.")] = OUT,
    plot_only: Annotated[Path | None, typer.Option(help="Show and plot this JSON of an earlier run again.")] = None,
    job: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure what a steady batch loses while long sessions come and go."""
    if job is not None:
        return serve(job, {"interference": measure})
    console = make_console()
    if plot_only is not None:
        return show(json.loads(plot_only.read_text()), plot_only.with_suffix(".png"), console)
    leave_on_signals()
    names = [name.strip() for name in arms.split(",")] if arms else list(ENGINES)
    if unknown := set(names) - set(ENGINES):
        raise typer.BadParameter(f"unknown {', '.join(sorted(unknown))}; there are {', '.join(ENGINES)}")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        folder_of_model = (model or write_model(Path(folder, "qwen3-8b-shape"))).absolute()
        shape = (requests, prompt_tokens, output_tokens, sessions, tokens, turn_tokens, every, windows, window)
        load = Load(*shape, Shape.of(folder_of_model).vocabulary, seed)
        more = {"batched_tokens": batched_tokens, "eager": eager}
        selected = [engine_arm(name, load, folder_of_model, block_size, store, min_tokens, **more) for name in names]
        found, errors = run_arms(Path(__file__), selected, out, console, timeout)
    report = new_report("interference", context.params, selected, found, errors)
    path = write_report(report, out)
    console.print(f"  {path}", soft_wrap=True)
    show(report, path.with_suffix(".png"), console)
    raise typer.Exit(1 if errors else 0)


if __name__ == "__main__":
    typer.run(main)
