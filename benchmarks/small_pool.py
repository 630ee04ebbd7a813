"""Show if requests wait for the compression of KV blocks: chats return to a small pool, while compression is slow.

Two servers run, plain vLLM and vLLM with Manthan, and are asked in turn. By default, each server's KV pool holds 4 of
16 new chats. In each round every chat sends a request, 4 at a time. Compressing a KV block takes 50 ms longer than
usual. The report compares the times to first token of both servers.

    python benchmarks/small_pool.py [--out FOLDER]
"""

import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from manthan.benchmarks.arms import OUT, leave_on_signals, make_console, new_report, where, write_report
from manthan.benchmarks.server import VllmServer, codec_used

MODEL = Path(__file__).parents[1] / "tests" / "data" / "tiny-llama"
BLOCK, TOKENS = 32, 512
SAID = 4
"""Tokens of an answer, and of the question that follows the answer."""
PLAIN, MANTHAN = "plain", "manthan"
SLOW_ENCODER = """
import sys, time
from importlib.machinery import PathFinder

NAME = "manthan.codec.block"


class Finder:
    @staticmethod
    def find_spec(name, path, target=None):
        if name != NAME:
            return None
        spec = PathFinder.find_spec(name, path)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            encode = module.BlockFormat.encode

            def later(*args, **options):
                time.sleep(SECONDS)
                return encode(*args, **options)

            module.BlockFormat.encode = later

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder)
"""
"""Content of sitecustomize.py, which Python runs at start. It delays the compression of each KV block by SECONDS."""


class Side:
    """A server and its chats."""

    def __init__(self, server: VllmServer, chats: int, at_once: int) -> None:
        self.server, self._at_once = server, at_once
        self._rng = random.Random(0)
        self._chats = [[self._rng.randrange(3, 250) for _ in range(TOKENS)] for _ in range(chats)]
        self.seconds: list[float] = []

    def turn(self, chat: int) -> float:
        tokens = self._chats[chat]
        reply = self.server.complete(
            list(tokens),
            max_tokens=SAID,
            temperature=0,
            ignore_eos=True,
            return_token_ids=True,
            session_id=f"chat-{chat}",
        )
        tokens += [*reply.token_ids, *(self._rng.randrange(3, 250) for _ in range(SAID))]
        return reply.ttft_s

    def round(self) -> list[float]:
        """Send the next request of every chat. Return the times to first token in seconds."""
        with ThreadPoolExecutor(self._at_once) as threads:
            return list(threads.map(self.turn, range(len(self._chats))))


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def measure(servers: dict[str, VllmServer], chats: int, at_once: int, rounds: int, pause_s: float) -> dict[str, Any]:
    """Return each server's times to first token in milliseconds, by round without the first two, and its metrics.

    The servers take turns in being asked first.
    """
    sides = {name: Side(server, chats, at_once) for name, server in servers.items()}
    found: dict[str, list[list[float]]] = {name: [] for name in sides}
    for number in range(rounds + 2):
        for name in sorted(sides, reverse=bool(number % 2)):
            times = [seconds * 1e3 for seconds in sides[name].round()]
            if number > 1:  # in the first two rounds chats begin, and late compilations end
                found[name].append(times)
        time.sleep(pause_s)
    return {name: {"ttft_ms": times, "metrics": metrics(servers[name])} for name, times in found.items()}


def metrics(server: VllmServer) -> dict[str, float]:
    wanted = ("manthan_encoded", "manthan_restored_blocks", "manthan_overwritten", "num_preemptions", "manthan_evict")
    return {
        name: value
        for name, value in server.metrics().items()
        if any(part in name for part in wanted) and "created" not in name and "bucket" not in name
    }


def show(report: dict[str, Any]) -> Table:
    """Return a table of times to first token: percentiles of all, quartiles of the rounds' medians, and ratios."""
    table = Table(caption=f"time to first token of returns, ms; machine load {report['machine']['load']}")
    for column in ("", "p50", "quartiles of rounds' p50", "p99", "returns"):
        table.add_column(column, justify="left" if not column else "right")
    arms = report["arms"]
    for name in (PLAIN, MANTHAN):
        rounds = arms[name]["ttft_ms"]
        flat = [value for times in rounds for value in times]
        low, _, high = statistics.quantiles([statistics.median(times) for times in rounds], n=4)
        cells = f"{statistics.median(flat):.1f}", f"{low:.1f} to {high:.1f}", f"{percentile(flat, 0.99):.1f}"
        table.add_row(name, *cells, str(len(flat)))
    plain, ours = ([value for times in arms[name]["ttft_ms"] for value in times] for name in (PLAIN, MANTHAN))
    pairs = zip(arms[PLAIN]["ttft_ms"], arms[MANTHAN]["ttft_ms"], strict=True)
    low, middle, high = statistics.quantiles([statistics.median(b) / statistics.median(a) for a, b in pairs], n=4)
    table.add_row(
        "manthan / plain",
        f"{statistics.median(ours) / statistics.median(plain):.2f}",
        f"{low:.2f} to {high:.2f} ({middle:.2f})",
        f"{percentile(ours, 0.99) / percentile(plain, 0.99):.2f}",
        "",
    )
    return table


def main(
    out: Annotated[Path, typer.Option(help="Folder for the report and logs.")] = OUT,
    chats: Annotated[int, typer.Option(help="Number of chats.")] = 16,
    pool: Annotated[float, typer.Option(help="Number of new chats that the KV pool holds.")] = 4,
    at_once: Annotated[int, typer.Option(help="Requests at a time.")] = 4,
    rounds: Annotated[int, typer.Option(help="Rounds that count, after two that do not.")] = 20,
    encode_ms: Annotated[float, typer.Option(help="Additional ms to compress a KV block.")] = 50,
    pause_s: Annotated[float, typer.Option(help="Seconds between two rounds.")] = 0.0,
    idle_after_s: Annotated[float, typer.Option(help="Value of idle.after_s in Manthan's configuration.")] = 300,
) -> None:
    leave_on_signals()
    console = make_console()
    out.mkdir(parents=True, exist_ok=True)
    arguments = dict(locals())
    for name in ("console",):
        arguments.pop(name)
    blocks = round(pool * (-(-(TOKENS + SAID) // BLOCK) + 1))
    flags = ["--block-size", str(BLOCK), "--enforce-eager", "--num-gpu-blocks-override", str(blocks)]
    flags += ["--max-model-len", "1024"]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        (Path(folder) / "sitecustomize.py").write_text(SLOW_ENCODER.replace("SECONDS", str(encode_ms / 1e3)))
        paths = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
        config = Path(folder) / "manthan.yaml"
        config.write_text(f"policy: lru\nidle: {idle_after_s}\n")
        more = {PLAIN: [], MANTHAN: ["--manthan-config", str(config)]}
        servers = {
            name: stack.enter_context(
                VllmServer(str(MODEL), [*flags, *its], log=out / f"small_pool_{name}.log", env={"PYTHONPATH": paths})
            )
            for name, its in more.items()
        }
        for server in servers.values():
            server.wait_until_ready(300)
        results = measure(servers, chats, at_once, rounds, pause_s)
    results[MANTHAN]["codec_used"] = codec_used(out / f"small_pool_{MANTHAN}.log")
    report = new_report("small_pool", arguments, [], results, {})
    write_report(report, out)
    console.print(where(report), soft_wrap=True)
    console.print(show(report))
    console.print(f"  {results[MANTHAN]['codec_used']}", soft_wrap=True)
    for name, found in results[MANTHAN]["metrics"].items():
        console.print(f"  {name} {found:g}")


if __name__ == "__main__":
    typer.run(main)
