"""Made-up profile of a calibrated codec, and numbers that fit the profile: for figures and tests of any shape.

As a script, a model of Qwen3-8B's shape with random weights, 16 GB, and, next to the folder, the model's measured
profile:

    python benchmarks/made_up.py FOLDER python benchmarks/restore.py --model FOLDER --weights --codecs klt-8x --profile
    FOLDER-profile.safetensors
"""

import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
import typer
from torch import Tensor

from manthan.benchmarks.engines import random_tokens
from manthan.benchmarks.shapes import DEFAULT, PUBLIC, write_model
from manthan.codec.calibration import TOGETHER, ProfileBuilder
from manthan.codec.profile import Group, Profile, ProfileInfo
from manthan.codec.rope import Rope
from manthan.codec.tables.frequencies import SHAPES
from manthan.codec.tables.levels import STEPS, WIDTHS

SPREAD = 8.0, 0.2
"""Deviations of the first component and the last; between them even on a logarithmic scale."""
BITS = 1.0, 1.6, 2.5, 4.0, 10.0
"""Bits of a number to expect, by level."""


def rope_of(head_dim: int, base: float = 1e6) -> Rope:
    return Rope(tuple(base ** -np.arange(0, 1, 2 / head_dim)))


def profile(
    layers: int, heads: int, head_dim: int, rope: Rope | None, together: int = 0, latent: int = 0, seed: int = 0
) -> Profile:
    """Return a profile with the same transform in every group, rows shuffled, and a mean as large as the deviation.

    together: layers of a group; 0 for as many as calibration takes.
    latent: numbers of a latent, `heads` pieces of `head_dim`; 0 for keys and values.
    """
    info = ProfileInfo("made-up", layers, heads, head_dim, rope, "none", latent=latent, bits=BITS)
    kinds, rng = len(info.kinds), np.random.default_rng(seed)
    together = together or max(1, min(TOGETHER[0], TOGETHER[1] // (kinds * heads * head_dim)))
    squares, made = dict[int, npt.NDArray[np.float64]](), []
    for first in range(0, layers, together):
        count = min(together, layers - first)
        size = count * kinds * heads * head_dim
        if size not in squares:
            squares[size], _ = np.linalg.qr(rng.standard_normal((size, size)))
        deviations = _deviations(size)
        widths = np.clip(np.rint(3 * np.log2(deviations / STEPS[0] / WIDTHS[0])), 0, len(WIDTHS) - 1)
        transform = squares[size][rng.permutation(size)].astype(np.float16)
        scale = np.full(size, 1 / STEPS[0], np.float32)
        of_numbers = np.sqrt(np.square((deviations[:, None] * transform) * scale).sum(0)).astype(np.float32)
        mean = rng.standard_normal(size).astype(np.float32)
        weigher = [2 * rng.standard_normal(size) / size**0.5, 0.3 * rng.standard_normal(size // head_dim), [0.3]]
        made.append(
            Group(
                place=(first, count, 0, heads),
                head_dim=head_dim,
                mean=mean,
                scale=scale,
                transform=transform,
                tables=(rng.integers(0, len(SHAPES), size) * len(WIDTHS) + widths).astype(np.uint8),
                center=mean + 0.1 * of_numbers,
                deviations=of_numbers,
                weigher=np.concatenate(weigher).astype(np.float32),
                errors=np.zeros(size, np.int8),
            )
        )
    return Profile.of(info, [made])


def grouped_kv(of: Profile, tokens: int, seed: int = 0) -> npt.NDArray[np.float32]:
    """Return numbers for the profile's groups, keys before RoPE: float32 [kinds, layers, heads, tokens, head_dim]."""
    info, rng = of.info, np.random.default_rng(seed)
    made = np.empty((len(info.kinds), info.layers, info.heads, tokens, info.head_dim), np.float32)
    for group in of.groups:
        first, layers, *_ = group.place
        y = rng.standard_normal((tokens, group.mean.size)) * _deviations(group.mean.size)
        x = (y @ group.inverse + group.mean).reshape(tokens, layers, len(info.kinds), info.heads, info.head_dim)
        made[:, first : first + layers] = x.transpose(2, 1, 3, 0, 4)
    return made


def kv(of: Profile, tokens: int, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return keys, as in a cache from position 0 on, and values: float32 [layers, heads, tokens, head_dim]."""
    keys, values = (torch.from_numpy(part).to(device) for part in grouped_kv(of, tokens, seed))
    return _turned(keys, of.info.rope) if of.info.rope else keys, values


def _deviations(size: int) -> npt.NDArray[np.float64]:
    """Deviations of a group's components, in finest steps."""
    return np.geomspace(*SPREAD, size) * STEPS[0] / 6


def _turned(keys: Tensor, rope: Rope) -> Tensor:
    """Pairs of halves."""
    positions = np.arange(keys.shape[2], dtype=np.int64)
    cos, sin = (torch.from_numpy(part).to(keys.device) for part in rope.tables(positions))
    first, second, rest = keys.split((cos.shape[1], cos.shape[1], keys.shape[3] - 2 * cos.shape[1]), 3)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), 3)


# -- a whole model --------------------------------------------------------------------------------------

PIECES, PIECE = 12, 2048
"""Random tokens for the profile's measurement."""


def write_weights(folder: Path, device: str) -> None:
    """Write Transformers' initial weights next to the configuration, in bf16."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    model.save_pretrained(folder)


def main(folder: Annotated[Path, typer.Argument(help="Where the model goes.")]) -> None:
    """Make a model of Qwen3-8B's shape, and the model's profile."""
    from manthan.manager.calibration.model import ModelReader

    began = time.monotonic()
    write_weights(write_model(folder), "cuda" if torch.cuda.is_available() else "cpu")
    typer.echo(f"{folder} is written, {time.monotonic() - began:.0f} s")
    began, reader = time.monotonic(), ModelReader(str(folder))
    builder = ProfileBuilder(reader.info("none", ""))
    pieces = [random_tokens(1, index, PIECE, PUBLIC[DEFAULT].config["vocab_size"]) for index in range(PIECES)]
    reader.read(builder, pieces, False, lambda: typer.echo(f"a piece is read, {time.monotonic() - began:.0f} s"))
    builder.finish().save(
        folder.with_name(f"{folder.name}-profile.safetensors")
    )  # inside, vLLM would take the profile for weights
    typer.echo(f"its profile is written, {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    typer.run(main)
