"""The groups `manthan bench` and `manthan eval`. What needs vLLM or torch imports it when it runs, not here."""

import typer

from manthan.benchmarks.capacity import capacity
from manthan.benchmarks.concurrency import concurrency
from manthan.benchmarks.load import load
from manthan.benchmarks.quality import main as quality

bench = typer.Typer(
    no_args_is_help=True,
    help="Measure a vLLM server: sessions kept, users at a time, what they wait.",
)
evaluate = typer.Typer(no_args_is_help=True, help="Measure what compression costs a model's answers.")


bench.command("capacity")(capacity)
bench.command("concurrency")(concurrency)
bench.command("load")(load)


@evaluate.callback()
def _evaluate() -> None: ...


evaluate.command("quality")(quality)
