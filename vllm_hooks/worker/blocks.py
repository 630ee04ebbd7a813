"""Blocks of the paged cache as the CPU reads, encodes, decodes and writes them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.logger import init_logger

from manthan.codec import wire
from manthan.codec.base import Numbers
from manthan.codec.block import BlockFormat, BlockShape
from manthan.codec.errors import CodecError, WireError
from manthan.manager.tiers.tier import Buffer, Found
from manthan.manager.transfer import Transfer
from manthan.vllm_hooks.worker.engine import MISSING
from manthan.vllm_hooks.worker.layout import Layer

logger = init_logger("vllm.manthan.worker")

Arrays: TypeAlias = tuple[Numbers, ...]
"""Keys and values of a block, or the arrays of `BlockShape.arrays`."""
Copies: TypeAlias = list[Arrays]
"""Arrays of blocks, from `PagedMemory.gather`."""


class PagedMemory(ABC):
    """Paged cache that the CPU reads and writes.

    Keys and values are [layers, heads, tokens, head_dim], bf16 and fp8 as their bits. `BlockShape.arrays` has all.
    """

    @abstractmethod
    def gather(self, block_id: int) -> Arrays:
        """Return a block's arrays."""

    def gather_soon(self, block_id: int) -> Callable[[], Arrays]:
        """Begin to gather a block on the current stream. Return a function to call once the stream has done so."""
        found = self.gather(block_id)
        return lambda: found

    @abstractmethod
    def scatter(self, block_id: int, *numbers: Numbers) -> None:
        """Write a block's arrays, and wait until they are written."""


class HostMemory(PagedMemory):
    """Paged cache in the CPU's memory, in the order that vLLM's attention kernels for the CPU use."""

    def __init__(self, layers: Sequence[Layer], shape: BlockShape) -> None:
        self._layers, self._shape = layers, shape
        self._rows = [_as_numpy(layer.rows) for layer in layers]

    def gather(self, block_id: int) -> Arrays:
        return _sorted([rows[block_id] for rows in self._rows], self._layers, self._shape)

    def scatter(self, block_id: int, *numbers: Numbers) -> None:
        _lay_out(numbers, self._layers, [rows[block_id] for rows in self._rows])


class DeviceMemory(PagedMemory):
    """Paged cache of a GPU. Blocks are copied as they are, and the CPU sorts their numbers.

    Each thread waits for its own copies only.
    """

    def __init__(self, layers: Sequence[Layer], shape: BlockShape) -> None:
        self._layers, self._shape = layers, shape

    def gather(self, block_id: int) -> Arrays:
        copied = self.gather_soon(block_id)
        _wait(self._layers[0].rows.device)
        return copied()

    def gather_soon(self, block_id: int) -> Callable[[], Arrays]:
        here = _copied(torch.stack([layer.rows[block_id] for layer in self._layers]))
        return lambda: _sorted(_as_numpy(here), self._layers, self._shape)

    def scatter(self, block_id: int, *numbers: Numbers) -> None:
        targets = [layer.rows[block_id] for layer in self._layers]
        rows: Numbers = np.empty((len(targets), targets[0].numel()), numbers[0].dtype)
        _lay_out(numbers, self._layers, rows)
        torch._foreach_copy_(targets, list(torch.from_numpy(rows).view(targets[0].dtype).to(targets[0].device)))
        _wait(targets[0].device)


class PackedMemory(PagedMemory):
    """Paged cache whose blocks are stored as bytes, in the CPU's memory or a GPU's."""

    def __init__(self, layers: Sequence[Layer], shape: BlockShape) -> None:
        self._rows, self._shape = [layer.rows for layer in layers], shape

    def gather(self, block_id: int) -> Arrays:
        copied = self.gather_soon(block_id)
        _wait(self._rows[0].device)
        return copied()

    def gather_soon(self, block_id: int) -> Callable[[], Arrays]:
        here = _copied(torch.cat([rows[block_id] for rows in self._rows]))
        return lambda: (here.numpy().reshape(self._shape.numbers), np.empty(self._shape.value_numbers, np.uint8))

    def scatter(self, block_id: int, *numbers: Numbers) -> None:
        device = self._rows[0].device
        host = torch.from_numpy(numbers[0].reshape(-1).copy())  # torch wants writable memory
        parts = host.to(device).split([rows.shape[1] for rows in self._rows])
        for rows, part in zip(self._rows, parts, strict=True):
            rows[block_id].copy_(part)
        _wait(device)


class BesideMemory(PagedMemory):
    """Paged cache in which some layers are coded and the others are stored as bytes."""

    def __init__(self, coded: PagedMemory, others: PackedMemory) -> None:
        self._coded, self._others = coded, others

    def gather(self, block_id: int) -> Arrays:
        return *self._coded.gather(block_id), self._others.gather(block_id)[0]

    def gather_soon(self, block_id: int) -> Callable[[], Arrays]:
        coded, others = self._coded.gather_soon(block_id), self._others.gather_soon(block_id)
        return lambda: (*coded(), others()[0])

    def scatter(self, block_id: int, *numbers: Numbers) -> None:
        self._coded.scatter(block_id, *numbers[:-1])
        self._others.scatter(block_id, numbers[-1])


def _copied(there: torch.Tensor) -> torch.Tensor:
    """Return a copy in the CPU's memory, which the current stream writes if it is from a GPU."""
    here = torch.empty(there.shape, dtype=there.dtype, pin_memory=there.device.type == "cuda")
    return here.copy_(there, non_blocking=True)


def _as_numpy(tensor: torch.Tensor) -> NDArray[Any]:
    """Return the same memory; bf16 as bits in uint16."""
    return (tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor).numpy()


def _sorted(rows: Sequence[NDArray[Any]] | NDArray[Any], layers: Sequence[Layer], shape: BlockShape) -> Arrays:
    """Return keys and values of a block. rows: the block's numbers in each layer, in the order of memory."""
    keys, values = (np.empty(numbers, rows[0].dtype) for numbers in (shape.numbers, shape.value_numbers))
    for n, (row, layer) in enumerate(zip(rows, layers, strict=True)):
        # With mode="clip" numpy needs no buffer. All positions are in range.
        np.take(row, layer.keys, out=keys[n].reshape(-1), mode="clip")
        np.take(row, layer.values, out=values[n].reshape(-1), mode="clip")
    return keys, values


def _lay_out(numbers: Sequence[Numbers], layers: Sequence[Layer], rows: Iterable[NDArray[Any]]) -> None:
    """Write keys and values of a block into each layer's row."""
    keys, values = numbers
    for n, (row, layer) in enumerate(zip(rows, layers, strict=True)):
        row[layer.keys], row[layer.values] = keys[n].reshape(-1), values[n].reshape(-1)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class CpuBlocks:
    """Blocks of a KV cache group, gathered, encoded and decoded on the CPU's cores. Thread-safe."""

    def __init__(
        self, memory: PagedMemory, format: BlockFormat, *others: BlockFormat, exacts: Sequence[int] = (0,)
    ) -> None:
        """Compile all kernels now. format: for jobs that name no codec. others: for jobs that name them, and to read.

        exacts: possible numbers of exact first tokens of a block.
        """
        self.formats, self._memory, self.format, self._exacts = (format, *others), memory, format, exacts
        self.nbytes = format.shape.nbytes
        """Number of bytes of a gathered block."""
        for each in self.formats:
            each.warm_up(exacts)

    def add(self, format: BlockFormat) -> None:
        """Read blocks of `format` too, and write them in transfers that name the format's codec."""
        format.warm_up(self._exacts)
        self.formats = (*self.formats, format)

    def format_of(self, buf: Buffer) -> BlockFormat:
        """Return the format with a block's fingerprint; if none has it, the first, whose decoding refuses the block."""
        mark = np.frombuffer(buf, np.uint8)[wire.FINGERPRINT].tobytes()
        return next((format for format in self.formats if format.fingerprint == mark), self.formats[0])

    def gather(self, job: Transfer) -> Copies:
        """Return copies of a store's blocks in the paged cache."""
        return [self._memory.gather(block_id) for block_id in job.block_ids.tolist()]

    def encode(self, job: Transfer, copies: Copies) -> list[Buffer | str]:
        """Return a store's compressed blocks; the cause instead of one that cannot be encoded."""
        shape, formats = self.format.shape, {"": self.format} | {each.codec: each for each in self.formats}
        format = formats["" if shape.is_raw else job.codec]
        told = zip(job.block_hashes, copies, job.first_tokens(shape.tokens), job.exacts(shape.tokens), strict=True)
        encoded: list[Buffer | str] = []
        for key, numbers, first_token, exact in told:
            try:
                encoded.append(format.encode(*numbers, key=key, first_token=first_token, exact=exact, mark=job.mark))
            except CodecError as error:
                logger.warning("Manthan: a block is not kept cold: %s", error)
                encoded.append("encode")
        return encoded

    def decode(self, key: bytes, block_id: int, found: Found) -> str | None:
        """Check a compressed block, of one or several shards, and decode it. Return the cause of a failure."""
        if found is None or isinstance(found, str):
            return MISSING if found is None else found
        try:
            shards = [self.format_of(shard).decode_shard(shard, key=key) for shard in wire.split(found)]
            if any(shard.ignored for shard in shards):
                return "checksum"  # a refinement is damaged, so that the block has not the level noted for it
            numbers = self.format.joined(shards)
        except WireError as error:
            return error.cause
        except CodecError:
            return "decode"
        self._memory.scatter(block_id, *numbers)
        return None
