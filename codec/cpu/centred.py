"""Sections whose keys are coded less their block's mean before RoPE, or as they are where a codec has no bits for a
mean; see `manthan.codec.centred`."""

from typing import Any

import numpy as np

from manthan.codec.base import CodecSpec, Codes, Dtype, Kind, Numbers, Positions, Section, SectionCodec, align16
from manthan.codec.centred import Places, from_bytes, to_bytes
from manthan.codec.cpu.means import Means
from manthan.codec.cpu.numpy_codec import NumpyCodec
from manthan.codec.cpu.vectors import FLOAT16_MAX
from manthan.codec.errors import SizeError
from manthan.codec.rope import Rope


class CentredSections(SectionCodec):
    """rope: how the model turns its keys; with None, the mean is that of the keys as they are.

    fused: True for the numba kernels, False for plain numpy, None for whichever is there. Raises HeadDimError.
    """

    def __init__(self, spec: CodecSpec, head_dim: int, rope: Rope | None = None, *, fused: bool | None = None) -> None:
        self.name, self.spec, self.head_dim = spec.name, spec, head_dim
        self._vectors = NumpyCodec(spec, head_dim, fused=fused)
        self._vectors.threads = 1  # the caller decides how many blocks go side by side
        self._means = Means(spec.mean_bits, head_dim, rope, fused=fused) if spec.mean_bits else None

    def warm_up(self) -> None:
        self._vectors.warm_up()
        if self._means is not None:
            self._means.warm_up()

    def max_nbytes(self, section: Section) -> int:
        return sum(self._places(section, kind).nbytes for kind in section.vector_kinds)

    def encode(self, x: Numbers, section: Section, positions: Positions, out: Codes) -> int:
        """Raises NonFiniteError, for keys of 2**LIMIT and more too."""
        at = 0
        runs = x.reshape(len(section.vector_kinds), -1, section.tokens, section.head_dim)
        for numbers, kind in zip(runs, section.vector_kinds, strict=True):
            places = self._places(section, kind)
            codes = out[at : at + places.nbytes]
            codes[:] = 0
            wide = numbers.astype(np.float32) if numbers.dtype == np.float16 else numbers
            self._encode(wide, kind, places, positions, codes)
            at += places.nbytes
        return at

    def decode(self, codes: Codes, section: Section, positions: Positions) -> Numbers:
        """Raises SizeError; NonFiniteError for a scale, or a mean's step, that no encoder writes."""
        if codes.size != self.max_nbytes(section):
            raise SizeError(f"{codes.size} bytes are not the codes of {section}: {self.max_nbytes(section)} are.")
        kinds = section.vector_kinds
        dtype = np.uint16 if section.dtype is Dtype.BFLOAT16 else np.float32
        numbers = np.empty((len(kinds), section.layers * section.heads, section.tokens, section.head_dim), dtype)
        at = 0
        for runs, kind in zip(numbers, kinds, strict=True):
            places = self._places(section, kind)
            self._decode(codes[at : at + places.nbytes], kind, places, positions, runs)
            at += places.nbytes
        if section.dtype is Dtype.FLOAT16:
            return np.clip(numbers, -FLOAT16_MAX, FLOAT16_MAX).astype(np.float16).reshape(section.shape)
        return numbers.reshape(section.shape)

    def _places(self, section: Section, kind: Kind) -> Places:
        return Places.of(self.spec, kind, section.layers * section.heads, section.tokens, section.head_dim)

    def _encode(self, x: Numbers, kind: Kind, places: Places, positions: Positions, codes: Codes) -> None:
        """x: [runs, tokens, head_dim] uint16 or float32."""
        if kind == "key" and self._means is not None:
            x = self._means.take_off(x, positions, codes[places.steps], codes[places.means])
        runs, tokens, dim = x.shape
        made = self._vectors.encode(x.reshape(-1, dim), kind)
        n = runs * tokens
        codes[places.scales] = to_bytes(made[: 2 * n].view("<u2").reshape(runs, tokens)).ravel()
        codes[places.planes] = made[align16(2 * n) :][: places.planes.stop - places.planes.start]

    def _decode(self, codes: Codes, kind: Kind, places: Places, positions: Positions, out: Numbers) -> None:
        """out: [runs, tokens, head_dim] uint16 or float32."""
        runs, tokens, dim = out.shape
        n, planes = runs * tokens, codes[places.planes]
        buf = np.zeros(self._vectors.encoded_nbytes(n, kind), np.uint8)
        buf[: 2 * n].view("<u2")[:] = from_bytes(codes[places.scales].reshape(runs, 1 + tokens)).ravel()
        buf[align16(2 * n) :][: planes.size] = planes
        if kind == "value" or self._means is None:
            self._vectors.decode(buf, n, kind, out.dtype, out=out.reshape(n, dim))
            return
        x: Any = self._vectors.decode(buf, n, kind).reshape(out.shape)
        self._means.put_back(x, positions, codes[places.steps], codes[places.means], out)
