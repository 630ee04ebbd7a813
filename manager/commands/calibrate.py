"""`manthan calibrate`: makes a model's profile, which calibrated codecs need, from the model's KV of a text."""

import hashlib
import time
from dataclasses import replace
from enum import StrEnum
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from manthan.codec.calibration import ProfileBuilder
from manthan.codec.errors import NonFiniteError, ProfileError
from manthan.codec.profile import LEVELS, Profile
from manthan.manager.commands import make_console
from manthan.manager.config.profiles import profile_path

NEEDED = ("torch", "transformers", "safetensors")


class Metric(StrEnum):
    """Weights of errors. fisher: by the effect on predictions (Fisher's information). none: by the spread of keys."""

    fisher = "fisher"
    none = "none"


def calibrate(
    model: Annotated[str, typer.Argument(help="A folder, or the name of a model on the Hugging Face Hub.")],
    text: Annotated[Path | None, typer.Option(help="Text for the model; default: Manthan's text.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Most tokens of the text that are read.")] = 24_576,
    out: Annotated[Path | None, typer.Option(help="File for the profile; default: where servers look.")] = None,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="The server's --tensor-parallel-size.")] = 1,
    metric: Annotated[
        Metric,
        typer.Option(help="Weight of errors: their effect on the model's predictions, or the spread of keys alone."),
    ] = Metric.fisher,
) -> None:
    """Measure a model's keys and values, or latents, for codecs that take a profile (klt-…)."""
    console, began = make_console(), time.monotonic()
    try:
        profile = made(console, model, text, tokens, tensor_parallel_size, metric)
        path = out or profile_path(model, len(profile.ranks))
        profile.save(path)
    except (ProfileError, OSError) as error:
        typer.echo(f"manthan calibrate: {error}", err=True)
        raise typer.Exit(1) from None
    info, seconds = profile.info, time.monotonic() - began
    holds = f"latents of {info.latent}" if info.latent else f"{info.heads} KV heads of {info.head_dim}"
    console.print(
        f"{path}: {info.layers} layers, {holds} numbers, {info.tokens:,} tokens, "
        f"metric {info.metric}, {path.stat().st_size / 1e6:.1f} MB, {seconds:.0f} s",
        soft_wrap=True,
    )
    for preset, level in LEVELS.items():
        divergence = (*info.divergences, 0)[level]
        console.print(f"{preset}: {info.bits[level]:.2f} bits a number, and headers; {divergence:.2g} nats")


def made(console: Console, model: str, text: Path | None, tokens: int, ranks: int, metric: Metric) -> Profile:
    """Return a model's profile. Raises ProfileError, OSError."""
    missing = [name for name in NEEDED if not find_spec(name)]
    if missing:
        raise ProfileError(f"it takes {' and '.join(missing)}, which is not installed here.")
    from manthan.manager.calibration.model import ModelReader

    source = text or files("manthan.manager.calibration") / "text.txt"
    words = source.read_bytes().decode("utf-8", "replace")
    reader = ModelReader(model)
    info = reader.info(metric, hashlib.sha256(words.encode()).hexdigest())
    if info.rope is None and not info.latent:
        console.print(f"{model}: the RoPE of the keys is unknown; keys are taken as they are.")
    (pieces, held), builder = reader.pieces(words, tokens), ProfileBuilder(info, ranks)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading", total=len(pieces))
        reader.read(builder, pieces, metric is Metric.fisher, lambda: progress.advance(task))
        progress.update(task, description="making the profile")
        profile = builder.finish()
        progress.update(task, description="trying the profile")
        for piece in held:
            try:
                divergences = reader.divergences(profile, piece)
                profile = Profile.of(replace(profile.info, divergences=divergences), profile.ranks)
            except (NonFiniteError, RuntimeError) as error:  # a GPU may lack memory for float32
                said = str(error).splitlines()[0]
                console.print(f"{model}: the levels' divergences are estimated: {said}", soft_wrap=True)
        return profile
