"""The concurrency benchmark's run: one server after the other, users at a time, a report."""

import contextlib
import math
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import typer
import yaml
from rich.console import Console

from manthan.benchmarks.arms import (
    leave_on_signals,
    machine,
    make_console,
    new_report,
    read_report,
    tell_codec,
    write_report,
)
from manthan.benchmarks.concurrency_report import show
from manthan.benchmarks.endpoint import Endpoint, ServerError
from manthan.benchmarks.engines import random_tokens
from manthan.benchmarks.progress import Bar
from manthan.benchmarks.served import SAFE_VOCABULARY, Served
from manthan.benchmarks.server import VllmServer
from manthan.benchmarks.settle import until_settled

SPARE_TOKENS = 64
POOL_SPARE = 1.25
"""The pool holds all users' requests at a time, and some of what has just finished."""
STORE_SHARE = 0.5
"""Bytes of the cold store over those of the pool."""


@dataclass(frozen=True)
class ConcurrencyOptions:
    """What the command was asked for; see concurrency.py."""

    users: Sequence[int]
    tokens: int
    prompt: int
    requests: int
    repeats: int
    idle_after: float
    model: Path | None
    block_size: int
    base_url: str
    flags: Sequence[str]
    seed: int
    start_timeout: float
    out: Path


@dataclass(frozen=True)
class User:
    """What one user got. errors: requests that were not answered."""

    tokens: int
    seconds: float
    errors: int


@dataclass(frozen=True)
class Asker:
    """One server, and the prompts that it is sent. is_ours: Manthan is on."""

    endpoint: Endpoint
    options: ConcurrencyOptions
    vocabulary: int
    is_ours: bool = False

    def turn(self, users: int, repeat: int) -> dict[str, Any]:
        """So many users at a time, until each has all its answers."""
        before = self._evictions()
        start = threading.Barrier(users + 1)
        with ThreadPoolExecutor(users) as pool:
            jobs = [pool.submit(self._user, start, [users, repeat, user]) for user in range(users)]
            start.wait()
            began = time.perf_counter()
            found = [job.result() for job in jobs]
            wall_s = time.perf_counter() - began
        evictions = self._evictions() - before
        if self.is_ours:
            until_settled(self.endpoint, all_cold=False)
        return {
            "wall_s": wall_s,
            "tokens": sum(user.tokens for user in found),
            "errors": sum(user.errors for user in found),
            "user_rates": [user.tokens / user.seconds for user in found],
            "evictions": evictions,
        }

    def _user(self, start: threading.Barrier, names: list[int]) -> User:
        options = self.options
        seed = int.from_bytes(bytes(f"{options.seed} {names}", "ascii"))
        prompts = [random_tokens(seed, index, options.prompt, self.vocabulary) for index in range(options.requests)]
        start.wait()
        began, tokens, errors = time.perf_counter(), 0, 0
        for index, prompt in enumerate(prompts):
            named = {"session_id": f"u{names}-{index}"} if self.is_ours else {}
            try:
                reply = self.endpoint.complete(
                    prompt, max_tokens=options.tokens, temperature=0, ignore_eos=True, **named
                )
                tokens += reply.generated_tokens
            except ServerError:
                errors += 1
        return User(tokens, time.perf_counter() - began, errors)

    def _evictions(self) -> float:
        return self.endpoint.metrics().get("vllm:manthan_evictions_total", 0.0) if self.is_ours else 0.0


Arm = Callable[[], contextlib.AbstractContextManager[Asker]]
"""Starts a server, and ends it when it is left."""


def measure(arms: Mapping[str, Arm], options: ConcurrencyOptions, progress: Bar) -> list[dict[str, Any]]:
    """All levels on one server, then on the next; a first turn of each warms up and does not count."""
    levels = [{"users": users, "turns": {name: [] for name in arms}} for users in options.users]
    for repeat in range(options.repeats):
        for name in list(arms) if repeat % 2 == 0 else reversed(list(arms)):
            progress.begin("the server starts" if not options.base_url else "warm-up")
            with arms[name]() as asker:
                asker.turn(min(2, max(options.users)), -1)
                progress.begin(f"repeat {repeat + 1}, {name}", len(levels))
                for level in levels:
                    level["turns"][name].append(asker.turn(level["users"], repeat))
                    progress.step()
    return levels


# -- the servers ----------------------------------------------------------------------------------------


def run(options: ConcurrencyOptions, plot_only: Path | None, arguments: dict[str, Any]) -> None:
    """The whole command; exits with 1 if a server failed."""
    console = make_console()
    if plot_only is not None:
        return show(read_report(plot_only, "concurrency"), plot_only.with_suffix(".png"), console)
    leave_on_signals()
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        about, levels = run_levels(options, console)
    except ServerError as error:
        console.print(error.log_tail, markup=False, soft_wrap=True)
        console.print(f"  {error} (log: {error.log})", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    report = new_report("concurrency", arguments, [], {}, {}) | about | {"levels": levels}
    path = write_report(report, options.out)
    console.print(f"  {path}", soft_wrap=True)
    if not options.base_url:
        tell_codec(log_of(options, "Manthan"), console)
    show(report, path.with_suffix(".png"), console)


def run_levels(options: ConcurrencyOptions, console: Console) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    with tempfile.TemporaryDirectory() as folder, Bar(console, "concurrency") as progress:
        if options.base_url:
            with contextlib.closing(Endpoint(options.base_url)) as endpoint:
                asker = Asker(endpoint, options, SAFE_VOCABULARY)
                arms: dict[str, Arm] = {endpoint.url: partial(contextlib.nullcontext, asker)}
                return {"model": endpoint.model}, measure(arms, options, progress)
        served = Served.choose(
            options.model, options.block_size, Path(folder, "qwen3-8b-shape"), bool(machine()["gpu"])
        )
        arms = {name: partial(start, served, options, name) for name in ("plain", "Manthan")}
        return {"model": served.name}, measure(arms, options, progress)


@contextlib.contextmanager
def start(served: Served, options: ConcurrencyOptions, name: str) -> Iterator[Asker]:
    """Plain vLLM or Manthan; both have the same pool."""
    longest = options.prompt + options.tokens + SPARE_TOKENS
    users = max(options.users)
    blocks = math.ceil(POOL_SPARE * users) * math.ceil(longest / served.block_size)
    flags = [*served.flags(blocks, longest, eager=False), "--max-num-seqs", str(users), *options.flags]
    is_ours = name == "Manthan"
    if is_ours:
        config = options.out / "concurrency.yaml"
        config.write_text(yaml.safe_dump(manthan(options, math.ceil(STORE_SHARE * blocks * served.block_nbytes))))
        flags += ["--manthan-config", str(config)]
    with VllmServer(str(served.folder), flags, log_of(options, name)) as server:
        server.wait_until_ready(options.start_timeout)
        yield Asker(server, options, served.shape.vocabulary, is_ours)


def log_of(options: ConcurrencyOptions, name: str) -> Path:
    return options.out / f"concurrency-{name.lower()}.log"


def manthan(options: ConcurrencyOptions, store_nbytes: int) -> dict[str, Any]:
    return {
        "policy": "lru",
        "idle_after_s": options.idle_after,
        "sweep_interval_s": min(0.2, options.idle_after / 2),
        "cold_store": {"kind": "host", "max_bytes": store_nbytes},
    }
