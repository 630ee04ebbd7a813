"""Run of the load benchmark: servers in turn, the same chats for each, a report.

An arm is a system to measure, such as plain vLLM. `options` has the command's arguments; see load.py.
"""

import contextlib
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import typer
from pydantic import ByteSize
from rich.console import Console

from manthan.benchmarks import load_fairness, load_report
from manthan.benchmarks.arms import (
    chosen_profile,
    leave_on_signals,
    machine,
    make_console,
    new_report,
    run_jobs,
    tell_codec,
    write_report,
)
from manthan.benchmarks.capacity_arms import IN_REDIS, CapacityArm, Memory, as_json, read_codecs, shown
from manthan.benchmarks.endpoint import POLL_S, Endpoint, ServerError
from manthan.benchmarks.load_arms import (
    LMCACHE,
    LMCACHE_CHUNK_TOKENS,
    MANTHAN_ARMS,
    ORDERED,
    Arms,
    LMCacheServer,
    cannot_run,
    read_arms,
)
from manthan.benchmarks.load_chats import FIXED, Chat, Made, made_up, replayed, writer
from manthan.benchmarks.load_talk import Talk, Talker
from manthan.benchmarks.load_waits import explain, read_log
from manthan.benchmarks.local_redis import redis_for_arms
from manthan.benchmarks.ports import hold_port, port_of
from manthan.benchmarks.progress import Bar
from manthan.benchmarks.restore import SPARE_POSITIONS
from manthan.benchmarks.served import SAFE_VOCABULARY, Served
from manthan.benchmarks.server import VllmServer, codec_used
from manthan.benchmarks.settle import until_settled
from manthan.benchmarks.shapes import DEFAULT, model_folder

CACHES = ("VLLM_CACHE_ROOT", "NUMBA_CACHE_DIR", "CUDA_CACHE_PATH", "TRITON_CACHE_DIR")
"""Environment variables that name folders of compiled kernels."""
ANSWER_TIMEOUT_S = 1800.0
"""Seconds without data from the server after which a request fails."""
FORGET_S = 10.0
SOON_S = 5.0
"""Largest --idle-after for which the warm-up waits until Manthan has compressed the chat."""


@dataclass(frozen=True)
class Sizes:
    """Defaults of options. pool_chats: first prompts that fit the pool. memory: bytes outside it; 0: as the pool."""

    chats: int
    tokens: int
    pool_chats: int
    memory: int


GPU = Sizes(chats=64, tokens=8192, pool_chats=10, memory=20 << 30)
CPU = Sizes(chats=20, tokens=512, pool_chats=8, memory=0)


# -- chats and arms --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """Chats to run on each server. longest: upper bound of the tokens of a prompt with its answer.

    about: the report's keys about the chats. parts: settings of the loads of --fairness, run instead of `chats`.
    """

    chats: list[Chat]
    longest: int
    about: dict[str, Any]
    parts: dict[str, Made] = field(default_factory=dict)


def made_of(options: Namespace, on_gpu: bool) -> Made:
    """Return the settings of made-up chats, from the options and their defaults."""
    sizes, arrive_s = GPU if on_gpu else CPU, 2 * options.think if options.arrive is None else options.arrive
    return Made(
        options.chats or sizes.chats, options.tokens or sizes.tokens, options.turns, options.said, options.answer,
        options.think, str(options.thinking), arrive_s, options.seed,
    )  # fmt: skip


def load_of(options: Namespace, served: Served | None, vocabulary: int, positions: int, on_gpu: bool) -> Load:
    """Return the load of the trace to replay, or of made-up chats. Raises BadParameter if no chat fits `positions`."""
    made, most = made_of(options, on_gpu), positions - SPARE_POSITIONS
    if options.replay is not None:
        trace = options.replay.read()
        chats = replayed(options.replay, trace, most, vocabulary)
        if not chats:
            raise typer.BadParameter(f"--trace {trace.name} has no request that fits {most} tokens: raise --shrink")
        longest = max(len(turn.said.tokens) + turn.answer_tokens for chat in chats for turn in chat.turns)
        taken = len(trace.requests[: options.replay.requests or None])
        return Load(chats, longest, {"trace": trace.name, "left_out": taken - len(chats), "tokens": 0})
    if made.longest > most:
        raise typer.BadParameter(
            f"--tokens {made.tokens} with {made.turns} turns makes prompts of {made.longest} tokens, but the model has "
            f"{positions} positions"
        )
    chats = made_up(made, writer(served, vocabulary, options.seed))
    return Load(chats, made.longest + SPARE_POSITIONS, {"made": asdict(made), "tokens": made.tokens, "left_out": 0})


def in_parts(options: Namespace, served: Served, load: Load) -> Load:
    """Return the three loads of --fairness as parts of one load. Raises BadParameter; see three_loads."""
    blocks, most = memory_of(options, served, load).pool_blocks, served.shape.positions - SPARE_POSITIONS
    parts = load_fairness.three_loads(replace(made_of(options, served.on_gpu), seed=0), blocks, served.block_size, most)
    longest = max(made.longest for made in parts.values()) + SPARE_POSITIONS
    chats = chats_of(parts[load_fairness.ONE_TURN], served)
    return Load(chats, longest, load.about | {"loads": {name: asdict(made) for name, made in parts.items()}}, parts)


def chats_of(made: Made, served: Served) -> list[Chat]:
    return made_up(made, writer(served, served.shape.vocabulary, made.seed))


def memory_of(options: Namespace, served: Served, load: Load) -> Memory:
    """Return the sizes of the KV pool and of a store outside the pool, from which all arms are made."""
    sizes = GPU if served.on_gpu else CPU
    tokens = options.pool or sizes.pool_chats * (load.about["tokens"] or load.longest)
    least = -(-load.longest // served.block_size) + 2
    blocks = max(-(-tokens // served.block_size), least)
    pool = blocks * served.block_nbytes
    store = options.memory or sizes.memory or pool
    return Memory(pool + store, blocks, pool, store)


def choose_arms(
    options: Namespace, served: Served, memory: Memory, longest: int, most: int, stack: ExitStack
) -> dict[str, CapacityArm | str]:
    """Return each arm by name, or the reason to leave the arm out.

    When the stack ends, it stops a Redis server started here, frees LMCache's ports, and removes a made-up profile.

    Args:
        longest: upper bound of the tokens of a prompt with its answer.
        most: most requests that run at a time.
    """
    kinds, codecs = read_arms(options.arms, served.on_gpu), read_codecs(options.codecs, options.profile)
    profile = chosen_profile(options.profile, served.folder, stack)
    reasons = {kind: cannot_run(kind, served.on_gpu) for kind in kinds}
    if options.redis_url:
        reasons |= dict.fromkeys(IN_REDIS, "")
    in_redis = any(kind in IN_REDIS and not reasons[kind] for kind in kinds)
    redis = stack.enter_context(redis_for_arms(options.redis_url)) if in_redis else {}
    ports = [port_of(stack.enter_context(hold_port())) for _ in range(2)] if LMCACHE in kinds else []
    chunk = LMCACHE_CHUNK_TOKENS if served.on_gpu else served.block_size
    common = Arms(
        memory, longest, most, options.idle_after, options.manthan, profile, served.made_up, redis,
        options.out, options.flags, LMCacheServer(ports[0], ports[1], chunk) if ports else None,
    )  # fmt: skip
    found: dict[str, CapacityArm | str] = {}
    for kind in kinds:
        for codec in codecs if kind in MANTHAN_ARMS else [""]:
            arm = reasons[kind] or common.make(kind, codec)
            found[kind if isinstance(arm, str) else arm.name] = arm
    return found


# -- on one server --------------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(
    options: Namespace, served: Served, arm: CapacityArm, longest: int, name: str, console: Console
) -> Iterator[tuple[VllmServer, Bar, dict[str, Any]]]:
    """Start an arm's server; warm it up unless --cold. Yield the server, a progress bar, and keys for the report."""
    began = time.monotonic()
    with ExitStack() as stack:
        if options.cold:
            caches = stack.enter_context(tempfile.TemporaryDirectory(prefix="manthan-load-"))
            arm = replace(arm, env=dict(arm.env) | dict.fromkeys(CACHES, caches))
        server = stack.enter_context(arm.server(served, options.out, name))
        progress = stack.enter_context(Bar(console, shown(arm)))
        server.wait_for_answers(ANSWER_TIMEOUT_S)
        progress.begin("the server starts")
        server.wait_until_ready(options.start_timeout)
        about = as_json(arm) | {"start_s": round(time.monotonic() - began, 1), "block_size": served.block_size}
        if not options.cold:
            progress.begin("warm-up")
            warm_up(server, options, served, longest, arm.manthan is not None)
        yield server, progress, about
    tell_codec(server.log, console)
    about["codec_used"] = codec_used(server.log)


def run_arm(
    options: Namespace, served: Served, load: Load, arm: CapacityArm, repeat: int, console: Console
) -> dict[str, Any]:
    """Run the load on an arm's server. Return the run for the report. repeat: number from 0 on, added to --seed."""
    began, seed = time.monotonic(), options.seed + repeat
    name = f"fairness-{seed}" if load.parts else "load"
    parts = {
        part: chats_of(replace(made, seed=len(load.parts) * seed + at), served)
        for at, (part, made) in enumerate(load.parts.items())
    } or {"the chats talk": load.chats}
    talks: dict[str, Talk] = {}
    is_ours = arm.manthan is not None
    with serving(options, served, arm, load.longest, name, console) as (server, progress, found):
        for part, chats in parts.items():
            if talks:
                until_settled(server, options.idle_after + 1)
                forget(server)
            progress.begin(part, sum(len(chat.turns) for chat in chats))
            talks[part] = Talker(server, progress.step, options.timeout, arm.kind == ORDERED).run(chats)
    reports = {}
    for part, talk in talks.items():
        waits = explain(talk, read_log(server.log, talk.began), served.block_size, is_ours)
        reports[part] = as_report(talk, waits, is_ours)
        of = f", {part}" if load.parts else ""
        console.print(f"  {shown(arm)}{of}: {said(talk)}; {time.monotonic() - began:.0f} s", soft_wrap=True)
    return found | ({"seed": seed, "loads": reports} if load.parts else reports.popitem()[1])


def warm_up(server: Endpoint, options: Namespace, served: Served, longest: int, is_ours: bool) -> None:
    """Send a prompt that is in no load twice, then empty the caches, because a server's first requests take longer.

    Manthan's store keeps that prompt, because its guard forgets at a reset of the store which codec suits the model.
    """
    made = Made(1, max(16, longest // 2), 1, 1, 4, 0.0, FIXED, 0.0, options.seed + 1)
    chats = made_up(made, writer(None, served.shape.vocabulary, made.seed))
    still_s = 0.0 if not is_ours or options.idle_after > SOON_S else options.idle_after + 1
    for _ in range(2):
        talk = Talker(server, lambda: None, ANSWER_TIMEOUT_S).run(chats)
        for one in talk.asked:
            if one.error:
                raise server.error(f"The server does not answer: {one.error}")
        until_settled(server, still_s)
    forget(server, external=not is_ours)


def forget(server: Endpoint, external: bool = True) -> None:
    """Empty the prefix cache, and with `external` the KV connector's store too.

    Retry for FORGET_S, because a connector may hold blocks after the last request.
    """
    deadline = time.monotonic() + FORGET_S
    while True:
        try:
            return server.reset_prefix_cache(external)
        except ServerError:
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_S)


def as_report(talk: Talk, waits: Sequence[Any], is_ours: bool) -> dict[str, Any]:
    """Return the record of a load for the report. waits: of the answered requests, in the order of talk.asked."""
    explained = iter(waits)
    requests = [asdict(one) | ({} if one.error else {"wait": asdict(next(explained))}) for one in talk.asked]
    about = {
        "is_ours": is_ours,
        "began": talk.began,
        "wall_s": talk.wall_s,
        "planned": talk.planned,
        "requests": requests,
    }
    return about | {"samples": talk.samples, "counters": talk.counters}


def said(talk: Talk) -> str:
    """Return a text: the numbers of answered and planned requests, and the time."""
    answered = sum(not one.error for one in talk.asked)
    return f"{answered} of {talk.planned} requests answered in {talk.wall_s:.0f} s"


def run_given(options: Namespace, console: Console) -> tuple[Load, dict[str, Any]]:
    """Run the load on a server started by the user. Return the load and the run for the report."""
    with contextlib.closing(Endpoint(options.base_url, timeout_s=ANSWER_TIMEOUT_S)) as endpoint:
        positions = int(endpoint.about().get("max_model_len") or 1 << 20)
        served, vocabulary = None, SAFE_VOCABULARY
        if options.model is not None:
            served = Served.choose(options.model, 1, options.model, False)
            vocabulary = served.shape.vocabulary
        load = load_of(options, served, vocabulary, positions, on_gpu=False)
        with Bar(console, endpoint.url) as progress:
            progress.begin("the chats talk", sum(len(chat.turns) for chat in load.chats))
            talk = Talker(endpoint, progress.step, options.timeout).run(load.chats)
        is_ours = any(name.startswith("manthan_") for name in talk.counters)
    console.print(f"  {options.base_url}: {said(talk)}", soft_wrap=True)
    waits = explain(talk, read_log(None, talk.began), 1, is_ours=False)  # no log says what was restored
    return load, {"arm": options.base_url, "budget": None} | as_report(talk, waits, is_ours)


# -- all arms -------------------------------------------------------------------------------------------


def run(options: Namespace, plot_only: Sequence[Path], arguments: dict[str, Any]) -> None:
    """Do the whole command. Without --plot-only raises Exit: with status 1 after a failure or a stop, else with 0."""
    console = make_console()
    reported: ModuleType = load_fairness if options.fairness else load_report
    if plot_only:
        return reported.show(reported.merged(plot_only), plot_only[0].with_suffix(".png"), console)
    leave_on_signals()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        options.model = model_folder(options.model, Path(folder))
        if options.base_url:
            report = run_one(options, arguments, console)
        else:
            report = run_arms(options, Path(folder), stack, arguments, console)
    path = options.out / f"{report['benchmark']}.json"
    console.print(f"  {path}", soft_wrap=True)
    reported.show(report, path.with_suffix(".png"), console)
    raise typer.Exit(1 if report["errors"] else 0)


def run_one(options: Namespace, arguments: dict[str, Any], console: Console) -> dict[str, Any]:
    try:
        load, found = run_given(options, console)
    except ServerError as error:
        console.print(f"  {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    report = new_report("load", arguments, [], {}, {}) | {"model": options.base_url} | load.about
    report |= {"left_out_arms": {}, "runs": [found]}
    write_report(report, options.out)
    return report


def run_arms(
    options: Namespace, folder: Path, stack: ExitStack, arguments: dict[str, Any], console: Console
) -> dict[str, Any]:
    on_gpu = bool(machine()["gpu"])
    served = Served.choose(options.model, options.block_size, folder / f"{DEFAULT}-shape", on_gpu)
    load = load_of(options, served, served.shape.vocabulary, served.shape.positions, on_gpu)
    if options.fairness:
        load = in_parts(options, served, load)
    memory = memory_of(options, served, load)
    arms = choose_arms(options, served, memory, load.longest, len(load.chats), stack)
    left_out = {name: arm for name, arm in arms.items() if isinstance(arm, str)}
    for reason in left_out.values():
        console.print(f"  {reason}", soft_wrap=True)
    jobs = {
        f"{name}{f', repeat {repeat + 1}' if repeat else ''}": partial(run_arm, options, served, load, arm, repeat)
        for repeat in range(options.repeats)
        for name, arm in arms.items()
        if isinstance(arm, CapacityArm)
    }
    about = {"model": served.name, "left_out_arms": left_out, "memory": asdict(memory)} | load.about
    requests = sum(len(chat.turns) for chat in load.chats)
    sizes = [ByteSize(nbytes).human_readable() for nbytes in (memory.pool_nbytes, memory.store_nbytes)]
    what = f"{len(load.parts)} loads of about" if load.parts else f"{len(load.chats)} chats,"
    console.print(f"  {what} {requests} requests; a pool of {sizes[0]}, {sizes[1]} outside")
    return run_jobs("fairness" if options.fairness else "load", jobs, about, arguments, options.out, console)
