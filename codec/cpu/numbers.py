"""The cache's numbers as float32, and float32 as the cache's numbers."""

import numpy as np
import numpy.typing as npt

from manthan.codec.base import Dtype, Numbers
from manthan.codec.cpu.fp8 import widened

LARGEST = {Dtype.BFLOAT16: 3.3895313892515355e38, Dtype.FLOAT16: 65504.0, Dtype.FLOAT32: 3.4028234663852886e38}
LARGEST_BF16 = np.float32(LARGEST[Dtype.BFLOAT16])
Floats = npt.NDArray[np.float32]


def as_floats(x: Numbers, dtype: Dtype = Dtype.BFLOAT16) -> Floats:
    """uint16 is bf16's bits. dtype: of the numbers, without which fp8's bits cannot be told."""
    if dtype.is_fp8:
        return widened(x, dtype)
    if x.dtype == np.uint16:
        made: Floats = (x.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return made
    return x.astype(np.float32, copy=False)


def as_numbers(x: Floats, dtype: Dtype) -> Numbers:
    """Rounded, ties to even, within the dtype's range. x is overwritten."""
    np.clip(x, -LARGEST[dtype], LARGEST[dtype], out=x)
    if dtype is Dtype.BFLOAT16:
        bits = np.ascontiguousarray(x).view(np.uint32)
        rounded: Numbers = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
        return rounded
    return x.astype(dtype.numpy, copy=False)
