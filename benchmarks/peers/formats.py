"""Number formats of KV caches, without entropy coding: fp8, and NVFP4.

fp8 is E4M3 with a scale of 1, the default of vLLM's `--kv-cache-dtype fp8`. NVFP4 (NVIDIA, 2025) has 4 bits (E2M1) for
a number, a scale in E4M3 for each group of 16 numbers, and a scale in float32 for a tile [tokens, head_dim].

    NVFP4: | the tile's scale, float32 | scales of groups, E4M3 | numbers, 4 bits each |
"""

import numpy as np

from manthan.benchmarks.peers import Floats, Peer, pack, unpack
from manthan.codec.base import ByteArray, Dtype, Kind
from manthan.codec.cpu.numbers import as_floats, as_numbers

E4M3 = Dtype.FLOAT8_E4M3
LARGEST = 448.0
"""Largest number of E4M3."""
LEVELS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
GROUP = 16


def encode_fp8(x: Floats, kind: Kind) -> ByteArray:
    """Return the numbers as E4M3, a byte for each number."""
    return as_numbers(x.copy(), E4M3).ravel()


def decode_fp8(encoded: ByteArray, kind: Kind, shape: tuple[int, int]) -> Floats:
    """Undo `encode_fp8`."""
    return as_floats(encoded, E4M3).reshape(shape)


def encode_nvfp4(x: Floats, kind: Kind) -> ByteArray:
    """Return the bytes of a tile. The count of its numbers must be a multiple of GROUP."""
    groups = x.reshape(-1, GROUP)
    whole = np.float32(np.abs(x).max() / (LARGEST * LEVELS[-1])) or np.float32(1)
    scales = as_numbers(np.abs(groups).max(1) / (LEVELS[-1] * whole), E4M3)
    steps = as_floats(scales, E4M3)[:, None] * whole
    sizes = np.abs(groups) / np.where(steps == 0, 1, steps)
    q = np.searchsorted((LEVELS[1:] + LEVELS[:-1]) / 2, sizes) + 8 * (groups < 0)
    return np.concatenate([np.array([whole], "<f4").view(np.uint8), scales, pack(q, 4)])


def decode_nvfp4(encoded: ByteArray, kind: Kind, shape: tuple[int, int]) -> Floats:
    """Undo `encode_nvfp4`."""
    groups = shape[0] * shape[1] // GROUP
    whole, scales, numbers = np.split(encoded, [4, 4 + groups])
    q = unpack(numbers, 4, groups * GROUP).reshape(groups, GROUP)
    steps = as_floats(scales, E4M3)[:, None] * whole.copy().view("<f4")
    return (LEVELS[q % 8] * np.where(q < 8, 1, -1) * steps).astype(np.float32).reshape(shape)


FP8 = Peer("fp8", encode_fp8, decode_fp8)
NVFP4 = Peer("nvfp4", encode_nvfp4, decode_nvfp4)
