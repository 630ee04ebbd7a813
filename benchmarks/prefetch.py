"""What a prefetch saves: how soon a session answers that was expected, and hot again before it came.

Time to the first token of a session that returns. Recomputed: plain vLLM, whose pool two others have overwritten. With
Manthan, each session in turn: it returns and is restored; it is asked again at once, while it is hot, and says when it
will be back (the hint `expect_return_s`); it goes cold; it is prefetched; it returns when it said. So restores, hot
hits and prefetches take turns on one engine. Where each token came from is checked, and so are the answers, which are
looked up in a table in the session; with made-up weights (`--made-up`) answers mean nothing.

    python benchmarks/prefetch.py [--out FOLDER]
    python benchmarks/prefetch.py --made-up --tokens 32000 --block-size 16 --returns 12 --store host
    python benchmarks/prefetch.py --plot-only FOLDER/prefetch.json
"""

import asyncio
import json
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from manthan.benchmarks.arms import OUT, Arm, leave_on_signals, make_console, new_report, run_arms, write_report
from manthan.benchmarks.engines import Answer, Engine, EngineOptions, Report, WrongPathError, random_tokens, serve
from manthan.benchmarks.prefetch_report import KINDS, RECOMPUTE, show
from manthan.benchmarks.redis_store import DIGITS, MODEL, POLL_S, Table
from manthan.benchmarks.restore import LEAST_RATIO, POOL_SESSIONS, SESSIONS, SPARE_POSITIONS, check
from manthan.benchmarks.shapes import Shape, write_model

IDLE_AFTER_S = 2.0
LEAD_S = 1.0
BACK_AFTER_S = 4.0
"""Cold after the first, prefetched the second before the last."""
ROOMY_POOL_SESSIONS = 2.0
MANTHAN = {
    "policy": "lru",
    "idle_after_s": IDLE_AFTER_S,
    "sweep_interval_s": 0.05,
    "prefetch": {"lead_s": LEAD_S},
}


# -- in the measuring process ---------------------------------------------------------------------------


class Chat:
    """A session, and its requests: questions of a table where the model can answer, one token of noise otherwise."""

    def __init__(self, engine: Engine, index: int, tokens: int, seed: int, made_up: bool) -> None:
        self._engine, self._name, self._asked = engine, f"s{index}", 0
        if made_up:
            shape = Shape.of(Path(engine.options.model))
            self._noise = random_tokens(seed, index, tokens, shape.vocabulary)
        self._table = None if made_up else Table(engine.options.model, tokens, f"{seed}-{index}")

    async def ask(self, **hints: Any) -> dict[str, Any]:
        """The next request: its times as JSON, and whether the answer is right."""
        if self._table is None:
            return asdict(await self._engine.ask(self._noise, self._name, **hints)) | {"right": True}
        prompt, right = self._table.question(self._asked)
        self._asked += 1
        external = self._engine.metrics("external_prefix_cache_hits_total")
        began = time.perf_counter()
        ttft_s, cached, tokens = 0.0, 0, []
        async for output in self._engine.generate(prompt, DIGITS, self._name, hints):
            if not tokens:
                ttft_s, cached = time.perf_counter() - began, output.num_cached_tokens or 0
            tokens += output.outputs[0].token_ids
        await asyncio.sleep(POLL_S)  # the step's metrics come with its outputs
        external = self._engine.metrics("external_prefix_cache_hits_total") - external
        answer = Answer(ttft_s, len(prompt), cached, round(external))
        return asdict(answer) | {"right": self._table.text(tokens) == right}


async def measure_recompute(engine: Engine, report: Report, *, returns: int, **chats: Any) -> dict[str, Any]:
    """SESSIONS sessions in turn on a pool with room for one: one return that is not counted, then `returns`."""
    sessions = [Chat(engine, index, **chats) for index in range(SESSIONS)]
    for session in sessions:
        await session.ask()
    found = []
    for number in range(returns + 1):
        report.step(f"return {number} of {returns}")
        found.append(await sessions[number % SESSIONS].ask())
        _check(engine, found[-1], cached=False, external=False, what=f"return {number}")
    return {RECOMPUTE: found}


async def measure_returns(engine: Engine, report: Report, *, returns: int, **chats: Any) -> dict[str, Any]:
    """For each session in turn a restore, a hot hit and a prefetch: one round that is not counted, then `returns`."""
    sessions = [Chat(engine, index, **chats) for index in range(SESSIONS)]
    for session in sessions:
        await session.ask()
    await engine.until_cold(SESSIONS)
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS if kind != RECOMPUTE}
    for number in range(returns + 1):
        report.step(f"return {number} of {returns}")
        session, prefetches = sessions[number % SESSIONS], engine.metrics("manthan_prefetches_total")
        found["restore"].append(await session.ask())
        _check(engine, found["restore"][-1], cached=True, external=True, what=f"restore {number}")
        found["hot"].append(await session.ask(expect_return_s=BACK_AFTER_S))
        back = time.monotonic() + BACK_AFTER_S
        _check(engine, found["hot"][-1], cached=True, external=False, what=f"restore {number}, asked again at once")
        await engine.until_cold(SESSIONS)
        await asyncio.sleep(back - time.monotonic())
        found["prefetch"].append(await session.ask())
        _check(engine, found["prefetch"][-1], cached=True, external=False, what=f"prefetch {number}")
        if engine.metrics("manthan_prefetches_total") != prefetches + 1:
            raise WrongPathError(f"prefetch {number}: there was none")
        await engine.until_cold(SESSIONS)
    return found


def _check(engine: Engine, found: dict[str, Any], *, cached: bool, external: bool, what: str) -> None:
    answer = Answer(**{name: value for name, value in found.items() if name != "right"})
    check(answer, engine.options.block_size, cached=cached, external=external, what=what)


# -- the arms -------------------------------------------------------------------------------------------


def arms(
    model: Path, store: str, block_size: int, eager: bool, batched_tokens: int, parameters: dict[str, Any]
) -> Sequence[Arm]:
    """The store has room for all sessions and one more; where something is prefetched, the pool for two."""
    longest = parameters["tokens"] + SPARE_POSITIONS
    nbytes = math.ceil((SESSIONS + 1) * longest * Shape.of(model).token_nbytes / LEAST_RATIO)

    def engine(pool_sessions: float, manthan: dict[str, Any] | None) -> EngineOptions:
        return EngineOptions(
            model=str(model),
            block_size=block_size,
            blocks=math.ceil(pool_sessions * longest / block_size) + 2,
            max_model_len=longest,
            batched_tokens=batched_tokens,
            eager=eager,
            manthan=manthan,
            made_up_weights=parameters["made_up"],
        )

    ours = MANTHAN | {"cold_store": {"kind": store, "max_bytes": nbytes}}
    return [
        Arm("recompute", "recompute", engine(POOL_SESSIONS, None), parameters),
        Arm("manthan", "returns", engine(ROOMY_POOL_SESSIONS, ours), parameters),
    ]


def main(
    context: typer.Context,
    tokens: Annotated[int, typer.Option(min=512, help="Prompt tokens of a session.")] = 2000,
    returns: Annotated[int, typer.Option(min=1, help="Returns of each kind that are counted.")] = 24,
    store: Annotated[str, typer.Option(help="cold_store.kind: host, or device on a GPU.")] = "host",
    model: Annotated[Path, typer.Option(help="Folder of a model that knows tables.")] = MODEL,
    made_up: Annotated[bool, typer.Option("--made-up", help="Qwen3-8B's shape with made-up weights instead.")] = False,
    block_size: Annotated[int, typer.Option(help="Tokens of a block.")] = 32,
    batched_tokens: Annotated[int, typer.Option(help="Most tokens that vLLM computes in a step.")] = 8192,
    eager: Annotated[bool, typer.Option(help="No CUDA graphs.")] = False,
    seed: Annotated[int, typer.Option(help="Of the sessions.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds that an arm may take.")] = 600,
    out: Annotated[Path, typer.Option(help="Folder for JSON, plot and logs.")] = OUT,
    plot_only: Annotated[Path | None, typer.Option(help="Show and plot this JSON of an earlier run again.")] = None,
    job: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure how soon an expected session answers."""
    if job is not None:
        return serve(job, {"recompute": measure_recompute, "returns": measure_returns})
    console = make_console()
    if plot_only is not None:
        return show(json.loads(plot_only.read_text()), plot_only.with_suffix(".png"), console)
    leave_on_signals()
    out.mkdir(parents=True, exist_ok=True)
    parameters = {"returns": returns, "tokens": tokens, "seed": seed, "made_up": made_up}
    with tempfile.TemporaryDirectory() as folder:
        path = write_model(Path(folder, "qwen3-8b-shape")) if made_up else model.absolute()
        selected = arms(path, store, block_size, eager, batched_tokens, parameters)
        found, errors = run_arms(Path(__file__), [*selected], out, console, timeout)
    report = new_report("prefetch", context.params, [*selected], found, errors)
    written = write_report(report, out)
    console.print(f"  {written}", soft_wrap=True)
    show(report, written.with_suffix(".png"), console)
    raise typer.Exit(1 if errors else 0)


if __name__ == "__main__":
    typer.run(main)
