"""Whole blocks between a paged KV cache and encoded blocks in the same device's memory.

This is what a GPU backend offers beside `Codec`: it reads and writes the paged cache of all layers in place, and leaves
encoded blocks as `manthan.codec.wire` describes them, header and checksum included.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from manthan.codec.base import CodecSpec
from manthan.codec.errors import ShapeError
from manthan.codec.wire import BlockHeader, block_nbytes, field_cause

if TYPE_CHECKING:
    import torch

GOOD = 2**31 - 1
"""The status of a block with which nothing is wrong."""
BAD_CHECKSUM = -1
BAD_HEADER = -2
"""Minus the offset of the first byte of the header that is not the expected one."""


@dataclass(frozen=True)
class PagedLayout:
    """Where the vectors of a paged cache lie.

    caches: a tensor for each layer, of one dtype (bfloat16, float16 or float32) on one device. The first number of a
    vector of head h, token t in block i is at element `at + i * block_stride + h * head_stride + t * token_stride`
    from the tensor's first, with `at` key_at or value_at; its other numbers follow it.
    """

    caches: "tuple[torch.Tensor, ...]"
    heads: int
    tokens: int
    head_dim: int
    block_stride: int
    head_stride: int
    token_stride: int
    key_at: int
    value_at: int


class PagedCodec(ABC):
    """Encodes and decodes blocks of one paged cache, on the current stream, without waiting for the device.

    All tensors are on the caches' device. block_ids: int64 [n], blocks of the paged cache. codes: uint8
    [slots, nbytes], rows a multiple of 16 bytes apart. slots: int64 [n], rows of `codes`. headers: uint8 [n, 160], from
    `wire.header_rows`. status: int32 [n], written.
    """

    def __init__(self, spec: CodecSpec, layout: PagedLayout, header: BlockHeader) -> None:
        shape = (len(layout.caches), layout.heads, layout.tokens, layout.head_dim)
        if shape != (header.layers, header.heads, header.tokens, header.head_dim) or header.codec != spec.name:
            raise ShapeError(f"the header is of {header}: the paged cache has {shape} and the codec is {spec.name}.")
        self.spec = spec
        self.layout = layout
        self.nbytes = block_nbytes(header)

    @abstractmethod
    def encode(
        self,
        block_ids: "torch.Tensor",
        codes: "torch.Tensor",
        slots: "torch.Tensor",
        headers: "torch.Tensor",
        status: "torch.Tensor",
    ) -> None:
        """Encode block_ids[i] into codes[slots[i]].

        status[i] becomes GOOD, or the index of a vector that is not finite; the encoded block is of no use then.
        """

    @abstractmethod
    def seal(self, codes: "torch.Tensor", slots: "torch.Tensor", headers: "torch.Tensor") -> None:
        """Give codes[slots[i]], whose payload was written otherwise, headers[i] and the checksum."""

    @abstractmethod
    def verify(
        self, codes: "torch.Tensor", slots: "torch.Tensor", headers: "torch.Tensor", status: "torch.Tensor"
    ) -> None:
        """Check codes[slots[i]] against headers[i] and its checksum: status[i] becomes GOOD, or what `status_cause`
        explains."""

    @abstractmethod
    def decode(
        self, block_ids: "torch.Tensor", codes: "torch.Tensor", slots: "torch.Tensor", status: "torch.Tensor"
    ) -> None:
        """Decode codes[slots[i]] into block_ids[i] where `verify` found it good; other blocks are left as they were.

        status[i] becomes the index of a vector whose scale is not finite, which a right checksum does not let happen.
        """


def status_cause(status: int) -> str | None:
    """A status as a metric label; None for GOOD."""
    if status == GOOD:
        return None
    if status >= 0:
        return "decode"
    return "checksum" if status == BAD_CHECKSUM else field_cause(BAD_HEADER - status)
