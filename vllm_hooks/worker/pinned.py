"""Pinned RAM, which a GPU reads and writes directly. A thread pins piece by piece, so that no caller waits for all.

The thread begins with the first served step. Earlier, vLLM captures CUDA graphs, and the CUDA driver would break off a
capture if memory were pinned meanwhile.

Most of the time goes to the operating system, which gives and clears pages. Huge pages (`madvise`) are 512 times fewer.
Pages are written before the driver pins them, so that the driver's locks, which copies need, are held for less time.
"""

import mmap
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

import torch
from vllm.logger import init_logger

from manthan.manager.config.resolve import ConfigError
from manthan.manager.config.sentences import human_bytes
from manthan.manager.tiers.arena import GRANULE, Extent
from manthan.vllm_hooks import compat

logger = init_logger("vllm.manthan.worker")

PIECE = 256 << 20
"""Bytes pinned at once, a multiple of a huge page."""
PAGE, HUGE = 4096, 2 << 20


class PinnedRam:
    """Pinned RAM. nbytes: final size. device: GPU.

    Each piece is pinned separately, and the driver refuses a copy across pieces. An unused GRANULE behind each piece
    keeps a block's extent from spanning two. The first piece is pinned at once, all further pieces after `start`.
    Raises ConfigError if the first piece cannot be pinned.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes, self._device = nbytes, device
        self._pinned = 0
        self._stopped = False
        self._thread: threading.Thread | None = None
        try:
            self.buffer = _pages(nbytes + GRANULE * (max(0, nbytes - 1) // (PIECE - GRANULE)))
            starts = range(0, len(self.buffer), PIECE)
            self._spans = [Extent(at, min(PIECE - GRANULE, len(self.buffer) - at)) for at in starts]
            if self._spans:
                self._pin(0)
        except (OSError, RuntimeError) as error:
            raise ConfigError(
                f"the cold store's {human_bytes(nbytes)} of RAM cannot be pinned ({error}): lower "
                "tiers.max_bytes or host_bytes, or raise the memlock limit (ulimit -l)."
            ) from None

    @property
    def spans(self) -> Sequence[Extent]:
        """Extents of `buffer` that are pinned so far."""
        return self._spans[: self._pinned]

    def start(self) -> None:
        """Pin the remaining pieces on a thread, unless an earlier call did."""
        if self._thread is None and not self.is_whole:
            size = human_bytes(self.nbytes)
            logger.info(f"Manthan: pinning {size} of RAM for compressed blocks; pinned parts are used already")
            self._thread = threading.Thread(target=self._pin_others, name="manthan-pin", daemon=True)
            self._thread.start()

    @property
    def is_whole(self) -> bool:
        return self._pinned == len(self._spans)

    def close(self) -> None:
        """Stop pinning after the current piece, and unpin all pieces. The object is of no use afterwards."""
        self._stopped = True
        self.wait()
        for at in range(self._pinned):
            with suppress(RuntimeError):  # the GPU does not respond
                torch.cuda.cudart().cudaHostUnregister(self._piece_of(at).data_ptr())
        self._spans, self._pinned = [], 0
        self.buffer = torch.empty(0, dtype=torch.uint8)

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _pin_others(self) -> None:
        size, began = human_bytes(self.nbytes), time.monotonic()
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            with suppress(ImportError):  # without cuda-bindings: graphs are captured already
                from cuda.bindings import runtime

                relaxed = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
                runtime.cudaThreadExchangeStreamCaptureMode(relaxed)  # else pinning breaks off another thread's capture
        while not (self.is_whole or self._stopped):
            try:
                self._pin(self._pinned)
            except RuntimeError as error:
                done = human_bytes(sum(span.nbytes for span in self.spans))
                logger.warning(
                    f"Manthan: only {done} of the cold store's {size} of RAM could be pinned ({error}), and no more is "
                    "used: lower tiers.max_bytes or host_bytes, or raise the memlock limit (ulimit -l)."
                )
                return
        if self.is_whole:
            seconds = time.monotonic() - began
            logger.info(f"Manthan: {size} of RAM for compressed blocks are pinned, in {seconds:.1f} s")

    def _pin(self, number: int) -> None:
        piece = self._piece_of(number)
        piece.numpy()[::PAGE] = 0  # the system gives the pages now, not inside the driver's call
        compat.pin(piece)
        self._pinned = number + 1

    def _piece_of(self, number: int) -> torch.Tensor:
        start, nbytes = self._spans[number]
        return self.buffer[start : start + nbytes]


def _pages(nbytes: int) -> torch.Tensor:
    """Return unpinned memory, uint8 [nbytes], in huge pages if the system has some. Raises OSError."""
    pages = mmap.mmap(-1, nbytes + HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    found = torch.frombuffer(pages, dtype=torch.uint8)
    begin = -found.data_ptr() % HUGE
    return found[begin : begin + nbytes]
