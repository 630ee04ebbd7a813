"""Command groups `manthan bench` and `manthan eval`. vLLM and torch are imported when a command runs, not here."""

import typer

from manthan.benchmarks.agents import agents
from manthan.benchmarks.capacity import capacity
from manthan.benchmarks.codec import main as codec
from manthan.benchmarks.history import history
from manthan.benchmarks.load import load
from manthan.benchmarks.quality import main as quality
from manthan.benchmarks.restore import main as restore
from manthan.benchmarks.scale import scale

bench = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Measure a vLLM server (users' waits, session returns, kept sessions) and the codec.",
)
evaluate = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Measure the cost of compression for a model's answers."
)


bench.command("load")(load)
bench.command("agents")(agents)
bench.command("restore")(restore)
bench.command("codec")(codec)
bench.command("capacity")(capacity)
bench.command("scale")(scale)
bench.command("history")(history)


@evaluate.callback()
def _evaluate() -> None: ...


evaluate.command("quality")(quality)
