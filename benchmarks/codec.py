"""Speed of a codec on this machine, in M vectors/s and GB/s of bf16.

A vector is the key or the value of a token in a KV head of a layer.

    python benchmarks/codec.py [--codec wht-5x] [--json FILE]
    python benchmarks/codec.py --backend cuda [--json FILE]     the CUDA kernels, in G vectors/s; see codec_gpu.py

Whole KV blocks of bf16 are encoded and decoded. Their shape is Qwen3-8B's: 36 layers with 8 KV heads of 128. Results
are newly allocated. For one core the process is pinned to a core. For all cores there is a thread for each core, and a
thread has one block at a time. Each figure is the median of the repeats, with the slowest and the fastest.
"""

import json
import os
import platform
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from manthan.codec.block import BlockFormat, BlockShape
from manthan.codec.model import ModelFacts
from manthan.codec.registry import needs_profile

LAYERS, HEADS, HEAD_DIM = 36, 8, 128
BLOCKS = 8
"""Number of times that each repeat encodes or decodes a block."""


@dataclass(frozen=True)
class Result:
    """Speed of an operation on blocks of `tokens` tokens, in M vectors/s. gb_s: GB/s of bf16 at the median."""

    operation: str
    cores: int
    tokens: int
    median: float
    slowest: float
    fastest: float
    gb_s: float


def measure(name: str, cores: int, tokens: int, repeats: int) -> Iterator[Result]:
    """Yield the speeds of encoding and of decoding a block of random numbers BLOCKS times, on `cores` threads.

    A codec that needs a model's profile gets a made-up profile, and random numbers that fit it.
    """
    from manthan.benchmarks import made_up  # needs torch

    rope, profile = made_up.rope_of(HEAD_DIM), None
    shape = BlockShape(LAYERS, HEADS, tokens, HEAD_DIM)
    numbers: Any = np.random.default_rng(0).standard_normal((2, *shape.numbers), np.float32)
    if needs_profile(name):
        profile = made_up.profile(LAYERS, HEADS, HEAD_DIM, rope)
        numbers = np.stack([part.numpy() for part in made_up.kv(profile, tokens, made_up.torch.device("cpu"))])
    form = BlockFormat(name, shape, bytes(16), facts=ModelFacts(rope, profile))
    form.warm_up()
    keys, values = (np.ascontiguousarray(numbers).view(np.uint32) >> 16).astype(np.uint16)
    block = form.encode(keys, values, key=b"k", first_token=0, exact=0)
    operations = {
        "encode": lambda _: form.encode(keys, values, key=b"k", first_token=0, exact=0),
        "decode": lambda _: form.decode(block, key=b"k"),
    }
    vectors = BLOCKS * 2 * LAYERS * HEADS * tokens
    with ThreadPoolExecutor(cores) as pool:
        for operation, call in operations.items():
            found = []
            for _ in range(repeats + 1):
                begin = time.perf_counter()
                list(pool.map(call, range(BLOCKS)))
                found.append(vectors / (time.perf_counter() - begin) / 1e6)
            del found[0]
            median = statistics.median(found)
            yield Result(operation, cores, tokens, median, min(found), max(found), median * HEAD_DIM * 2 / 1e3)


def measure_on_cores(codec: str, sizes: Sequence[int], repeats: int) -> Iterator[Result]:
    """Yield the speeds on one core and on all cores, for blocks of each number of tokens in `sizes`."""
    cpus = os.sched_getaffinity(0)
    try:
        for cores in sorted({1, len(cpus)}):
            # set before `measure` makes threads, which inherit it
            os.sched_setaffinity(0, {min(cpus)} if cores == 1 else cpus)
            for tokens in sizes:
                yield from measure(codec, cores, tokens, repeats)
    finally:
        os.sched_setaffinity(0, cpus)


def machine() -> str:
    """Return processor, cores, load and numpy's version in a line."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    return f"{model}, {os.cpu_count()} cores, load {load:.2f}, numpy {np.__version__}"


def table(results: list[Result], title: str) -> Table:
    """Return a table with a row for each result."""
    made = Table(title=title, caption="median (slowest-fastest); GB/s of bf16", box=SIMPLE, padding=0)
    for column in ("tokens", "cores", "", "M vectors/s", "GB/s"):
        made.add_column(column, justify="right", no_wrap=True)
    for r in results:
        rate = f"{r.median:.2f} ({r.slowest:.2f}-{r.fastest:.2f})"
        made.add_row(str(r.tokens), str(r.cores), r.operation, rate, f"{r.gb_s:.2f}")
    return made


def on_gpu(console: Console, codec: str, repeats: int, json_file: Path | None, once: bool) -> None:
    """Measure the CUDA kernels of one codec, of several with commas between, or of "all". once: for a profiler."""
    import torch

    from manthan.benchmarks import codec_gpu

    where = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    names = codec.split(",")
    several = [work for work in codec_gpu.Work.all() if codec == "all" or work.codec in names]
    works = several if codec == "all" or len(names) > 1 else codec_gpu.Work.of(codec)
    results: list[codec_gpu.GpuResult] = []
    with console.status("measuring") as status:
        meter = codec_gpu.Meter(repeats, once=once)
        for work in works:
            status.update(f"{work.codec}, {work.shape}, {work.vectors:,} vectors")
            results += codec_gpu.measure(work, meter)
    if once:
        return
    console.print(codec_gpu.table(results, f"{where}, copy {meter.copy / 1e12:.2f} TB/s"))
    if json_file is not None:
        figures = {
            "machine": where,
            "codec": codec,
            "copy_bytes_s": meter.copy,
            "results": [asdict(r) for r in results],
        }
        json_file.write_text(json.dumps(figures))


def main(
    codec: Annotated[str, typer.Option(help="Name of the codec; for cuda also several, or all.")] = ("wht-5x"),
    repeats: Annotated[int, typer.Option(help="Repeats of each measurement.")] = 9,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file too.")] = None,
    backend: Annotated[str, typer.Option(help="numpy or cuda.")] = "numpy",
    once: Annotated[
        bool, typer.Option("--once", help="For cuda: run each operation once, for ncu --profile-from-start off.")
    ] = False,
) -> None:
    """Measure the codec on this machine."""
    console = Console()
    if backend == "cuda":
        on_gpu(console, codec, repeats, json_file, once)
        return
    begun = machine()
    with console.status("measuring"):
        results = list(measure_on_cores(codec, (16, 128), repeats))
    console.print(table(results, f"{codec} on {begun}"))
    if json_file is not None:
        json_file.write_text(json.dumps({"machine": begun, "codec": codec, "results": [asdict(r) for r in results]}))


if __name__ == "__main__":
    typer.run(main)
