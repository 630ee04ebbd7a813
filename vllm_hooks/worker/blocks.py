"""Blocks of the paged cache as the CPU reads, encodes, decodes and writes them."""

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
"""A block's arrays, in the order of `BlockShape.arrays`: keys, values, and bytes of layers without a codec if any. If
all layers are stored as bytes, the first array has the bytes, and the second is empty."""
Copies: TypeAlias = list[Arrays]
"""Arrays of each block, as `PagedMemory.gather` returns them."""


class PagedMemory:
    """Paged cache, in the CPU's memory or a GPU's, as the CPU reads and writes it.

    Keys and values are [layers, heads, tokens, head_dim], bf16 and fp8 as their bits. `BlockShape.arrays` has the shape
    and dtype of each array. A call waits only for the current stream of its own thread.

    Args:
        shape: of a block.
        coded: layers with keys and values, or with latents (MLA).
        raw: layers stored as bytes: all layers if the shape `is_raw`, else the layers of `BlockShape.opaque`.
    """

    def __init__(self, shape: BlockShape, coded: Sequence[Layer], raw: Sequence[Layer] = ()) -> None:
        self._shape, self._coded = shape, coded
        self._rows, self._raw = [layer.rows for layer in coded], [layer.rows for layer in raw]
        self._device = (*self._rows, *self._raw)[0].device
        self._is_host = self._device.type == "cpu"

    def gather(self, block_id: int) -> Arrays:
        """Return a block's arrays."""
        if self._is_host:  # `_arrays` copies the numbers, in their final order
            return self._arrays([rows[block_id] for rows in self._rows], [rows[block_id] for rows in self._raw])
        gathered = self.gather_soon(block_id)
        self._wait()
        return gathered()

    def gather_soon(self, block_id: int) -> Callable[[], Arrays]:
        """Begin to gather a block on the current stream. Return a function for the arrays, to call after the copies."""
        coded = _copied(torch.stack([rows[block_id] for rows in self._rows])) if self._rows else ()
        raw = [_copied(torch.cat([rows[block_id] for rows in self._raw]))] if self._raw else []
        return lambda: self._arrays(coded, raw)

    def scatter(self, block_id: int, *numbers: Numbers) -> None:
        """Write arrays into a block of the cache, and wait until all are written. numbers: as `gather` returns them."""
        if self._rows:
            there = [rows[block_id] for rows in self._rows]
            new: Numbers = np.empty((0 if self._is_host else len(there), there[0].numel()), numbers[0].dtype)
            rows = map(_as_numpy, there) if self._is_host else new
            for n, (row, layer) in enumerate(zip(rows, self._coded, strict=True)):
                row[layer.keys], row[layer.values] = numbers[0][n].reshape(-1), numbers[1][n].reshape(-1)
            if not self._is_host:
                torch._foreach_copy_(there, list(torch.from_numpy(new).view(there[0].dtype).to(self._device)))
        if self._raw:
            octets = torch.from_numpy(numbers[2 if self._rows else 0].reshape(-1).copy())  # torch wants writable memory
            parts = octets.to(self._device).split([rows.shape[1] for rows in self._raw])
            torch._foreach_copy_([rows[block_id] for rows in self._raw], parts)
        self._wait()

    def _arrays(self, coded: Iterable[torch.Tensor], raw: Sequence[torch.Tensor]) -> Arrays:
        """Return a block's arrays. coded: numbers of each coded layer, in the order of memory. raw: bytes, in parts."""
        octets = np.concatenate([part.numpy() for part in raw]) if raw else None
        if octets is not None and self._shape.is_raw:
            return octets.reshape(self._shape.numbers), np.empty(self._shape.value_numbers, np.uint8)
        (numbers, dtype), (value_numbers, _), *_ = self._shape.arrays
        keys, values = np.empty(numbers, dtype), np.empty(value_numbers, dtype)
        for n, (row, layer) in enumerate(zip(map(_as_numpy, coded), self._coded, strict=True)):
            # With mode="clip" numpy needs no buffer. All positions are in range.
            np.take(row, layer.keys, out=keys[n].reshape(-1), mode="clip")
            np.take(row, layer.values, out=values[n].reshape(-1), mode="clip")
        if octets is None or self._shape.opaque is None:
            return keys, values
        return keys, values, octets.reshape(self._shape.opaque.numbers)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def _copied(there: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the CPU's memory: `there` itself, or a pinned copy that the current stream makes."""
    if there.is_cpu:
        return there
    here = torch.empty(there.shape, dtype=there.dtype, pin_memory=True)
    return here.copy_(there, non_blocking=True)


def _as_numpy(tensor: torch.Tensor) -> NDArray[Any]:
    """Return an array of the tensor's memory, with bf16 as bits in uint16."""
    return (tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor).numpy()


class CpuBlocks:
    """Blocks of a KV cache group, gathered, encoded and decoded on the CPU's cores. Thread-safe."""

    def __init__(self, memory: PagedMemory, *formats: BlockFormat, exacts: Sequence[int] = (0,)) -> None:
        """Compile all kernels now.

        formats: of compressed blocks; the first for jobs that name no codec, each for jobs that name its codec. exacts:
        possible counts of exact tokens, which are stored bit for bit, at the begin of a block.
        """
        self.formats, self._memory, self.format, self._exacts = formats, memory, formats[0], exacts
        self.nbytes = self.format.shape.nbytes
        """Number of bytes of a gathered block."""
        for each in self.formats:
            each.warm_up(exacts)

    def add(self, format: BlockFormat) -> None:
        """Decode blocks of `format`, too, and encode blocks in `format` for transfers that name the format's codec."""
        format.warm_up(self._exacts)
        self.formats = (*self.formats, format)

    def format_of(self, buf: Buffer) -> BlockFormat:
        """Return the format with the fingerprint in a block's header; else the first, which refuses the block."""
        mark = np.frombuffer(buf, np.uint8)[wire.FINGERPRINT].tobytes()
        return next((format for format in self.formats if format.fingerprint == mark), self.formats[0])

    def gather(self, job: Transfer) -> Copies:
        """Return arrays copied from the blocks of a store (job from the paged cache to the tiers)."""
        return [self._memory.gather(block_id) for block_id in job.block_ids.tolist()]

    def encode(self, job: Transfer, copies: Copies) -> list[Buffer | str]:
        """Return a store's compressed blocks, in order; for a block that cannot be encoded, the cause."""
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
        """Check a compressed block, and decode it into the paged cache. Return the cause of a failure, or None.

        found: result of reading a tier, a store of compressed blocks. A block of another engine may be several shards
        (parts that its ranks had), one behind the other.
        """
        if found is None or isinstance(found, str):
            return MISSING if found is None else found
        try:
            shards = [self.format_of(shard).decode_shard(shard, key=key) for shard in wire.split(found)]
            if any(shard.ignored for shard in shards):
                return "checksum"  # a refinement, which adds precision, is damaged: the block is worse than noted
            numbers = self.format.joined(shards)
        except WireError as error:
            return error.cause
        except CodecError:
            return "decode"
        self._memory.scatter(block_id, *numbers)
        return None
