"""Made-up profile of a calibrated codec, and numbers that fit the profile: for figures and tests of any shape.

As a script, a model of Qwen3-8B's shape with random weights, 16 GB, and, next to the folder, the model's measured
profile:

    python benchmarks/made_up.py FOLDER python benchmarks/restore.py --model FOLDER --weights --codecs klt-8x --profile
    FOLDER-profile.safetensors
"""

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
import typer
from torch import Tensor

from manthan.benchmarks.engines import random_tokens
from manthan.benchmarks.shapes import DEFAULT, PUBLIC, write_model
from manthan.codec.calibration import ProfileBuilder
from manthan.codec.profile import PRESETS, Basis, Group, LayerProfile, Profile, ProfileInfo
from manthan.codec.rope import Rope
from manthan.codec.tables.frequencies import DEVIATIONS, SHAPES, costs, family
from manthan.codec.tables.levels import STEPS, WIDTHS

SPREAD = 8.0, 0.2
"""Deviations of the first component and the last; between them even on a logarithmic scale."""


def rope_of(head_dim: int, base: float = 1e6) -> Rope:
    return Rope(tuple(base ** -np.arange(0, 1, 2 / head_dim)))


def profile(
    layers: int, heads: int, head_dim: int, rope: Rope | None, presets: Mapping[str, float] = PRESETS, seed: int = 0
) -> Profile:
    """Return a profile with the same transform in every layer, rows shuffled, and a mean as large as the deviation."""
    rng, size = np.random.default_rng(seed), heads * head_dim
    square, _ = np.linalg.qr(rng.standard_normal((size, size)))
    deviations, shapes = np.geomspace(*SPREAD, size), rng.integers(0, len(SHAPES), size)
    steps, tables = {}, {}
    for preset, ratio in presets.items():
        steps[preset], tables[preset] = _step(deviations, shapes, 16 / ratio)

    def basis() -> Basis:
        scale = np.exp(0.3 * rng.standard_normal(size)).astype(np.float32)
        mean = rng.standard_normal(size).astype(np.float32)
        return Basis(mean, scale, square[rng.permutation(size)].astype(np.float16), steps, tables)

    made = [LayerProfile(basis(), basis()) for _ in range(layers)]
    info = ProfileInfo("made-up", layers, heads, head_dim, rope, "none", ratios=dict(presets))
    return Profile.of(info, family(), [made])


def with_groups(of: Profile, layers: int = 1, seed: int = 0) -> Profile:
    """Return the profile with groups of `layers` layers, for embedded codecs; see `grouped_kv`."""
    info, rng, made = of.info, np.random.default_rng(seed), []
    kinds, squares = len(info.kinds), dict[int, npt.NDArray[np.float64]]()
    for first in range(0, info.layers, layers):
        count = min(layers, info.layers - first)
        size = count * kinds * info.heads * info.head_dim
        if size not in squares:
            squares[size], _ = np.linalg.qr(rng.standard_normal((size, size)))
        deviations = _deviations(size)
        widths = np.clip(np.rint(3 * np.log2(deviations / STEPS[0] / WIDTHS[0])), 0, len(WIDTHS) - 1)
        transform = squares[size][rng.permutation(size)].astype(np.float16)
        scale = np.full(size, 1 / STEPS[0], np.float32)
        of_numbers = np.sqrt(np.square((deviations[:, None] * transform) * scale).sum(0)).astype(np.float32)
        mean = rng.standard_normal(size).astype(np.float32)
        weigher = [2 * rng.standard_normal(size) / size**0.5, 0.3 * rng.standard_normal(size // info.head_dim), [0.3]]
        made.append(
            Group(
                place=(first, count, 0, info.heads),
                head_dim=info.head_dim,
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
    info = replace(info, bits=(1.0, 1.6, 2.5, 4.0, 10.0))
    return Profile.of(info, of.frequencies, of.ranks, [made])


def grouped_kv(of: Profile, tokens: int, seed: int = 0) -> npt.NDArray[np.float32]:
    """Return numbers for the profile's groups, keys before RoPE: float32 [kinds, layers, heads, tokens, head_dim]."""
    info, rng = of.info, np.random.default_rng(seed)
    made = np.empty((len(info.kinds), info.layers, info.heads, tokens, info.head_dim), np.float32)
    for group in of.groups[0]:
        first, layers, *_ = group.place
        y = rng.standard_normal((tokens, group.mean.size)) * _deviations(group.mean.size)
        x = (y @ group.inverse + group.mean).reshape(tokens, layers, len(info.kinds), info.heads, info.head_dim)
        made[:, first : first + layers] = x.transpose(2, 1, 3, 0, 4)
    return made


def turned_kv(of: Profile, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return keys and values as `kv` does, of numbers for the profile's groups."""
    keys, values = (torch.from_numpy(part).to(device) for part in grouped_kv(of, tokens))
    return _turned(keys, of.info.rope) if of.info.rope else keys, values


def _deviations(size: int) -> npt.NDArray[np.float64]:
    """Deviations of a group's components, in finest steps."""
    return np.geomspace(*SPREAD, size) * STEPS[0] / 6


def kv(of: Profile, tokens: int, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return keys, as in a cache from position 0 on, and values: float32 [layers, heads, tokens, head_dim]."""
    torch.manual_seed(seed)
    sides = []
    for keys in (True, False):
        rows = [_row(layer.bases[not keys], tokens, device) for layer in of.layers]
        heads = torch.stack(rows).view(len(rows), tokens, of.info.heads, of.info.head_dim).transpose(1, 2)
        sides.append(_turned(heads, of.info.rope) if keys and of.info.rope else heads)
    return sides[0], sides[1]


def _step(
    deviations: npt.NDArray[np.float64], shapes: npt.NDArray[np.int64], bits: float
) -> tuple[float, npt.NDArray[np.uint8]]:
    """Return the step at which components take `bits` bits on average, and their tables."""
    frequencies = family()
    each = (costs(frequencies) * frequencies / frequencies.sum(1, keepdims=True)).sum(1)

    def tables(step: float) -> npt.NDArray[np.uint8]:
        nearest = np.abs(np.log(deviations[:, None] / step / DEVIATIONS)).argmin(1)
        return (shapes * len(DEVIATIONS) + nearest).astype(np.uint8)

    low, high = 0.01, 100.0
    for _ in range(30):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if each[tables(middle)].mean() > bits else (low, middle)
    return float(np.float32(high)), tables(high)


def _row(basis: Basis, tokens: int, device: torch.device) -> Tensor:
    """Return [tokens, C] of a layer."""
    preset = next(iter(basis.steps))
    chosen = np.array(SHAPES)[basis.tables[preset] // len(DEVIATIONS)]
    shapes = torch.tensor(chosen, dtype=torch.float32, device=device)
    power = torch._standard_gamma((1 / shapes).expand(tokens, -1).contiguous()) ** (1 / shapes)
    spread = torch.exp(0.5 * (torch.lgamma(3 / shapes) - torch.lgamma(1 / shapes)))
    signs = torch.randint(0, 2, power.shape, device=device) * 2 - 1
    deviations = torch.logspace(*np.log10(SPREAD), len(shapes), device=device)
    transform, scale, mean = (torch.from_numpy(x).to(device) for x in (basis.transform, basis.scale, basis.mean))
    return signs * power / spread * deviations @ transform.float().t() / scale + mean


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
