"""Measure the time until a returning session answers, and the number of sessions whose KV is kept.

Latency: time to the first token of a session return (a prompt sent again). The prompt's KV is in vLLM's prefix cache
(arm hot), recomputed (recompute), in vLLM's CPU offload, or compressed in a store of Manthan. Arms on Redis and on disk
run only if `--arms` names them. Before each session return, arm disk drops the store's files from the page cache, and
arm disk-cached does not. Arm host-disk has all blocks in RAM, too. Capacity: number of sessions kept in a budget of
bytes. Each arm is a separate engine. A latency arm fails if a return's KV came from an unexpected source.

    python benchmarks/restore.py [--out FOLDER] [--only latency|capacity] [--arms host,device,redis,disk]
        [--codecs wht-5x,klt-8x] [--profile FILE] [--shape gemma3-12b] [--layers 24]
    python benchmarks/restore.py --plot-only FOLDER/restore.json
"""

import json
import math
import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from manthan.benchmarks.arms import (
    OUT,
    Arm,
    chosen_profile,
    leave_on_signals,
    make_console,
    new_report,
    run_arms,
    write_report,
)
from manthan.benchmarks.engines import Answer, Engine, EngineOptions, Report, WrongPathError, random_tokens, serve
from manthan.benchmarks.local_redis import redis_at
from manthan.benchmarks.restore_report import CAPACITY, DISK, LATENCY, NAMED, OURS, REDIS, show
from manthan.benchmarks.shapes import DEFAULT, PUBLIC, Shape, write_model
from manthan.codec.registry import needs_profile

SESSIONS = 3
"""Sessions of a latency arm. The pool has room for POOL_SESSIONS, so that the others' requests overwrite a session."""
POOL_SESSIONS = 1.3
SPARE_POSITIONS = 64
KEPT_SHARE = 0.95
GONE_SHARE = 0.01
LEAST_RATIO, MOST_RATIO = 4.0, 5.2
"""Expected compression ratios. LEAST_RATIO gives the room of a store, MOST_RATIO the sessions of a capacity arm."""
HOT_POOL_SHARE = 0.1
DEFAULT_BLOCK = 16
MANTHAN = {"policy": "lru", "idle": 0.3}


class Only(StrEnum):
    """Measurement: value of `--only`."""

    latency = "latency"
    capacity = "capacity"


# -- in the measuring process ---------------------------------------------------------------------------


def check(answer: Answer, block_size: int, *, cached: bool, external: bool, what: str) -> None:
    """Raise WrongPathError if the KV of an answer's prompt came from an unexpected source.

    cached: True if at least KEPT_SHARE of the full blocks must be reused; False if at most GONE_SHARE may be.
    external: True if at least KEPT_SHARE of the full blocks must come from outside the pool; False if none may.
    """
    full = (answer.prompt_tokens - 1) // block_size * block_size  # the last token is always computed
    right = answer.cached_tokens >= KEPT_SHARE * full if cached else answer.cached_tokens <= GONE_SHARE * full
    right &= answer.external_tokens >= KEPT_SHARE * full if external else answer.external_tokens == 0
    if not right:
        raise WrongPathError(
            f"{what}: of {answer.prompt_tokens} prompt tokens {answer.cached_tokens} were not computed, "
            f"{answer.external_tokens} of these from beyond the pool"
        )


async def measure_latency(
    engine: Engine,
    report: Report,
    *,
    arm: str,
    returns: int,
    tokens: int,
    vocabulary: int,
    seed: int,
    forgotten: str = "",
) -> dict[str, Any]:
    """Return the answers of `returns` + 1 session returns as "returns". The first is a warm-up.

    Manthan's arms send each return's prompt again at once, and have these answers as "hot". forgotten: folder whose
    files are dropped from the page cache before each return; empty for none.
    """
    sessions = [random_tokens(seed, index, tokens, vocabulary) for index in range(SESSIONS)]
    if arm == "hot":
        return {"returns": await _ask_again(engine, report, sessions, returns)}
    ours, block_size = arm in (*OURS, *NAMED), engine.options.block_size
    cold, again = [], []
    for index, session in enumerate(sessions):
        report.step(f"first turn of session {index + 1} of {SESSIONS}")
        await engine.ask(session, f"s{index}")
        if ours:
            await engine.until_cold(index + 1)
    for number in range(returns + 1):
        index = number % SESSIONS
        report.step(f"return {number} of {returns}")
        if forgotten:
            os.sync()
            forget(Path(forgotten))
        cold.append(await engine.ask(sessions[index], f"s{index}"))
        check(cold[-1], block_size, cached=arm != "recompute", external=arm != "recompute", what=f"return {number}")
        if ours:
            again.append(await engine.ask(sessions[index], f"s{index}"))
            check(again[-1], block_size, cached=True, external=False, what=f"return {number}, asked again at once")
            await engine.until_cold(SESSIONS)
    return {"returns": list(map(asdict, cold))} | ({"hot": list(map(asdict, again))} if ours else {})


def forget(folder: Path) -> None:
    """Drop the folder's files from the page cache. The files must be synced to the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


async def _ask_again(
    engine: Engine, report: Report, sessions: Sequence[list[int]], returns: int
) -> list[dict[str, Any]]:
    """Return `returns` + 1 answers from the pool. Before a session's answers, one request puts its KV into the pool."""
    answers: list[Answer] = []
    put = -1
    for number in range(returns + 1):
        report.step(f"return {number} of {returns}")
        index = number * len(sessions) // (returns + 1)
        if index != put:
            await engine.ask(sessions[index])
            put = index
        answers.append(await engine.ask(sessions[index]))
        check(answers[-1], engine.options.block_size, cached=True, external=False, what=f"return {number}")
    return list(map(asdict, answers))


async def measure_capacity(
    engine: Engine, report: Report, *, sessions: int, tokens: int, vocabulary: int, seed: int
) -> dict[str, Any]:
    """Ask all sessions in turn, wait until Manthan has saved or dropped all, and ask all again, newest first.

    Return the later answers, and the number of sessions kept: at least KEPT_SHARE of a kept session was not computed.
    """
    prompts = [random_tokens(seed, index, tokens, vocabulary) for index in range(sessions)]
    for index, prompt in enumerate(prompts):
        report.step(f"session {index + 1} of {sessions}")
        await engine.ask(prompt, f"s{index}")
    if engine.options.manthan is not None:
        await engine.until_cold()
    full = tokens // engine.options.block_size * engine.options.block_size
    returns = []
    for index in reversed(range(sessions)):
        report.step(f"return of session {index + 1} of {sessions}")
        answer = await engine.ask(prompts[index], f"s{index}")
        returns.append({"session": index, "kept": answer.cached_tokens >= KEPT_SHARE * full} | asdict(answer))
    return {"kept": sum(found["kept"] for found in returns), "returns": returns}


# -- the arms -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """Settings common to all arms."""

    model: Path
    block_size: int
    eager: bool
    batched_tokens: int
    returns: int
    tokens: int
    capacity_tokens: int
    capacity_sessions: int
    seed: int
    simple_offload: bool
    redis_url: str
    disk_folder: str
    weights: bool = False
    profile: str = ""

    @property
    def shape(self) -> Shape:
        return Shape.of(self.model)

    @property
    def env(self) -> dict[str, str]:
        return {"VLLM_USE_SIMPLE_KV_OFFLOAD": "1" if self.simple_offload else "0"}

    def engine(self, tokens: int, pool_sessions: float, **more: Any) -> EngineOptions:
        """Return options of an engine for sessions of `tokens` tokens.

        The pool has room for `pool_sessions` sessions, and at least for the longest request and two more blocks.
        """
        longest = tokens + SPARE_POSITIONS
        return EngineOptions(
            model=str(self.model),
            block_size=self.block_size,
            blocks=max(math.ceil(pool_sessions * tokens / self.block_size), math.ceil(longest / self.block_size) + 2)
            + self.shape.further_blocks(self.block_size, self.batched_tokens),
            max_model_len=longest,
            eager=self.eager,
            batched_tokens=self.batched_tokens,
            made_up_weights=not self.weights,
            **more,
        )

    def codec(self, name: str) -> dict[str, Any]:
        """Return Manthan's options for the codec; for an empty name, the default codec.

        The guard measures a codec's error, and may choose a finer codec. The guard is therefore off, except for the
        default codec with a model's own weights.
        """
        if not name:
            return {} if self.weights else {"codec": {"guard": False}}
        profile = {"profile": self.profile} if needs_profile(name) else {}
        return {"codec": {"name": name, "guard": False, **profile}}

    def store(self, arm: str, nbytes: int) -> dict[str, Any]:
        """Return Manthan's options for an arm's store, into which KV of `nbytes` bytes in bf16 fits compressed."""
        kind = {"disk-cached": "disk", "host-disk": "disk", "tiered": "redis"}.get(arm, arm)
        room = math.ceil(nbytes / (1 if self.shape.is_latent else LEAST_RATIO))
        store: dict[str, Any] = {"kind": kind, "max_bytes": room}
        if arm in ("host-disk", "tiered"):
            store["host_bytes"] = room
        if arm in REDIS:
            return {"tiers": store | {"redis": {"url": self.redis_url, "prefix": f"manthan-{arm}:"}}}
        if arm not in DISK:
            return {"tiers": store}
        folder = Path(self.disk_folder, arm)
        folder.mkdir(parents=True, exist_ok=True)
        return {"tiers": store | {"disk": {"path": str(folder)}}}


def latency_arm(name: str, setting: Setting, codec: str = "") -> Arm:
    """Return a latency arm. The store, or vLLM's offload, has room for all sessions and one more."""
    label = f"{name} {codec}" if codec else name
    nbytes = (SESSIONS + 1) * setting.tokens * setting.shape.token_nbytes
    more: dict[str, Any] = {}
    if name == "vllm-offload":
        more["offload_nbytes"] = nbytes
    elif name in (*OURS, *NAMED):
        more["manthan"] = MANTHAN | setting.codec(codec) | setting.store(name, nbytes)
    parameters: dict[str, Any] = {
        "arm": name,
        "returns": setting.returns,
        "tokens": setting.tokens,
        "vocabulary": setting.shape.vocabulary,
        "seed": setting.seed,
    }
    if name == "disk":
        parameters["forgotten"] = setting.disk_folder
    engine = setting.engine(setting.tokens, POOL_SESSIONS, **more)
    return Arm(f"latency {label}", "latency", engine, parameters, setting.env)


def capacity_arm(name: str, setting: Setting) -> Arm:
    """Return a capacity arm with the bytes of `capacity_sessions` bf16 sessions as budget.

    The budget is RAM, besides a small pool, or GPU memory with the pool included (arms plain and device).
    """
    tokens, budget_sessions = setting.capacity_tokens, setting.capacity_sessions
    budget = budget_sessions * tokens * setting.shape.token_nbytes
    pool_sessions, expected, more = POOL_SESSIONS, float(budget_sessions), {}
    if name == "vllm-offload":
        more["offload_nbytes"] = budget
    elif name == "host":
        more["manthan"] = MANTHAN | {"tiers": {"kind": "host", "max_bytes": budget}} | setting.codec("")
        expected = MOST_RATIO * budget_sessions
    elif name == "plain":
        pool_sessions = budget_sessions
    else:
        pool_sessions = max(POOL_SESSIONS, HOT_POOL_SHARE * budget_sessions)
        store = math.floor((budget_sessions - pool_sessions) * tokens * setting.shape.token_nbytes)
        more["manthan"] = MANTHAN | {"tiers": {"kind": "device", "max_bytes": store}} | setting.codec("")
        expected = MOST_RATIO * (budget_sessions - pool_sessions)
    sessions = math.ceil(expected * 1.05 + pool_sessions) + 2
    parameters = {
        "sessions": sessions,
        "tokens": tokens,
        "vocabulary": setting.shape.vocabulary,
        "seed": setting.seed + 1,
    }
    return Arm(f"capacity {name}", "capacity", setting.engine(tokens, pool_sessions, **more), parameters, setting.env)


def chosen_arms(only: Only | None, names: str, setting: Setting, codecs: str = "") -> list[Arm]:
    """Return the named arms; without names, all but NAMED. Raises BadParameter for unknown names.

    codecs: names of codecs, with commas between. Latency arm host runs once with each, even if not named.
    """
    wanted = {name.strip() for name in names.split(",")} if names else {*LATENCY, *CAPACITY}
    known = (*LATENCY, *NAMED, "plain")
    if unknown := wanted - {*known}:
        raise typer.BadParameter(f"unknown {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    timed = [name for name in (*LATENCY, *NAMED) if name in wanted]
    with_codecs = [(name, "") for name in timed if name != "host" or not codecs]
    with_codecs += [("host", codec.strip()) for codec in codecs.split(",") if codec.strip()]
    latency = [] if only is Only.capacity else [latency_arm(name, setting, codec) for name, codec in with_codecs]
    capacity = [] if only is Only.latency else [capacity_arm(name, setting) for name in CAPACITY if name in wanted]
    return latency + capacity


def made_up(folder: Path, shape: str, layers: int) -> Path:
    """Write a model of a public model's shape, without weights, into `folder`. Return `folder`. Raises BadParameter."""
    if shape not in PUBLIC:
        raise typer.BadParameter(f"--shape is {shape}; there are {', '.join(PUBLIC)}")
    try:
        return write_model(folder, shape, layers)
    except ValueError as error:
        raise typer.BadParameter(f"--layers: {error}") from None


def main(
    context: typer.Context,
    tokens: Annotated[int, typer.Option(help="Prompt tokens of a session, for the latency.")] = 32000,
    returns: Annotated[int, typer.Option(help="Returns that are counted, in each arm.")] = 12,
    capacity_tokens: Annotated[int, typer.Option(help="Prompt tokens of a session, for the capacity.")] = 8000,
    capacity_sessions: Annotated[int, typer.Option(help="The budget: bytes of this number of bf16 sessions.")] = 16,
    only: Annotated[Only | None, typer.Option(help="One of the two measurements.")] = None,
    arms: Annotated[str, typer.Option(help="Run only these arms, with commas between.")] = "",
    codecs: Annotated[str, typer.Option(help="Codecs to run arm host with, separated by commas.")] = "",
    profile: Annotated[Path | None, typer.Option(help="Profile for calibrated codecs, or `made-up`.")] = None,
    model: Annotated[Path | None, typer.Option(help="Folder with a config.json, instead of a shape.")] = None,
    shape: Annotated[str, typer.Option(help=f"Shape of a public model: {', '.join(PUBLIC)}.")] = DEFAULT,
    layers: Annotated[int, typer.Option(help="Number of first layers of the shape; 0 for all.")] = 0,
    weights: Annotated[bool, typer.Option("--weights", help="MODEL's own weights, not made-up ones.")] = False,
    block_size: Annotated[int, typer.Option(help="Tokens of a block; 0 for the shape's size.")] = 0,
    batched_tokens: Annotated[int, typer.Option(help="Most tokens that vLLM computes in a step.")] = 8192,
    eager: Annotated[bool, typer.Option("--eager", help="No CUDA graphs.")] = False,
    simple_offload: Annotated[
        bool, typer.Option("--simple-offload", help="Arm vllm-offload uses VLLM_USE_SIMPLE_KV_OFFLOAD, not /dev/shm.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the token ids.")] = 0,
    redis_url: Annotated[str, typer.Option(help="Running server for arms on Redis; if empty, one is started.")] = "",
    disk_folder: Annotated[Path, typer.Option(help="Folder on the disk to be measured, for arms on disk.")] = Path(),
    timeout: Annotated[float, typer.Option(help="Seconds that an arm may take.")] = 300,
    out: Annotated[Path, typer.Option(help="Folder for JSON, plot and logs.")] = OUT,
    plot_only: Annotated[Path | None, typer.Option(help="Show and plot this JSON of an earlier run again.")] = None,
    job: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure how soon returning sessions answer, and how many are kept."""
    if job is not None:
        return serve(job, {"latency": measure_latency, "capacity": measure_capacity})
    console = make_console()
    if plot_only is not None:
        return show(json.loads(plot_only.read_text()), plot_only.with_suffix(".png"), console)
    leave_on_signals()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        on_disk = stack.enter_context(tempfile.TemporaryDirectory(dir=disk_folder))
        url = stack.enter_context(redis_at(redis_url)) if set(REDIS) & set(arms.split(",")) else ""
        model_folder = model or made_up(Path(folder, f"{shape}-shape"), shape, layers)
        profile = chosen_profile(profile, model_folder, stack)
        setting = Setting(
            model_folder.absolute(),
            block_size or (DEFAULT_BLOCK if model else PUBLIC[shape].block_size),
            eager,
            batched_tokens,
            returns,
            tokens,
            capacity_tokens,
            capacity_sessions,
            seed,
            simple_offload,
            url,
            on_disk,
            weights,
            str(profile.absolute()) if profile else "",
        )
        selected = chosen_arms(only, arms, setting, codecs)
        found, errors = run_arms(Path(__file__), selected, out, console, timeout)
    report = new_report("restore", context.params, selected, found, errors)
    path = write_report(report, out)
    console.print(f"  {path}", soft_wrap=True)
    show(report, path.with_suffix(".png"), console)
    raise typer.Exit(1 if errors else 0)


if __name__ == "__main__":
    typer.run(main)
