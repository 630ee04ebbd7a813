"""Half of bf16's bytes, and nearly exact: each vector is scaled by its largest number and rounded to eight bits."""

import numpy as np

from manthan.codec import Codec, CodecSpec

LARGEST = 127


class Int8(Codec):
    """Eight bits a number, no rotation: half of bf16."""

    backend = "numpy"

    def __init__(self, head_dim: int, backend: str = "numpy") -> None:
        super().__init__(CodecSpec("int8", key_bits=8, value_bits=8, rotated=False), head_dim)

    def warm_up(self) -> None:
        """Nothing to compile."""

    def _encode(self, x, bits, scales, planes) -> int:
        numbers = widened(x)
        finite = np.isfinite(numbers).all(axis=1)
        if not finite.all():
            return int(finite.argmin())
        scale = rounded(np.abs(numbers).max(axis=1) / LARGEST)
        steps = np.where(widened(scale) > 0, widened(scale), 1)[:, None]
        scales[:] = scale.view(np.uint8)
        planes[:] = np.rint(numbers / steps).clip(-LARGEST, LARGEST).astype(np.int8).view(np.uint8).reshape(-1)
        return -1

    def _decode(self, scales, planes, bits, out) -> int:
        steps = widened(scales.view(np.uint16))
        if not np.isfinite(steps).all():
            return int(np.isfinite(steps).argmin())
        numbers = planes.view(np.int8).reshape(out.shape).astype(np.float32) * steps[:, None]
        out[:] = numbers if out.dtype == np.float32 else rounded(numbers)
        return -1


def widened(x: np.ndarray) -> np.ndarray:
    """float32 of float32, or of uint16 that holds bf16 bits."""
    return x if x.dtype == np.float32 else (x.astype(np.uint32) << 16).view(np.float32)


def rounded(x: np.ndarray) -> np.ndarray:
    """bf16 bits of finite float32, ties away from zero."""
    return ((np.ascontiguousarray(x, np.float32).view(np.uint32) + 0x8000) >> 16).astype(np.uint16)
