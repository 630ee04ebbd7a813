"""Half of bf16's bytes, and nearly exact: each vector is scaled by its largest number and rounded to eight bits."""

from dataclasses import dataclass

import numpy as np

from manthan.codec import Codec, NonFiniteError
from manthan.codec.cpu.numbers import as_floats, as_numbers

LARGEST = 127


@dataclass(frozen=True)
class Int8:
    """The preset that the entry point names."""

    name: str = "int8"

    def codec(self, head_dim, facts):
        return Int8Codec(self.name)


class Int8Codec(Codec):
    """Eight bits a number, no rotation: half of bf16."""

    def __init__(self, name):
        self.name = name

    def max_nbytes(self, section):
        return len(section.vector_kinds) * section.vectors * (4 + section.head_dim)

    def encode(self, x, section, positions, out):
        numbers = as_floats(x).reshape(-1, section.head_dim)
        finite = np.isfinite(numbers).all(axis=1)
        if not finite.all():
            raise NonFiniteError(f"vector {finite.argmin()} holds a NaN or an infinity.")
        scales = (np.abs(numbers).max(axis=1) / LARGEST).astype(np.float32)
        steps = np.rint(numbers / np.where(scales > 0, scales, 1)[:, None]).astype(np.int8)
        out[: scales.nbytes], out[scales.nbytes :] = scales.view(np.uint8), steps.view(np.uint8).ravel()
        return self.max_nbytes(section)

    def decode(self, codes, section, positions):
        count = len(section.vector_kinds) * section.vectors
        scales, steps = codes[: 4 * count].copy().view(np.float32), codes[4 * count :].view(np.int8)
        numbers = steps.reshape(count, -1).astype(np.float32) * scales[:, None]
        return as_numbers(numbers.reshape(section.shape), section.dtype)


INT8 = Int8()
