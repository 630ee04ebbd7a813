"""What codecs cost in time, keys and values apart: the encoding figures of docs/codec.md.

Codecs and kinds take turns, so that what else the machine does hits all alike; the fastest turn counts. One core,
2,048 vectors of 128 bf16 numbers.

    python benchmarks/experiments/codec_experiment_speed.py [--turns N]
"""

import os
import time
from collections.abc import Callable
from typing import Annotated, get_args

import numpy as np
import typer
from rich.box import SIMPLE
from rich.progress import track
from rich.table import Table

from manthan.benchmarks.arms import make_console
from manthan.codec import Kind
from manthan.codec.cpu.numpy_codec import NumpyCodec
from manthan.codec.registry import SPECS

VECTORS, HEAD_DIM = 2048, 128
NAMES = ("lloyd3", "k3v3", "k4v2", "k4v3", "lloyd4")


def calls() -> dict[tuple[str, Kind, str], Callable[[], object]]:
    """Encoding and decoding by codec and kind, on the caller's thread."""
    noise = np.random.default_rng(0).standard_normal((VECTORS, HEAD_DIM), np.float32)
    x = (noise.view(np.uint32) >> 16).astype(np.uint16)
    found: dict[tuple[str, Kind, str], Callable[[], object]] = {}
    for name in NAMES:
        codec = NumpyCodec(SPECS[name], HEAD_DIM)
        codec.threads = 1
        for kind in get_args(Kind):
            codes = codec.encode(x, kind)
            found[name, kind, "encode"] = lambda c=codec, k=kind: c.encode(x, k)
            found[name, kind, "decode"] = lambda c=codec, k=kind, codes=codes: c.decode(codes, VECTORS, k, np.uint16)
    return found


def main(turns: Annotated[int, typer.Option(min=1, help="Turns of each codec, kind and operation.")] = 100) -> None:
    """Time encoding and decoding."""
    console = make_console()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    todo = calls()
    best = dict.fromkeys(todo, float("inf"))
    for _ in track(range(turns), "measuring", console=console):
        for key, call in todo.items():
            begin = time.perf_counter()
            call()
            best[key] = min(best[key], time.perf_counter() - begin)
    made = Table(title=f"µs for {VECTORS:,} vectors, the fastest of {turns} turns", box=SIMPLE)
    for column in ("codec", "", "keys", "values", "both", "over lloyd3"):
        made.add_column(column, justify="right")
    for operation in ("encode", "decode"):
        both = {name: sum(best[name, kind, operation] for kind in get_args(Kind)) for name in NAMES}
        for name in NAMES:
            times = (*(best[name, kind, operation] for kind in get_args(Kind)), both[name])
            figures = (f"{1e6 * each:.0f}" for each in times)
            made.add_row(name, operation, *figures, f"{both[name] / both['lloyd3'] - 1:+.0%}")
    console.print(made)


if __name__ == "__main__":
    typer.run(main)
