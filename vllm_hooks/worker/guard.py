"""What codecs do to KV of the model that is being served: measured once, on a thread beside the model's."""

import threading
from collections.abc import Callable, Sequence

import torch
from vllm.logger import init_logger

from manthan.codec.block import BlockFormat
from manthan.codec.errors import CodecError
from manthan.codec.fidelity import Sample, measure
from manthan.codec.rope import Rope
from manthan.vllm_hooks.messages import SpillBlock, Verdict
from manthan.vllm_hooks.worker.blocks import PagedMemory
from manthan.vllm_hooks.worker.streams import behind, model_event
from manthan.vllm_hooks.worker.threads import Threads, allowed_cpus

logger = init_logger("vllm.manthan.worker")


class Guard:
    """Answers the scheduler half, whatever happens: until it has, nobody is evicted.

    formats: the configured one first, then those that may take its place, finer ones last. rope: how the model turns
    keys, if that is known. prepare: called with the format that is to take its place, before the answer.
    """

    def __init__(
        self,
        memory: PagedMemory,
        formats: Sequence[BlockFormat],
        rope: Rope | None,
        device: torch.device,
        prepare: Callable[[BlockFormat], None],
    ) -> None:
        self._memory, self._formats, self._rope, self._device, self._prepare = memory, formats, rope, device, prepare
        self._lock = threading.Lock()
        self._verdicts: list[Verdict] = []
        self._threads: Threads | None = None

    def warm_up(self) -> None:
        """Compile on a thread, while the server starts, what the first measurement would otherwise wait for: measuring
        is the CPU's codecs' wherever blocks are encoded."""
        threading.Thread(target=self._formats[0].warm_up, name="manthan-warm-up", daemon=True).start()

    def submit(self, samples: Sequence[SpillBlock]) -> None:
        """Measure these blocks, once what the model computes in this step was begun."""
        if not samples:
            return
        if self._threads is None:
            self._threads = Threads(1, "manthan-guard", allowed_cpus() if self._device.type == "cpu" else ())
        self._threads.submit(self._measure, samples, model_event(self._device))

    def take(self) -> list[Verdict]:
        """What was found since the last call."""
        with self._lock:
            taken, self._verdicts = self._verdicts, []
            return taken

    def wait(self) -> None:
        """Until nothing reads the paged cache."""
        if self._threads is not None:
            self._threads.wait()

    def shutdown(self) -> None:
        """Wait for what is under way."""
        if self._threads is not None:
            self._threads.shutdown()

    def _measure(self, samples: Sequence[SpillBlock], model: torch.cuda.Event | None) -> None:
        measured = []
        try:
            with behind(model, self._device):
                blocks = [Sample(*self._memory.gather(s.block_id), s.first_token, s.exact) for s in samples]
            for format in self._formats:
                measured.append(measure(format, blocks, self._rope))
                if measured[-1].is_faithful:
                    break
            if measured[-1].is_faithful and len(measured) > 1:
                self._prepare(format)
        except CodecError as error:
            logger.warning("Manthan: what the codec does to this model's KV cannot be measured: %s", error)
            measured = []
        except Exception:  # evictions wait for an answer
            logger.exception("Manthan: what the codec does to this model's KV cannot be measured")
            measured = []
        with self._lock:
            self._verdicts.append(Verdict(measured))
