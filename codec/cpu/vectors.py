"""Sections in a codec that takes vectors one by one, wherever they come from."""

import numpy as np

from manthan.codec.base import Codec, Codes, Dtype, Numbers, Positions, Section, SectionCodec
from manthan.codec.errors import SizeError

FLOAT16_MAX = 65504.0


class VectorSections(SectionCodec):
    """Encodes a section's vectors in their order. float16 goes by way of float32, and comes back within its range."""

    def __init__(self, codec: Codec) -> None:
        self.name = codec.name
        self._codec = codec
        self._codec.threads = 1  # the caller decides how many blocks go side by side

    def warm_up(self) -> None:
        self._codec.warm_up()

    def max_nbytes(self, section: Section) -> int:
        return sum(self._codec.encoded_nbytes(section.vectors, kind) for kind in section.vector_kinds)

    def encode(self, x: Numbers, section: Section, positions: Positions, out: Codes) -> int:
        at = 0
        parts = x.reshape(len(section.vector_kinds), -1, section.head_dim)
        for vectors, kind in zip(parts, section.vector_kinds, strict=True):
            end = at + self._codec.encoded_nbytes(section.vectors, kind)
            wide = vectors.astype(np.float32) if vectors.dtype == np.float16 else vectors
            self._codec.encode(wide, kind, out=out[at:end])
            at = end
        return at

    def decode(self, codes: Codes, section: Section, positions: Positions) -> Numbers:
        if codes.size != self.max_nbytes(section):
            raise SizeError(f"{codes.size} bytes are not the codes of {section}: {self.max_nbytes(section)} are.")
        kinds, n = section.vector_kinds, section.vectors
        dtype = np.uint16 if section.dtype is Dtype.BFLOAT16 else np.float32
        vectors = np.empty((len(kinds), n, section.head_dim), dtype)
        at = 0
        for part, kind in zip(vectors, kinds, strict=True):
            end = at + self._codec.encoded_nbytes(n, kind)
            self._codec.decode(codes[at:end], n, kind, dtype, out=part)
            at = end
        if section.dtype is Dtype.FLOAT16:
            return np.clip(vectors, -FLOAT16_MAX, FLOAT16_MAX).astype(np.float16).reshape(section.shape)
        return vectors.reshape(section.shape)
