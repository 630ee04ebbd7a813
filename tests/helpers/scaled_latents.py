"""Latents in fp8 with scales of their own, as vLLM's kernels write them (`fp8_ds_mla`).

DeepSeek V3.2 has each token's four scales behind its latent, as float32. DeepSeek V4 has the exponents of a state's
seven scales, and a byte of 0, behind all states of the block; then comes padding.
"""

import numpy as np
from numpy.typing import NDArray

from manthan.codec.base import Dtype
from manthan.codec.block import Scales
from manthan.codec.cpu.numbers import Floats, as_floats, as_numbers, bf16_bits

V32 = Scales(row=656, piece=128, nbytes=4, stride=144, place=0, rope_at=16)
V4 = Scales(row=576, piece=64, nbytes=1, stride=8, place=2, rope_at=0)
LATENT = {V32: 512, V4: 448}
TURNED, PADDING, LEAST = 64, 64, 1e-4
"""Numbers of RoPE's part; bytes of padding; least largest number of a piece, as vLLM's kernels have it."""
Bytes = NDArray[np.uint8]


def quantized(latents: Floats, piece: int) -> tuple[Bytes, Floats]:
    """Return fp8 bytes of latents [..., numbers], and their scales, powers of two [..., pieces]."""
    pieces = latents.reshape(*latents.shape[:-1], -1, piece)
    largest = np.maximum(np.abs(pieces).max(-1), np.float32(LEAST))
    scales = np.exp2(np.ceil(np.log2(largest / np.float32(448)))).astype(np.float32)
    return as_numbers(pieces / scales[..., None], Dtype.FLOAT8_E4M3).reshape(latents.shape), scales


def page(latents: Floats, turned: Floats, scales: Scales = V32) -> Bytes:
    """Return the bytes of blocks, [..., bytes], of latents and RoPE's numbers [..., tokens, numbers]."""
    codes, found = quantized(latents, scales.piece)
    rope, blocks = bf16_bits(turned).view(np.uint8), latents.shape[:-2]
    if scales.place == 0:
        return np.concatenate([codes, found.view(np.uint8), rope], -1).reshape(*blocks, -1)
    exponents = np.zeros((*found.shape[:-1], 8), np.uint8)
    exponents[..., :7] = found.view(np.uint32) >> 23
    parts = [np.concatenate([codes, rope], -1), exponents, np.full((*blocks, PADDING), 99, np.uint8)]
    return np.concatenate([part.reshape(*blocks, -1) for part in parts], -1)


def read(pages: Bytes, tokens: int, scales: Scales = V32) -> tuple[Floats, list[Bytes]]:
    """Return the latents that pages stand for, float32 [..., tokens, numbers], and their other bytes but padding."""
    latent, blocks = LATENT[scales], pages.shape[:-1]
    rows = pages[..., : tokens * scales.row].reshape(*blocks, tokens, scales.row)
    behind = pages[..., tokens * scales.row :][..., : 8 * tokens].reshape(*blocks, -1, 8)
    if scales.place == 0:
        found = np.ascontiguousarray(rows[..., 512:528]).view(np.float32)
    else:
        found = (np.ascontiguousarray(behind[..., :7]).astype(np.uint32) << 23).view(np.float32)
    numbers = as_floats(rows[..., :latent], Dtype.FLOAT8_E4M3).reshape(*rows.shape[:-1], -1, scales.piece)
    return (numbers * found[..., None]).reshape(*rows.shape[:-1], latent), [rows[..., latent:], behind]


def made_up(shape: tuple[int, ...], scales: Scales = V32, seed: int = 0) -> tuple[Floats, Floats]:
    """Return latents and RoPE's numbers [*shape, numbers], channels of very different sizes about a mean."""
    rng = np.random.default_rng(seed)
    latents, turned = (rng.standard_normal((*shape, size)).astype(np.float32) for size in (LATENT[scales], TURNED))
    latents += rng.standard_normal(latents.shape[-1]).astype(np.float32)
    return latents * rng.lognormal(0, 1, latents.shape[-1]).astype(np.float32), turned
