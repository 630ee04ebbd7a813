"""The soak's run: one server, rounds of requests, a look at what is left, a report."""

import math
import os
import random
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
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
from manthan.benchmarks.endpoint import Endpoint, ServerError
from manthan.benchmarks.progress import Bar
from manthan.benchmarks.served import Served
from manthan.benchmarks.server import CHAT_TEMPLATE, VllmServer
from manthan.benchmarks.settle import until_settled
from manthan.benchmarks.soak_memory import MemorySampler, slope
from manthan.benchmarks.soak_report import failed, show
from manthan.benchmarks.soak_requests import (
    CHATS,
    LEGS,
    LONGEST,
    MIX,
    TOOL_CALL,
    TOOLS,
    Chat,
    Job,
    Kind,
    Outcome,
    Sender,
)
from manthan.benchmarks.tables import MODEL

POOL_TOKENS = 5120
COLD_TOKENS = 16384
"""A round makes about 40,000 tokens of sessions."""
CODE_SHARE = 0.2
SPARE_TOKENS = 128
MANTHAN = {"policy": "lru", "idle_after_s": 1, "sweep_interval_s": 0.2, "min_tokens": 256}
ERRORS_KEPT = 20
STEADY_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(128 * 1024), "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16"}
"""For vLLM's CPU build, unless the caller's environment says otherwise. It makes a oneDNN primitive for each new number
of tokens and keeps 1,024 of them, in between large buffers that glibc then cannot give back: memory grows for hours,
also without Manthan, and a leak could not be told from it. See docs/troubleshooting.md."""


@dataclass(frozen=True)
class SoakOptions:
    """What the command was asked for; see soak.py."""

    minutes: float
    scale: float
    users: int
    warm_up: float
    with_manthan: bool
    model: Path | None
    block_size: int
    flags: Sequence[str]
    seed: int
    start_timeout: float
    out: Path


@dataclass
class Tally:
    """What came of all requests so far, by kind."""

    counts: dict[Kind, Counter[str]] = field(default_factory=lambda: {kind: Counter() for kind in Kind})
    errors: list[str] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        count = self.counts[outcome.kind]
        count.update(requests=1, tokens=outcome.tokens, prompt=outcome.prompt_tokens, cached=outcome.cached_tokens)
        if outcome.error:
            count["errors"] += 1
            self.errors = [*self.errors, f"{outcome.kind}: {outcome.error}"][:ERRORS_KEPT]
        elif outcome.right is not None:
            count.update(checked=1, wrong=not outcome.right, misled=outcome.misled)


def one_round(sender: Sender, rng: random.Random, chats: list[Chat], users: int, tally: Tally, progress: Bar) -> None:
    """All legs; after each, nobody asks until every session is cold."""
    for leg in range(LEGS):
        with ThreadPoolExecutor(users) as pool:
            for outcome in pool.map(_attempt, sender.leg(rng, leg, chats)):
                tally.add(outcome)
                progress.step()
        until_settled(sender.endpoint, all_cold=True)


def _attempt(job: Job) -> Outcome:
    try:
        return job.send()
    except ServerError as error:
        return Outcome(job.kind, error=str(error))


def soak(server: VllmServer, sender: Sender, options: SoakOptions, progress: Bar) -> dict[str, Any]:
    """Rounds for as long as wanted; then what is left when all is quiet."""
    assert server.pid is not None
    rng, tally, rounds = random.Random(options.seed), Tally(), 0
    chats = [sender.new_chat(rng) for _ in range(CHATS)]
    deadline, began = time.monotonic() + 60 * options.minutes, time.monotonic()
    with MemorySampler(server.pid) as memory:
        while rounds == 0 or time.monotonic() < deadline:
            rounds += 1
            progress.begin(f"round {rounds}", sum(sum(mix.per_leg) for mix in MIX.values()))
            one_round(sender, rng, chats, options.users, tally, progress)
        seconds = time.monotonic() - began
    return {
        "rounds": rounds,
        "seconds": seconds,
        "kinds": {str(kind): dict(count) for kind, count in tally.counts.items()},
        "messages": tally.errors,
        "left": left(server),
        "manthan": {name: value for name, value in server.metrics().items() if _is_told(name)},
        "memory": [list(sample) for sample in memory.samples],
        "slope": slope(memory.samples, options.warm_up),
    }


def left(endpoint: Endpoint) -> dict[str, float]:
    """What is still held now that all is quiet: share of the pool in use, sessions that are not cold, bytes."""
    samples = endpoint.samples()
    metrics = endpoint.metrics()
    warm = (value for name, has, value in samples if name == "vllm:manthan_sessions" and has["state"] != "cold")
    return {
        "pool_in_use": metrics["vllm:kv_cache_usage_perc"],
        "sessions_not_cold": sum(warm),
        "cold_bytes": metrics.get("vllm:manthan_cold_bytes", 0.0),
        "cold_budget_bytes": metrics.get("vllm:manthan_cold_budget_bytes", 0.0),
    }


def _is_told(name: str) -> bool:
    return name.startswith("vllm:manthan_") and not name.endswith(("_bucket", "_created"))


# -- the server -----------------------------------------------------------------------------------------


def run(options: SoakOptions, plot_only: Path | None, arguments: dict[str, Any]) -> None:
    """The whole command; exits with 1 if the server or a request failed, an answer was wrong or something was left."""
    console = make_console()
    if plot_only is not None:
        return show(read_report(plot_only, "soak"), plot_only.with_suffix(".png"), console)
    leave_on_signals()
    served = choose(options)
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        found = run_server(served, options, console)
    except ServerError as error:
        console.print(error.log_tail, markup=False, soft_wrap=True)
        console.print(f"  {error} (log: {error.log})", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    report = new_report("soak", arguments, [], {}, {}) | {"model": served.name} | found
    path = write_report(report, options.out)
    console.print(f"  {path}", soft_wrap=True)
    tell_codec(options.out / "soak.log", console)
    show(report, path.with_suffix(".png"), console)
    raise typer.Exit(1 if failed(report) else 0)


def choose(options: SoakOptions) -> Served:
    """The tests' model unless another is named; raises BadParameter for one that cannot chat."""
    on_gpu = bool(machine()["gpu"])
    model = options.model or (MODEL if MODEL.exists() else None)
    served = Served.choose(model, options.block_size, Path(), on_gpu=on_gpu and model is not None)
    if served.made_up or not (served.folder / "tokenizer.json").exists():
        raise typer.BadParameter(f"--model {served.folder} has no weights or no tokenizer.json: name one that can chat")
    return served


def run_server(served: Served, options: SoakOptions, console: Console) -> dict[str, Any]:
    blocks = POOL_TOKENS // served.block_size
    flags = [*served.flags(blocks, LONGEST + SPARE_TOKENS), *options.flags]
    if served.folder == MODEL:
        flags += ["--chat-template", CHAT_TEMPLATE]
    if options.with_manthan:
        store = math.ceil(CODE_SHARE * COLD_TOKENS * served.shape.token_nbytes)
        config = options.out / "soak.yaml"
        config.write_text(yaml.safe_dump(MANTHAN | {"cold_store": {"kind": "host", "max_bytes": store}}))
        flags += ["--manthan-config", str(config)]
    steady = {name: value for name, value in STEADY_MEMORY.items() if name not in os.environ}
    server = VllmServer(str(served.folder), flags, options.out / "soak.log", steady)
    with server, Bar(console, "soak") as progress:
        progress.begin("the server starts")
        server.wait_until_ready(options.start_timeout)
        tools = speaks_tools(server)
        sender = Sender(server, str(served.folder), options.scale, options.with_manthan, tools)
        return soak(server, sender, options, progress) | {"tools": "messages" if tools else "text"}


def speaks_tools(endpoint: Endpoint) -> bool:
    """Whether the chat template takes a tool's message."""
    messages = [*TOOL_CALL, {"role": "tool", "tool_call_id": "call-1", "content": "1"}]
    try:
        endpoint.post("/v1/chat/completions", messages=messages, max_tokens=1, tools=TOOLS, tool_choice="none")
    except ServerError:
        return False
    return True
