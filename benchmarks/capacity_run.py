"""Run of the capacity benchmark: servers in turn, sessions that come and return, a report.

An arm is a system to measure, such as plain vLLM. A level is a round: a number of sessions come, then each returns.
Manthan compresses idle sessions' blocks into a store, and decodes them on return. `options`: see capacity.py.
"""

import math
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from manthan.benchmarks.arms import chosen_profile, leave_on_signals, machine, make_console, run_jobs, tell_codec
from manthan.benchmarks.capacity_arms import (
    IN_REDIS,
    PLAIN,
    CapacityArm,
    as_json,
    make_arm,
    read_budgets,
    read_codecs,
    read_kinds,
    shown,
)
from manthan.benchmarks.capacity_report import merged, show
from manthan.benchmarks.endpoint import Endpoint, ServerError
from manthan.benchmarks.local_redis import redis_for_arms
from manthan.benchmarks.progress import Bar
from manthan.benchmarks.restore import KEPT_SHARE, MANTHAN, SPARE_POSITIONS
from manthan.benchmarks.served import SAFE_VOCABULARY, Served, Session, make_session, random_session
from manthan.benchmarks.server import codec_used
from manthan.benchmarks.settle import until_settled
from manthan.manager.session.blocks import LEVELS

CPU_TOKENS, GPU_TOKENS = 2000, 8192
CPU_BUDGETS, GPU_BUDGETS = "64MiB,128MiB,256MiB", "6GiB,12GiB,24GiB"
FULL_SHARE = 0.8
"""If at most this share of a round's sessions is kept, no larger round follows."""
STILL_S = MANTHAN["idle"] + 1.0
"""Seconds without change after which sessions that are still idle will stay idle, because Manthan's store is full."""
PAGE = 500


# -- on one server --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Return:
    """Return of a session. session: its index. kept: True if KEPT_SHARE or more of its full blocks were not computed.

    was_right: True if the first answer was right. is_right: the same for the answer on return. None if not checked.
    """

    session: int
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int
    kept: bool
    was_right: bool | None
    is_right: bool | None


@dataclass(frozen=True)
class Asker:
    """Sends sessions' prompts to a server. make: returns the session of an index. is_ours: True for Manthan's arms."""

    endpoint: Endpoint
    make: Callable[[int], Session]
    block_size: int
    is_ours: bool
    bar: Bar

    def level(self, first: int, count: int) -> dict[str, Any]:
        """Return the results of a round of `count` sessions, from index `first` on.

        The sessions come one by one, each after the server has settled. Then they return, newest first.
        """
        self.bar.begin(f"{count} sessions come and return", 2 * count)
        indices = range(first, first + count)
        failures = self._manthan("failures_total")
        right = self._all_come(indices)
        stored, held = self._manthan("cold_bytes"), self._held()
        returns = [self._return(index, right[index - first]) for index in reversed(indices)]
        return {
            "came": count,
            "kept": sum(found.kept for found in returns),
            "cold_bytes": stored,
            "failures": self._manthan("failures_total") - failures,
            "held": self._moment(held, returns),
            "returns": [asdict(found) for found in returns],
        }

    def twice(self, first: int, count: int) -> list[dict[str, Any]]:
        """Return where KV is when all sessions have come, and again when each has returned once.

        After each moment all return, in the order of their last use, latest first, to find the kept sessions.
        """
        self.bar.begin(f"{count} sessions come and return twice", 3 * count)
        indices = range(first, first + count)
        self._all_come(indices)
        moments = []
        for order in (indices[::-1], indices):
            held = self._held()
            returns = [self._return(index, None) for index in order]
            until_settled(self.endpoint, STILL_S)
            moments.append(self._moment(held, returns))
        return moments

    def _moment(self, held: Sequence[dict[str, Any]], returns: Sequence[Return]) -> dict[str, Any]:
        kept = {f"s{found.session}" for found in returns if found.kept}
        blocks = returns[0].prompt_tokens // self.block_size
        found = where_held(held, kept, blocks, self.block_size)
        at_most = divergence(held, kept)
        return {"came": len(returns), "kept": len(kept), "session_blocks": blocks, "divergence": at_most} | found

    def _held(self) -> list[dict[str, Any]]:
        """Return the sessions of `/manthan/sessions`; none without Manthan."""
        found: list[dict[str, Any]] = []
        while self.is_ours:
            page = self.endpoint.get("/manthan/sessions", sort="id", limit=PAGE, offset=len(found))["sessions"]
            found += page
            if len(page) < PAGE:
                break
        return found

    def _all_come(self, indices: Sequence[int]) -> list[bool | None]:
        right = []
        for index in indices:
            right.append(self._come(index))
            until_settled(self.endpoint, STILL_S)  # ends even if a full store leaves sessions idle
        return right

    def _come(self, index: int) -> bool | None:
        session = self.make(index)
        reply = self._ask(session.first, session, index)
        if not reply.reports_cached:
            raise ServerError(
                f"The server at {self.endpoint.url} does not say how much of a prompt it had cached: start it with "
                "--enable-prompt-tokens-details."
            )
        return session.is_right(reply.text, 0)

    def _return(self, index: int, was_right: bool | None) -> Return:
        session = self.make(index)
        reply = self._ask(session.again, session, index)
        kept = reply.cached_tokens >= KEPT_SHARE * session.full_tokens(self.block_size)
        is_right = session.is_right(reply.text, 1)
        return Return(index, reply.ttft_s, reply.prompt_tokens, reply.cached_tokens, kept, was_right, is_right)

    def _ask(self, prompt: list[int], session: Session, index: int) -> Any:
        named = {"session_id": f"s{index}"} if self.is_ours else {}  # a server without Manthan may not know the field
        reply = self.endpoint.complete(prompt, max_tokens=session.max_tokens, temperature=0, ignore_eos=True, **named)
        self.bar.step()
        return reply

    def _manthan(self, name: str) -> float:
        return self.endpoint.metrics().get(f"vllm:manthan_{name}", 0.0)


def where_held(sessions: Sequence[dict[str, Any]], kept: set[str], full_blocks: int, block_size: int) -> dict[str, int]:
    """Return numbers of blocks by where their KV is. Resident blocks are in vLLM's pool.

    `sessions` has each session's number of resident blocks, and of tokens that its last request found decoded. The pool
    loses a session's tail first. Decoded blocks come after computed ones, so the pool loses decoded blocks first.

    Args:
        sessions: Sessions of `/manthan/sessions`. Each has returned once at most.
        kept: Ids of the sessions kept at their next return.
        full_blocks: Number of full blocks of a session's prompt.

    Returns:
        computed: Resident, computed blocks of kept sessions. both: Those of `computed` that the store has too.
        decoded: Resident, decoded blocks of all sessions. saved: Compressed blocks of all sessions in the store.
    """
    found = Counter(computed=0, both=0, decoded=0, saved=0)
    for session in sessions:
        computed = min(session["hot_blocks"], max(0, full_blocks - session["lossy_tokens"] // block_size))
        found["decoded"] += session["hot_blocks"] - computed
        found["saved"] += session["cold_blocks"]
        if session["id"] in kept:
            found["computed"] += computed
            found["both"] += max(0, computed + session["cold_blocks"] - session["blocks"])
    return dict(found)


def divergence(sessions: Sequence[dict[str, Any]], kept: set[str]) -> float | None:
    """Return the mean KL divergence in nats for kept sessions' blocks outside the pool; None without such blocks.

    Refinements make a block more exact. LEVELS has the divergence by their number. Codecs without refinements give
    None. All blocks of a session count like its coarsest, so the mean is an upper bound.
    """
    told = [
        (LEVELS[session["level"]].divergence, session["blocks"] - session["hot_blocks"])
        for session in sessions
        if session["id"] in kept and session.get("level") is not None
    ]
    blocks = sum(count for _, count in told)
    return sum(nats * count for nats, count in told) / blocks if blocks else None


def measure(
    asker: Asker, first: int, most: int, growth: float, deadline: float, forget: Callable[[], None]
) -> list[dict[str, Any]]:
    """Return the results of rounds: of `first` sessions, then of `growth` times as many as before.

    The last round keeps FULL_SHARE of its sessions or less, has `most` or more, or ends after the deadline. Between
    rounds, `forget` empties the server's caches.
    """
    levels: list[dict[str, Any]] = []
    count, begun = max(1, first), 0
    while True:
        levels.append(asker.level(begun, count))
        if levels[-1]["kept"] <= FULL_SHARE * count or count >= most or time.monotonic() > deadline:
            return levels
        begun += count
        count = min(most, max(count + 1, math.ceil(growth * count)))
        forget()


# -- all arms -------------------------------------------------------------------------------------------


def run(options: Namespace, plot_only: Sequence[Path], arguments: dict[str, Any]) -> None:
    """Do the whole command. Without --plot-only raises Exit: with status 1 after a failure or a stop, else with 0."""
    console = make_console()
    if plot_only:
        return show(merged(plot_only), plot_only[0].with_suffix(".png"), console)
    leave_on_signals()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        if options.base_url:
            jobs: dict[str, Any] = {options.base_url: partial(run_given, options)}
            about: dict[str, Any] = {"model": options.base_url, "tokens": options.tokens or CPU_TOKENS}
        else:
            served = choose(options, Path(folder, "qwen3-8b-shape"))
            about = {"model": served.name, "tokens": tokens_of(options, served)}
            jobs = {shown(arm): partial(run_arm, options, served, arm) for arm in choose_arms(options, served, stack)}
        options.out.mkdir(parents=True, exist_ok=True)
        console.print(f"  {duration(len(jobs), options.timeout)}", soft_wrap=True)
        report = run_jobs("capacity", jobs, about, arguments, options.out, console)
    path = options.out / "capacity.json"
    console.print(f"  {path}", soft_wrap=True)
    show(report, path.with_suffix(".png"), console)
    raise typer.Exit(1 if report["errors"] else 0)


def duration(runs: int, timeout_s: float) -> str:
    """Return a sentence with an estimate of the longest time of `runs` runs, each of an arm with a budget.

    After `timeout_s` a run begins no larger round. It ends the current round, and with Manthan does `Asker.twice`.
    """
    longest = 2 * timeout_s / 60
    return (
        f"Runs: {runs}, an arm and a budget each, of half a minute to about {longest:.0f} minutes "
        f"(--timeout {timeout_s:.0f}): together about {runs * longest:.0f} at most, and twice that on a busy machine. "
        "Ctrl-C shows what is done."
    )


def choose(options: Namespace, made_up_in: Path) -> Served:
    return Served.choose(options.model, options.block_size, made_up_in, bool(machine()["gpu"]))


def tokens_of(options: Namespace, served: Served) -> int:
    return options.tokens or (GPU_TOKENS if served.on_gpu else CPU_TOKENS)


def choose_arms(options: Namespace, served: Served, stack: ExitStack) -> list[CapacityArm]:
    """Return all arms with the first budget, then with the next. Raises BadParameter if an arm cannot run here.

    When the stack ends, it stops a Redis server started here, and removes a made-up profile.
    """
    tokens = tokens_of(options, served)
    if tokens + SPARE_POSITIONS > served.shape.positions:
        raise typer.BadParameter(
            f"--tokens {tokens} is too long for {served.name}: it has {served.shape.positions} positions"
        )
    kinds, codecs = read_kinds(options.arms, served.on_gpu), read_codecs(options.codecs, options.profile)
    budgets = read_budgets(options.budgets or (GPU_BUDGETS if served.on_gpu else CPU_BUDGETS))
    redis = stack.enter_context(redis_for_arms(options.redis_url)) if {*kinds} & {*IN_REDIS} else {}
    profile = chosen_profile(options.profile, served.folder, stack)
    return [
        make_arm(kind, codec, budget, served, tokens, redis, options.flags, profile)
        for budget in budgets
        for kind in kinds
        for codec in (codecs if kind not in (PLAIN, "offload") else [""])
    ]


def run_arm(options: Namespace, served: Served, arm: CapacityArm, console: Console) -> dict[str, Any]:
    """Start the arm's server, measure, and end the server. Return the run for the report."""
    tokens, began = tokens_of(options, served), time.monotonic()
    bf16_sessions = arm.memory.budget // (tokens // served.block_size * served.block_nbytes)
    with arm.server(served, options.out) as server, Bar(console, shown(arm)) as progress:
        progress.begin("the server starts")
        server.wait_until_ready(options.start_timeout)
        start_s = time.monotonic() - began
        make = partial(make_session, served, tokens, options.seed)
        asker = Asker(server, make, served.block_size, arm.manthan is not None, progress)
        deadline = time.monotonic() + options.timeout
        levels = measure(asker, bf16_sessions, options.most, options.growth, deadline, server.reset_prefix_cache)
        held = [levels[-1]["held"]] if arm.manthan else []
        if held:
            server.reset_prefix_cache()
            blocks = held[0]["computed"] + held[0]["saved"] - held[0]["both"]
            held += asker.twice(sum(level["came"] for level in levels), round(blocks / held[0]["session_blocks"]))
    said = ", ".join(f"{level['kept']} of {level['came']}" for level in levels)
    console.print(f"  {shown(arm)}: kept {said}; {time.monotonic() - began:.0f} s", soft_wrap=True)
    tell_codec(server.log, console)
    return as_json(arm) | {
        "codec_used": codec_used(server.log),
        "start_s": round(start_s, 1),
        "block_size": served.block_size,
        "levels": levels,
        "held": held,
    }


def run_given(options: Namespace, console: Console) -> dict[str, Any]:
    """Return the run of a server started by the user. Its memory is unknown, and its caches are never emptied."""
    endpoint, tokens = Endpoint(options.base_url), options.tokens or CPU_TOKENS
    with Bar(console, endpoint.url) as progress:
        make = make_for(endpoint, options, tokens)
        block_size = options.block_size or block_size_of(endpoint)
        asker = Asker(endpoint, make, block_size, False, progress)
        deadline = time.monotonic() + options.timeout
        levels = measure(asker, 1, options.most, options.growth, deadline, lambda: None)
    endpoint.close()
    return {"arm": endpoint.url, "budget": None, "block_size": block_size, "levels": levels}


def make_for(endpoint: Endpoint, options: Namespace, tokens: int) -> Callable[[int], Session]:
    """Return a function from an index to a session: of make_session, or of random ids for an unknown model folder."""
    root = options.model or Path(str(endpoint.about().get("root", "")))
    longest = endpoint.about().get("max_model_len")
    if longest and tokens + SPARE_POSITIONS > longest:
        raise typer.BadParameter(f"--tokens {tokens} is too long for that server: its --max-model-len is {longest}")
    if not (root / "config.json").exists():
        return lambda index: random_session(options.seed, index, tokens, SAFE_VOCABULARY)
    return partial(make_session, Served.choose(root, 1, root, False), tokens, options.seed)


def block_size_of(endpoint: Endpoint) -> int:
    """Return the block size from the server's metrics."""
    for name, labels, _ in endpoint.samples():
        if name == "vllm:cache_config_info":
            return int(labels["block_size"])
    raise endpoint.error(f"The server at {endpoint.url} does not say its block size: name it with --block-size.")
