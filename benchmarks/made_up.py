"""Make up a profile of a calibrated codec, and KV that fits the profile, for benchmarks and tests of any model shape.

A profile has a model's statistics that a calibrated codec (`klt-…`) needs: see `manthan.codec.profile`. With
`--profile made-up`, benchmarks make a profile for vLLM's dummy weights, so that blocks compress like real ones. As a
script, write a model of Qwen3-8B's shape with random weights (16 GB) and, next to its folder, its calibrated profile.
The weights give keys and values whose blocks compress like real ones:

    python benchmarks/made_up.py FOLDER [--no-profile]
    python benchmarks/restore.py --model FOLDER --weights --codecs klt-8x --profile FOLDER-profile.safetensors
"""

import time
from collections.abc import Sequence
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

SPREAD, FALL = (64.0, 0.03), 0.7
"""SPREAD: standard deviations of a group's first and last component, in units of STEPS[0] / 6 finest steps. FALL:
exponent of the fall between them. A group is layers that are encoded together. With these values, blocks have about the
compression ratio of their codec's name, such as 8 for klt-8x."""
BITS = 0.75, 1.25, 1.95, 3.0, 10.0
"""Expected bits per number at each level of a calibrated codec, from the coarsest to the lossless level."""
NORMS_KEYS = "qwen3", "gemma3"
"""Prefixes of `model_type` of models that normalize the keys of each head."""
WEIGHT = 0.001
"""Bound of vLLM's dummy weights, which are uniformly distributed from -WEIGHT to WEIGHT."""


def rope_of(head_dim: int, base: float = 1e6) -> Rope:
    return Rope(tuple(base ** -np.arange(0, 1, 2 / head_dim)))


def profile(
    layers: int,
    heads: int,
    head_dim: int,
    rope: Rope | None,
    together: int = 0,
    latent: int = 0,
    seed: int = 0,
    even: Sequence[float] = (),
) -> Profile:
    """Return a made-up profile. Equally large groups share an orthogonal matrix, with its rows reordered.

    together: most layers of a group; 0 for the bound of calibration.
    latent: count of numbers in a token's latent (MLA), made of `heads` pieces of `head_dim`; 0 for keys and values.
    even: standard deviations of all keys and of all values, which then have mean 0 and no correlation. Empty for
        correlated numbers with random means.
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
        square, scale = squares[size][rng.permutation(size)], np.full(size, 1 / STEPS[0])
        mean = rng.standard_normal(size).astype(np.float32)
        if even:
            square = square / deviations[:, None]
            lengths, mean = np.linalg.norm(square, axis=0), np.zeros_like(mean)
            square, scale = square / lengths, lengths * np.tile(np.repeat(even, heads * head_dim), count)
        transform, scale = square.astype(np.float16), scale.astype(np.float32)
        of_numbers = np.sqrt(np.square((deviations[:, None] * transform) * scale).sum(0)).astype(np.float32)
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
    """Return random KV that fits the profile, keys before RoPE: float32 [kinds, layers, heads, tokens, head_dim]."""
    info, rng = of.info, np.random.default_rng(seed)
    made = np.empty((len(info.kinds), info.layers, info.heads, tokens, info.head_dim), np.float32)
    for group in of.groups:
        first, layers, *_ = group.place
        y = rng.standard_normal((tokens, group.mean.size)) * _deviations(group.mean.size)
        x = (y @ group.inverse + group.mean).reshape(tokens, layers, len(info.kinds), info.heads, info.head_dim)
        made[:, first : first + layers] = x.transpose(2, 1, 3, 0, 4)
    return made


def kv(of: Profile, tokens: int, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return keys with RoPE, from position 0 on, and values: each float32 [layers, heads, tokens, head_dim]."""
    keys, values = (torch.from_numpy(part).to(device) for part in grouped_kv(of, tokens, seed))
    return _turned(keys, of.info.rope) if of.info.rope else keys, values


def of_model(folder: Path) -> Profile:
    """Return a profile for the KV of vLLM's dummy weights, close enough for usual sizes of compressed blocks.

    folder: folder with the model's config.json. vLLM draws dummy weights from a uniform distribution, but from 0.33
    on sets an RMSNorm's weights to 1. A norm's outputs then have a standard deviation of 1, and so have keys that the
    model normalizes. Other keys, and values, are products of a norm's outputs with drawn weights.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder).get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    product = WEIGHT * (config.hidden_size / 3) ** 0.5
    even = 1.0 if config.model_type.startswith(NORMS_KEYS) else product, product
    shape = config.num_hidden_layers, config.num_key_value_heads, head_dim
    return profile(*shape, Rope.of_config(config, head_dim), even=even)


def _deviations(size: int) -> npt.NDArray[np.float64]:
    """Return the standard deviations of a group's `size` components, in finest steps of quantization."""
    first, last = SPREAD
    return first * (last / first) ** (np.linspace(0, 1, size) ** FALL) * STEPS[0] / 6


def _turned(keys: Tensor, rope: Rope) -> Tensor:
    """Return keys with RoPE, from position 0 on. RoPE pairs rotated numbers of the first and the second half."""
    positions = np.arange(keys.shape[2], dtype=np.int64)
    cos, sin = (torch.from_numpy(part).to(keys.device) for part in rope.tables(positions))
    first, second, rest = keys.split((cos.shape[1], cos.shape[1], keys.shape[3] - 2 * cos.shape[1]), 3)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), 3)


# -- a whole model --------------------------------------------------------------------------------------

PIECES, PIECE = 12, 2048
"""Number of pieces that calibration reads, and random tokens in a piece."""


def write_weights(folder: Path, device: str) -> None:
    """Write random weights into the folder of the model's config.json, in bf16.

    They are Transformers' initial ones, but for embeddings, which are as large as normalized ones, and for keys' and
    values' projections: the variances of a layer's keys fall like those of a model's, and so do those of its values.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
        model.get_input_embeddings().weight.data.normal_()
        for name, of in model.named_parameters():
            if name.endswith(("k_proj.weight", "v_proj.weight")):
                scale = torch.from_numpy(_deviations(len(of))).float().to(device)
                scale *= 0.02 / scale.square().mean().sqrt()
                turned, _ = torch.linalg.qr(torch.randn(len(of), len(of)))
                of.data.copy_((turned * scale) @ torch.randn(of.shape))
    model.save_pretrained(folder)


def main(
    folder: Annotated[Path, typer.Argument(help="Folder for the model.")],
    has_profile: Annotated[bool, typer.Option("--profile/--no-profile", help="Make its profile, too.")] = True,
) -> None:
    """Make a model of Qwen3-8B's shape, and the model's profile."""
    from manthan.manager.calibration.model import ModelReader

    began = time.monotonic()
    write_weights(write_model(folder), "cuda" if torch.cuda.is_available() else "cpu")
    typer.echo(f"{folder} is written, {time.monotonic() - began:.0f} s")
    if not has_profile:
        return
    began, reader = time.monotonic(), ModelReader(str(folder))
    builder = ProfileBuilder(reader.info("none", ""))
    pieces = [random_tokens(1, index, PIECE, PUBLIC[DEFAULT].config["vocab_size"]) for index in range(PIECES)]
    reader.read(builder, pieces, False, lambda: typer.echo(f"a piece is read, {time.monotonic() - began:.0f} s"))
    builder.finish().save(
        folder.with_name(f"{folder.name}-profile.safetensors")
    )  # next to the folder, because vLLM would load a file inside as weights
    typer.echo(f"its profile is written, {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    typer.run(main)
