"""What a cold store in Redis costs: MB/s beside redis-py itself, and how soon a session returns from it.

One redis-server for all. Speed: blocks of 200 KB through RedisStore, and through redis-py pipelined by hand, in
turn. Return latency: time to the first token of a session that comes back, recomputed, and from stores of kind
host (this engine's RAM), redis, and tiered (Redis with RAM in front that holds all of it). Each is an engine of its
own with the small trained model of the tests; where each token came from is checked, and so are the answers.

    python benchmarks/redis_store.py [--out FOLDER] [--only speed|latency] [--url redis://HOST:PORT/DB]
    python benchmarks/redis_store.py --plot-only FOLDER/redis_store.json
"""

import asyncio
import itertools
import json
import math
import random
import secrets
import time
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from manthan.benchmarks.arms import OUT, Arm, leave_on_signals, make_console, new_report, run_arms, write_report
from manthan.benchmarks.engines import POLL_S, Answer, Engine, EngineOptions, Report, serve
from manthan.benchmarks.local_redis import redis_at
from manthan.benchmarks.redis_report import LATENCY, RECOMPUTE, show
from manthan.benchmarks.redis_speed import Sizes, measure_speed
from manthan.benchmarks.restore import LEAST_RATIO, MANTHAN, POOL_SESSIONS, SESSIONS, SPARE_POSITIONS, check
from manthan.benchmarks.shapes import Shape
from manthan.manager.config.model import RedisConfig
from manthan.manager.stores.redis.client import connect

MODEL = Path("tests", "data", "tiny-llama")
"""Of this repository: scripts are run from its root."""
BLOCK_TOKENS = 32
ENTRIES = 16
DIGITS = 4
QUESTION_TOKENS = 16


class Only(StrEnum):
    """The two measurements."""

    speed = "speed"
    latency = "latency"


# -- in the measuring process ---------------------------------------------------------------------------


class Table:
    """Lines `name = 4821`, over and over until there are about so many tokens, and questions for one of them.

    All questions have the same full blocks before them.
    """

    def __init__(self, model: str, tokens: int, seed: str) -> None:
        from tokenizers import Tokenizer

        rng = random.Random(seed)
        self._tokenizer = Tokenizer.from_file(str(Path(model, "tokenizer.json")))
        names = [a + b + c for a in "bcdfghjklmnprstvz" for b in "aeiou" for c in "bcdfghjklmnprstvz"]
        self._values = {name: str(rng.randrange(1000, 10000)) for name in rng.sample(names, ENTRIES)}
        self.lines = self._entries(tokens - len(self._ids("")))

    def question(self, number: int) -> tuple[list[int], str]:
        """A prompt, and the right answer to it."""
        line, right = self.lookup(number)
        return self._ids(self.lines + line), right

    def later(self, number: int, tokens: int) -> tuple[list[int], str]:
        """What a later turn adds to a conversation, about so many tokens: lines again and a question; the answer."""
        line, right = self.lookup(number)
        return self._ids("\n" + self._entries(tokens) + line)[len(self._ids("")) :], right

    def _entries(self, tokens: int) -> str:
        """Lines, from the first on and over again, that leave room for a question."""
        lines, count, begin = "", 0, len(self._ids(""))
        for name, value in itertools.cycle(self._values.items()):  # a line is as many tokens alone as among others
            if count >= tokens - QUESTION_TOKENS:
                break
            line = f"{name} = {value}\n"
            lines += line
            count += len(self._ids(line)) - begin
        return lines

    def lookup(self, number: int) -> tuple[str, str]:
        """What comes after the lines of the table, and what it is to be answered with."""
        name = list(self._values)[number % ENTRIES]
        return f"assert {name} == ", self._values[name]

    def text(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens))

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)


async def measure_latency(
    engine: Engine, report: Report, *, arm: str, returns: int, tokens: int, seed: int
) -> dict[str, Any]:
    """SESSIONS sessions are asked in turn on a pool with room for one: one return that is not counted, then
    `returns` that are."""
    ours = arm != RECOMPUTE
    tables = [Table(engine.options.model, tokens, f"{seed}-{index}") for index in range(SESSIONS)]
    for index, table in enumerate(tables):
        report.step(f"first turn of session {index + 1} of {SESSIONS}")
        await _ask(engine, table, index, 0)
        if ours:
            await engine.until_cold(index + 1)
    found = []
    for number in range(returns + 1):
        report.step(f"return {number} of {returns}")
        index = number % SESSIONS
        answer, is_right = await _ask(engine, tables[index], index, 1 + number // SESSIONS)
        check(answer, BLOCK_TOKENS, cached=ours, external=ours, what=f"return {number}")
        found.append(asdict(answer) | {"right": is_right})
        if ours:
            await engine.until_cold(SESSIONS)
    return {"returns": found}


async def _ask(engine: Engine, table: Table, index: int, number: int) -> tuple[Answer, bool]:
    """A question in a session: when its first token came, and whether the whole answer is right."""
    prompt, right = table.question(number)
    external = engine.metrics("external_prefix_cache_hits_total")
    began = time.perf_counter()
    ttft_s, cached, tokens = 0.0, 0, []
    async for output in engine.generate(prompt, DIGITS, f"s{index}"):
        if not tokens:
            ttft_s, cached = time.perf_counter() - began, output.num_cached_tokens or 0
        tokens += output.outputs[0].token_ids
    await asyncio.sleep(POLL_S)  # the step's metrics come with its outputs
    external = engine.metrics("external_prefix_cache_hits_total") - external
    return Answer(ttft_s, len(prompt), cached, round(external)), table.text(tokens) == right


# -- the arms -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """What all arms have in common. prefix: of all names in Redis."""

    url: str
    prefix: str
    tokens: int
    returns: int
    seed: int


def latency_arm(name: str, setting: Setting) -> Arm:
    """Stores have room for all sessions and one more. Each arm has names of its own in Redis."""
    longest = setting.tokens + SPARE_POSITIONS
    nbytes = math.ceil((SESSIONS + 1) * setting.tokens * Shape.of(MODEL).token_nbytes / LEAST_RATIO)
    engine = EngineOptions(
        model=str(MODEL),
        block_size=BLOCK_TOKENS,
        blocks=max(math.ceil(POOL_SESSIONS * longest / BLOCK_TOKENS), math.ceil(longest / BLOCK_TOKENS) + 2),
        max_model_len=longest,
        eager=True,
        made_up_weights=False,
        manthan=None if name == RECOMPUTE else MANTHAN | _stores(name, nbytes, setting),
    )
    parameters = {"arm": name, "returns": setting.returns, "tokens": setting.tokens, "seed": setting.seed}
    return Arm(f"latency {name}", "latency", engine, parameters)


def _stores(kind: str, nbytes: int, setting: Setting) -> dict[str, Any]:
    store: dict[str, Any] = {"kind": kind, "max_bytes": nbytes}
    if kind == "host":
        return {"cold_store": store}
    if kind == "tiered":
        store["host_bytes"] = nbytes
    return {"cold_store": store, "redis": {"url": setting.url, "prefix": f"{setting.prefix}{kind}:"}}


# -- the run --------------------------------------------------------------------------------------------


def run_speed(url: str, prefix: str, sizes: Sizes, console: Console) -> dict[str, Any]:
    with console.status("speed") as status:
        found = measure_speed(
            RedisConfig(url=url, prefix=f"{prefix}speed:"), sizes, lambda step: status.update(f"speed: {step}")
        )
    console.print("  speed: done")
    return found


def remove(url: str, prefix: str) -> None:
    """Whatever this run has left there."""
    client = connect(RedisConfig(url=url))
    for name in client.scan_iter(f"{prefix}*", count=1000):
        client.unlink(name)
    client.close()


def main(
    context: typer.Context,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks that a round puts and gets, for the speed.")] = 256,
    block_bytes: Annotated[int, typer.Option(min=1, help="Bytes of a block, for the speed.")] = 200_000,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that are counted, for the speed; best even.")] = 24,
    tokens: Annotated[int, typer.Option(min=512, help="Prompt tokens of a session, for the latency.")] = 2000,
    returns: Annotated[int, typer.Option(min=1, help="Returns that are counted, in each arm.")] = 24,
    only: Annotated[Only | None, typer.Option(help="One of the two measurements.")] = None,
    url: Annotated[str, typer.Option(help="A running server, as redis.url has it; else one is started.")] = "",
    seed: Annotated[int, typer.Option(help="Of blocks and sessions.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds that an arm may take.")] = 300,
    out: Annotated[Path, typer.Option(help="Folder for JSON, plot and logs.")] = OUT,
    plot_only: Annotated[Path | None, typer.Option(help="Show and plot this JSON of an earlier run again.")] = None,
    job: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure what a cold store in Redis costs."""
    if job is not None:
        return serve(job, {"latency": measure_latency})
    console = make_console()
    if plot_only is not None:
        return show(json.loads(plot_only.read_text()), plot_only.with_suffix(".png"), console)
    leave_on_signals()
    out.mkdir(parents=True, exist_ok=True)
    prefix = f"manthan-bench-{secrets.token_hex(4)}:"
    with redis_at(url, "--url") as server:
        setting = Setting(server, prefix, tokens, returns, seed)
        selected = [] if only is Only.speed else [latency_arm(name, setting) for name in LATENCY]
        try:
            sizes = Sizes(blocks, block_bytes, rounds, seed)
            speed = {} if only is Only.latency else run_speed(server, prefix, sizes, console)
            found, errors = run_arms(Path(__file__), selected, out, console, timeout)
        finally:
            remove(server, prefix)
    report = new_report("redis_store", context.params, selected, found, errors) | {"speed": speed}
    path = write_report(report, out)
    console.print(f"  {path}", soft_wrap=True)
    show(report, path.with_suffix(".png"), console)
    raise typer.Exit(1 if errors else 0)


if __name__ == "__main__":
    typer.run(main)
