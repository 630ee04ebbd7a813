"""How fast the codec is here, in M vectors/s and GB/s of bf16: fused with numba, and in plain numpy.

    python benchmarks/codec.py [--json FILE]
    python benchmarks/codec.py --backend cuda [--json FILE]     the CUDA kernels, in G vectors/s; see codec_gpu.py

bf16 in and out, rotation included, results in new memory as a caller gets them. One core: the process is
pinned to one. All cores: as many threads. Each figure is the median of the repeats, with the slowest and the
fastest beside.
"""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from manthan.codec.cpu.numpy_codec import NumpyCodec
from manthan.codec.registry import SPECS


@dataclass(frozen=True)
class Result:
    """One figure. median, slowest, fastest: M vectors/s. gb_s: GB/s of bf16 at the median."""

    operation: str
    implementation: str
    cores: int
    head_dim: int
    n: int
    median: float
    slowest: float
    fastest: float
    gb_s: float


def rates(call: Callable[[], object], n: int, repeats: int, least_s: float = 0.02) -> list[float]:
    """M vectors/s of each repeat; a repeat calls often enough to last least_s."""
    call()
    begin = time.perf_counter()
    call()
    calls = max(1, round(least_s / (time.perf_counter() - begin)))
    found = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        found.append(calls * n / (time.perf_counter() - begin) / 1e6)
    return found


def measure(name: str, fused: bool, cores: int, head_dim: int, n: int, repeats: int) -> Iterator[Result]:
    """Encode and decode n vectors of head_dim numbers."""
    codec = NumpyCodec(SPECS[name], head_dim, fused=fused)
    codec.threads = cores
    noise = np.random.default_rng(0).standard_normal((n, head_dim), np.float32)
    x = (noise.view(np.uint32) >> 16).astype(np.uint16)
    codes = codec.encode(x)
    operations = {
        "encode": lambda: codec.encode(x),
        "decode": lambda: codec.decode(codes, n, dtype=np.uint16),
    }
    for operation, call in operations.items():
        found = rates(call, n, repeats)
        median = statistics.median(found)
        yield Result(
            operation,
            "numba" if fused else "numpy",
            cores,
            head_dim,
            n,
            median,
            min(found),
            max(found),
            median * head_dim * 2 / 1e3,
        )


def machine() -> str:
    """Processor, cores and load, in a line."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    return f"{model}, {os.cpu_count()} cores, load {load:.2f}, numpy {np.__version__}"


def table(results: list[Result], title: str) -> Table:
    """A row for each head_dim, n, cores and operation, the implementations side by side."""
    caption = "M vectors/s: median (slowest-fastest); GB/s of bf16"
    made = Table(title=title, caption=caption, box=SIMPLE, padding=0)
    for column in ("D", "n", "cores", ""):
        made.add_column(column, justify="right")
    implementations = sorted({r.implementation for r in results})
    for implementation in implementations:
        made.add_column(f"{implementation} M/s", justify="right", no_wrap=True)
        made.add_column("GB/s", justify="right", no_wrap=True)
    rows: dict[tuple[int, int, int, str], dict[str, Result]] = {}
    for r in results:
        rows.setdefault((r.head_dim, r.n, r.cores, r.operation), {})[r.implementation] = r
    for key, found in rows.items():
        cells = []
        for r in (found[implementation] for implementation in implementations):
            cells += [f"{r.median:.2f} ({r.slowest:.2f}-{r.fastest:.2f})", f"{r.gb_s:.2f}"]
        made.add_row(*map(str, key[:2]), *map(str, key[2:]), *cells)
    return made


def on_gpu(console: Console, codec: str, repeats: int, json_file: Path | None, once: bool) -> None:
    """The CUDA kernels of one codec, of several with commas between, or of "all"."""
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
    codec: Annotated[
        str, typer.Option(help="Name of the codec; numpy: of single vectors; cuda: or several, or all.")
    ] = "k3v3",
    repeats: Annotated[int, typer.Option(help="Repeats of each measurement.")] = 9,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file too.")] = None,
    backend: Annotated[str, typer.Option(help="numpy or cuda.")] = "numpy",
    once: Annotated[
        bool, typer.Option("--once", help="cuda: run each once, for ncu --profile-from-start off.")
    ] = False,
) -> None:
    """Measure the codec on this machine."""
    console = Console()
    if backend == "cuda":
        on_gpu(console, codec, repeats, json_file, once)
        return
    if codec not in SPECS:
        raise typer.BadParameter(f"--codec {codec} is none of single vectors: {', '.join(SPECS)}, or --backend cuda")
    cpus = os.sched_getaffinity(0)
    implementations = [True, False] if NumpyCodec(SPECS[codec], 128).fused else [False]
    results: list[Result] = []
    begun = machine()
    with console.status("measuring") as status:
        for cores in sorted({1, len(cpus)}):
            # one core comes first and asks for no thread: threads inherit the affinity of who makes them
            os.sched_setaffinity(0, {min(cpus)} if cores == 1 else cpus)
            for head_dim in (64, 128, 256):
                for n in (2048, 65536):
                    for fused in implementations:
                        status.update(f"D = {head_dim}, n = {n}, {cores} cores")
                        results += measure(codec, fused, cores, head_dim, n, repeats)
    console.print(table(results, f"{codec} on {begun}"))
    if json_file is not None:
        json_file.write_text(json.dumps({"machine": begun, "codec": codec, "results": [asdict(r) for r in results]}))


if __name__ == "__main__":
    typer.run(main)
