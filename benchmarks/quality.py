"""Measure how compression changes a model's loss and answers, after a prefix with compressed and decompressed KV.

A prefix's first tokens may be exact: their KV is kept without loss. Measured are, for each codec and each number of
exact tokens: perplexity of a continuation, KL divergence between next-token distributions after exact and after decoded
(decompressed) KV, tasks in contexts of several lengths, greedy answers, cosines between exact and decoded KV, and
bytes. On engine `vllm`, Manthan stores and restores the prefix. On `transformers`, decoded KV replaces the exact KV.

    python benchmarks/quality.py MODEL [--text FILE] [--codec NAME,NAME] [--exact 0,4] [--engine vllm] [--profile FILE]
    python benchmarks/quality.py --plot-only FOLDER/quality.json
"""

import itertools
import json
import math
import statistics
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from manthan.benchmarks.arms import OUT, Arm, leave_on_signals, make_console, new_report, run_arms, write_report
from manthan.benchmarks.progress import Bar
from manthan.benchmarks.quality_pieces import Chat, Piece, Text
from manthan.benchmarks.quality_report import show, summary
from manthan.benchmarks.quality_settings import (
    ALL,
    EXACT,
    QualityError,
    Setting,
    Shape,
    Storage,
    load_facts,
    parse_settings,
)
from manthan.benchmarks.quality_tasks import TASKS
from manthan.benchmarks.server import ServerError
from manthan.codec import DEFAULT
from manthan.codec.model import ModelFacts
from manthan.manager.config.model import CodecConfig
from manthan.manager.config.profiles import AUTO

CPU_BLOCK, GPU_BLOCK = 32, 16
ANSWER = 48
"""Most tokens of a chat's answer."""
SINKS = CodecConfig().sink_tokens
PIECE, PIECES = 2048, 8
"""Most tokens of a piece of the text that calibrates KVTC (a published codec to compare with), and most pieces."""


class On(StrEnum):
    """Library that runs the model: value of `--engine`."""

    vllm = "vllm"
    transformers = "transformers"
    both = "both"


class Dtype(StrEnum):
    """Dtype of a model's compute. In bf16, any change of the KV also changes roundings, which adds noise to figures."""

    bfloat16 = "bfloat16"
    float32 = "float32"


NEEDS = {On.vllm: ("vllm", "transformers"), On.transformers: ("torch", "transformers")}


@dataclass(frozen=True)
class Job:
    """Plan of a measurement. top: number of likeliest tokens that vLLM gives probabilities of; -1 for all tokens."""

    model: str
    shape: Shape
    facts: ModelFacts
    block_size: int
    settings: list[Setting]
    pieces: list[Piece]
    chats: list[Chat]
    top: int
    dtype: str
    calibration: list[list[int]]
    """Token ids of each piece of the text that calibrates KVTC; empty without KVTC."""

    def with_storage(self, arms: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return the arms' results by name, each with the `Storage` of its prefixes added as "storage"."""
        return {name: arm | {"storage": asdict(self._storage(arm.get("stored")))} for name, arm in arms.items()}

    def _storage(self, stored: Sequence[Any] | None) -> Storage:
        """Return the mean storage of all pieces but tasks.

        stored: for each piece, bytes of the prefix, and of a session of LONG tokens (None if unknown); None for bf16.
        """
        if stored is None:
            return Storage.of_bf16(self.shape)
        short = [sizes for sizes, piece in zip(stored, self.pieces, strict=True) if not piece.task]
        nbytes, long = zip(*short, strict=True)
        mean_long = None if None in long else statistics.fmean(long)
        return Storage.of_bytes(statistics.fmean(nbytes), len(self.pieces[0].prefix), mean_long, self.shape)


def engines(on: On | None) -> list[On]:
    """Return the engines to measure on; for None, all that are installed.

    Raises QualityError if a requested engine is not installed, or none is.
    """
    wanted = [On.vllm, On.transformers] if on is None or on is On.both else [on]
    able = [engine for engine in wanted if all(map(find_spec, NEEDS[engine]))]
    if not able or (on is not None and able != wanted):
        missing = sorted({name for engine in wanted for name in NEEDS[engine] if not find_spec(name)})
        raise QualityError(f"--engine {on or On.both} needs {' and '.join(missing)}, which is not installed here.")
    return able


def plan(options: Namespace) -> Job:
    """Return the plan of a measurement with arguments `options`. Raises QualityError if there can be none."""
    model, lengths, tasks = options.model, read_lengths(options.lengths), read_tasks(options.tasks)
    if not model:
        raise QualityError("MODEL is missing: a folder or the name of a model on the Hugging Face Hub.")
    prefix, block_size = options.prefix, options.block_size or default_block_size()
    if prefix % block_size:
        raise QualityError(
            f"--prefix {prefix} is no multiple of the block size {block_size}, and only full blocks go cold: use "
            f"{max(1, prefix // block_size) * block_size}, or another --block-size."
        )
    shape = Shape.of(model)
    facts, path = load_facts(model, shape, options.codec, options.profile)
    settings = parse_settings(options.codec, options.exact, shape.head_dim, facts, path)
    source = Text(model, options.text)
    pieces = source.pieces(prefix, options.continuation, options.pieces)
    longest = prefix + options.continuation + 1
    if shape.positions and longest > shape.positions:
        raise QualityError(
            f"{model} takes {shape.positions:,} tokens, and a piece has {longest:,} (--prefix {prefix}, "
            f"--continuation {options.continuation} and one generated): make them smaller."
        )
    room = shape.positions or math.inf
    asked = itertools.product(tasks, [length for length in lengths if length < room], range(options.samples))
    found = [source.task(task, length, block_size, options.seed + sample) for task, length, sample in asked]
    pieces += [piece for piece in found if piece]
    chats = [chat for chat in source.chats(options.chats, options.document) if len(chat.prompt) + ANSWER <= room]
    top = -1 if options.kl_top >= shape.vocabulary else options.kl_top
    calibration = []
    if any(setting.codec.startswith("kvtc") for setting in settings):
        read = Text(model, Path(str(files("manthan.manager.calibration") / "text.txt")))
        calibration = read.pieces(min(PIECE, shape.positions or PIECE) - 1, 1, PIECES)
    read_only = [piece.prefix for piece in calibration]
    return Job(model, shape, facts, block_size, settings, pieces, chats, top, options.dtype, read_only)


def read_lengths(lengths: str) -> tuple[int, ...]:
    """Return lengths of contexts, in tokens, from a list such as `2000,8000`. Raises QualityError."""
    parts = [part.strip() for part in lengths.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise QualityError(f"--lengths {lengths} is no list of lengths in tokens, such as 2000,8000.")
    return tuple(map(int, parts))


def read_tasks(tasks: str) -> list[str]:
    """Return names of tasks, from a list of names, `all` or `none`. Raises QualityError."""
    if tasks in (ALL, "none"):
        return list(TASKS) if tasks == ALL else []
    names = [name.strip() for name in tasks.split(",")]
    for name in names:
        if name not in TASKS:
            raise QualityError(f"--tasks {tasks}: {name!r} is none of {', '.join(TASKS)}; all and none are taken, too.")
    return names


def default_block_size() -> int:
    import torch

    return GPU_BLOCK if torch.cuda.is_available() else CPU_BLOCK


def with_transformers(job: Job, console: Console) -> dict[str, Any]:
    from manthan.benchmarks.quality_transformers import Reader

    with Bar(console, On.transformers) as bar:
        bar.begin("the model is loaded")
        reader = Reader(job.model, job.shape, job.block_size, job.facts, job.dtype)
        if job.calibration:
            from manthan.benchmarks.peers.kvtc import KVTC

            bar.begin("KVTC is calibrated")
            named = {setting.codec for setting in job.settings}
            reader.calibrate([preset for preset in KVTC.values() if preset.name in named], job.calibration)
        bar.begin("pieces and codecs", total=len(job.pieces) * len(job.settings))
        found = reader.measure(job.pieces, job.settings, bar.step)
        bar.begin("chats", total=len(job.chats))
        answered = reader.answer(job.chats, job.settings, ANSWER, bar.step)
    return {name: arm | answered.get(name, {}) for name, arm in found.items()}


def with_vllm(
    job: Job, out: Path, console: Console, timeout_s: float
) -> tuple[dict[str, Any], list[Arm], dict[str, str]]:
    """Return results of successful arms by name, all arms, and errors of failed arms by name.

    An arm is plain vLLM (the exact arm), or one setting. All are compared with the exact arm; if it fails, none counts.
    """
    from manthan.benchmarks.quality_vllm import SCRIPT, Questions, arm, read_scores, told

    asked = Questions(job.pieces, job.chats, job.top, ANSWER)
    with tempfile.TemporaryDirectory() as folder:
        arms = []
        for setting in (None, *job.settings):
            place = Path(folder, setting.name if setting else EXACT)
            place.mkdir()
            arms.append(arm(setting, job.model, job.shape, job.block_size, asked, place))
        results, errors = run_arms(SCRIPT, arms, out, console, timeout_s)
        found = {}
        if EXACT in results:
            found = read_scores(Path(folder), list(results), job.pieces, job.shape.vocabulary)
    for setting in (None, *job.settings):
        name = setting.name if setting else EXACT
        if name in found:
            found[name] |= told(results[name], setting, asked, job.block_size, job.shape)
    return found, arms, errors


def main(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A folder, or a name on the Hugging Face Hub.")] = "",
    text: Annotated[Path | None, typer.Option(help="Text for the model, UTF-8; tiny-llama has one.")] = None,
    codec: Annotated[
        str,
        typer.Option(help="Codecs, separated by commas. auto: Manthan's default; all: all that can encode the model."),
    ] = AUTO,
    exact: Annotated[str, typer.Option(help="Comma-separated numbers of exact first tokens.")] = str(SINKS),
    profile: Annotated[
        Path | None,
        typer.Option(help="Profile for calibrated codecs; by default the one in the cache folder."),
    ] = None,
    engine: Annotated[On | None, typer.Option(help="Default: all that are installed.")] = None,
    prefix: Annotated[int, typer.Option(min=1, help="Tokens of a prefix, which goes cold.")] = 1536,
    continuation: Annotated[int, typer.Option(min=2, help="Tokens that follow; all but the first are scored.")] = 512,
    pieces: Annotated[int, typer.Option(min=1, help="Pieces of the text, at most.")] = 8,
    tasks: Annotated[str, typer.Option(help=f"Tasks of {', '.join(TASKS)}; all, or none.")] = ALL,
    lengths: Annotated[str, typer.Option(help="Lengths of tasks' contexts, in tokens.")] = "2000,4000,8000",
    samples: Annotated[int, typer.Option(min=1, help="Contexts of each task and length.")] = 1,
    chats: Annotated[int, typer.Option(min=0, help="Chats with compared greedy answers; 0 for none.")] = 24,
    document: Annotated[int, typer.Option(min=1, help="Tokens of the text that a chat is about.")] = 1700,
    block_size: Annotated[int, typer.Option(min=0, help="Tokens of a block; 0: 32 on a CPU, 16 on a GPU.")] = 0,
    kl_top: Annotated[int, typer.Option(min=1, help="On vLLM: count of likeliest tokens that KL tells apart.")] = 1024,
    dtype: Annotated[Dtype, typer.Option(help="Dtype of Transformers' compute; KV is bf16.")] = Dtype.bfloat16,
    seed: Annotated[int, typer.Option(help="Seed of the tasks.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds that an engine may take.")] = 1800,
    lm_eval: Annotated[str, typer.Option(help="Measure only these tasks of lm-eval, on a server.")] = "",
    lm_eval_data: Annotated[Path | None, typer.Option(help="Hugging Face cache with lm-eval's data.")] = None,
    lm_eval_limit: Annotated[int, typer.Option(min=0, help="Documents of an lm-eval task; 0 for all.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for JSON, plot and logs.")] = OUT,
    plot_only: Annotated[Path | None, typer.Option(help="Show and plot this JSON of an earlier run again.")] = None,
) -> None:
    """Measure the cost of compression for MODEL: perplexity, divergence, recall, bytes."""
    options = Namespace(**locals())
    console = make_console()
    try:
        if plot_only is not None:
            return show(read_report(plot_only), plot_only.with_suffix(".png"), console)
        leave_on_signals()
        if lm_eval:
            from manthan.benchmarks import quality_lm_eval as tasks_of_lm_eval

            found = tasks_of_lm_eval.evaluate(model, lm_eval, lm_eval_data, codec, lm_eval_limit, timeout, out)
            return tasks_of_lm_eval.show(found, out, console)
        wanted = engines(engine)
        report = run(plan(options), wanted, context.params, out, timeout, console)
    except (QualityError, ServerError) as error:
        typer.echo(error, err=True)
        raise typer.Exit(1) from None
    path = write_report(report, out)
    console.print(f"  {path}", soft_wrap=True)
    show(report, path.with_suffix(".png"), console)
    raise typer.Exit(1 if report["errors"] else 0)


def read_report(file: Path) -> dict[str, Any]:
    try:
        report: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise QualityError(f"--plot-only {file} cannot be read: {error}.") from None
    if report.get("benchmark") != "quality":
        raise QualityError(f"--plot-only {file} is not a report of this benchmark.")
    return report


def run(
    job: Job, wanted: list[On], arguments: dict[str, Any], out: Path, timeout_s: float, console: Console
) -> dict[str, Any]:
    """Return the report of all engines. vLLM runs first, because its engines need the whole GPU."""
    found: dict[str, dict[str, Any]] = {}
    arms: list[Arm] = []
    errors: dict[str, str] = {}
    if On.vllm in wanted:
        from manthan.benchmarks.quality_vllm import check_settings

        check_settings(job.settings)
    out.mkdir(parents=True, exist_ok=True)
    if On.vllm in wanted:
        found[On.vllm], arms, errors = with_vllm(job, out, console, timeout_s)
    if On.transformers in wanted:
        found[On.transformers] = with_transformers(job, console)
    found = {on: job.with_storage(by) for on, by in found.items() if by}
    bucket = f"the {job.top} likeliest tokens and the rest, a lower bound"
    report = new_report("quality", arguments, arms, found, errors)
    report["kl"] = {On.vllm: "all tokens" if job.top < 0 else bucket, On.transformers: "all tokens"}
    report |= {"block_size": job.block_size, "default": DEFAULT}
    return report | {"summary": summary(report)}


if __name__ == "__main__":
    typer.run(main)
