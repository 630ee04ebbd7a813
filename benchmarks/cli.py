"""The groups `manthan bench` and `manthan eval`. What needs vLLM or torch imports it when it runs, not here."""

import typer

from manthan.benchmarks.capacity import capacity

bench = typer.Typer(no_args_is_help=True, help="Measure capacity and concurrency on a vLLM server.")
evaluate = typer.Typer(no_args_is_help=True, help="Measure what compression costs a model's answers.")


bench.command("capacity")(capacity)


@evaluate.callback()
def _evaluate() -> None: ...
