"""Blocks of a GPU's paged cache to codes in this process's memory and back, for stores that the GPU cannot reach."""

import threading
from collections.abc import Sequence

import numpy as np
import torch

from manthan.codec import wire
from manthan.codec.gpu.paged import GOOD, PagedCodec, status_cause
from manthan.vllm_hooks.worker.block_codec import Blocks, Buffer
from manthan.vllm_hooks.worker.capacity import STAGING_BYTES


class Staging(threading.local):
    """Two buffers for codes on their way, each thread's own. device, host: uint8 [rows, nbytes], the latter pinned."""

    def __init__(self, rows: int, nbytes: int, device: torch.device) -> None:
        self.device = torch.empty(rows, nbytes, dtype=torch.uint8, device=device)
        self.host = torch.empty(rows, nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


class PagedBlocks(Blocks):
    """Works on the caller's current stream, and waits for it: callers are threads beside the model's.

    header: what all encoded blocks have in common.
    """

    def __init__(self, codec: PagedCodec, header: wire.BlockHeader) -> None:
        self.codec = codec
        self.nbytes = codec.nbytes
        self._header = header
        self._device = codec.layout.caches[0].device
        self.batch = max(1, STAGING_BYTES // self.nbytes)
        self._staging = Staging(self.batch, self.nbytes, self._device)

    def encode_all(self, keys: Sequence[bytes], block_ids: Sequence[int]) -> list[Buffer | str]:
        n, staging = len(keys), self._staging
        ids, rows, headers, status = self._arguments(keys, block_ids)
        self.codec.encode(ids, staging.device, rows, headers, status)
        staging.host[:n].copy_(staging.device[:n], non_blocking=True)
        causes = [status_cause(code) for code in status.tolist()]  # waits
        codes = staging.host[:n].numpy()
        return [codes[i].copy() if cause is None else "encode" for i, cause in enumerate(causes)]

    def decode_all(
        self, keys: Sequence[bytes], block_ids: Sequence[int], bufs: Sequence[Buffer | None]
    ) -> list[str | None]:
        causes = [self._cause(buf) for buf in bufs]
        n = next((i for i, cause in enumerate(causes) if cause is not None), len(causes))
        if not n:
            return causes
        staging = self._staging
        host = staging.host.numpy()
        for row, buf in enumerate(bufs[:n]):
            host[row] = buf
        staging.device[:n].copy_(staging.host[:n], non_blocking=True)
        ids, rows, headers, status = self._arguments(keys[:n], block_ids[:n])
        self.codec.verify(staging.device, rows, headers, status)
        self.codec.decode(ids, staging.device, rows, status)
        return [*map(status_cause, status.tolist()), *causes[n:]]  # waits

    def _cause(self, buf: Buffer | None) -> str | None:
        if buf is None:
            return "missing"
        if len(buf) == self.nbytes:
            return None
        return "truncated" if len(buf) < self.nbytes else "trailing"

    def _arguments(
        self, keys: Sequence[bytes], block_ids: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """block_ids, slots, headers and status of the paged codec; the slots are the first of the staging buffer."""
        n = len(keys)
        numbers = torch.from_numpy(np.array([block_ids, range(n)], np.int64)).to(self._device)
        headers = torch.from_numpy(wire.header_rows(self._header, keys)).to(self._device)
        return numbers[0], numbers[1], headers, torch.full((n,), GOOD, dtype=torch.int32, device=self._device)
