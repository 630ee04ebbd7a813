"""GB/s of several ways to write and read the same blocks, by turns: what such benchmarks have in common."""

import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import typer
from numpy.typing import NDArray
from pydantic import ByteSize, TypeAdapter
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from manthan.benchmarks.arms import new_report, write_report

Block = NDArray[np.uint8]
Rates = dict[str, dict[str, list[float]]]
"""By way and step, of each round."""


def nbytes_of(text: str) -> int:
    """Of "400KiB" and the like."""
    return int(TypeAdapter(ByteSize).validate_python(text))


def some_blocks(nbytes: int) -> list[Block]:
    """Incompressible ones, each of so many bytes."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, nbytes, np.uint8) for _ in range(8)]


@contextmanager
def timed(found: dict[str, float], step: str, nbytes: int) -> Iterator[None]:
    """Enter the GB/s at which the body moves so many bytes."""
    began = time.perf_counter()
    yield
    found[step] = nbytes / (time.perf_counter() - began) / 1e9


def show_rates(console: Console, rates: Rates) -> None:
    """Median and range of each step."""
    table = Table("GB/s", *next(iter(rates.values())), box=SIMPLE)
    for way, steps in rates.items():
        table.add_row(way, *(f"{statistics.median(r):.2f} ({min(r):.2f} to {max(r):.2f})" for r in steps.values()))
    console.print(table)


def write_rates(console: Console, name: str, context: typer.Context, results: Mapping[str, Any], out: Path) -> None:
    """As JSON into a folder, which is made."""
    out.mkdir(parents=True, exist_ok=True)
    console.print(f"  {write_report(new_report(name, context.params, [], dict(results), {}), out)}", soft_wrap=True)
