"""Guard on a rank: measures, on a separate thread, the loss of codecs on the served model's KV."""

import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from vllm.logger import init_logger

from manthan.codec.block import BlockFormat
from manthan.codec.cpu import precompile
from manthan.codec.fidelity import Fidelity, NothingToMeasureError, Sample, measure
from manthan.codec.rope import Rope
from manthan.manager.events import FIRST_BLOCKS, Verdict
from manthan.manager.transfer import Transfer
from manthan.vllm_hooks.messages import ManthanMetadata
from manthan.vllm_hooks.worker.engine import JobThreads, allowed_cpus, model_event
from manthan.vllm_hooks.worker.engine_cpu import Arrays, PagedMemory

logger = init_logger("vllm.manthan.worker")

BATCH, BATCHES = 16, FIRST_BLOCKS // 16
"""Number of blocks measured together, and number of such measurements for the first `Verdict`. Each later measurement
gives a verdict on the last 2 * BATCHES measurements at most."""
COMPILE_S = 300.0  # most seconds that the server waits for the compilation of kernels before it is ready
A_STEP = 4  # most blocks measured from one step before the first verdict, so that several sessions contribute
EVERY = 1000  # after the first verdict, at most one in EVERY stored blocks is measured
LEAST_PROMPT, TIMED_STEPS = 128, 32  # least tokens of a step that is timed, and number of such steps


class RankGuard:
    """Measures codecs on a rank, on blocks of the main KV cache group, whose block hashes make up sessions.

    formats: of the configured codec, then of finer codecs, the finest last. rope: RoPE of the keys; None if unknown.
    device: of the cache. decode_s: see `Engine`.
    """

    def __init__(
        self,
        memory: PagedMemory,
        formats: Sequence[BlockFormat],
        rope: Rope | None,
        device: torch.device,
        rank: int = 0,
        decode_s: Mapping[str, float] = {},
    ) -> None:
        self._memory, self._formats, self._rope, self._device = memory, formats, rope, device
        self._rank, self._decode_s = rank, decode_s
        self._lock = threading.Lock()
        self._verdicts: list[Verdict] = []
        self._found: deque[list[Fidelity]] = deque(maxlen=2 * BATCHES)
        self._samples: list[tuple[Callable[[], Arrays], Transfer]] = []
        self._seen = self._age = self._told = 0
        self._is_busy = self._was_judged = False
        self._threads = JobThreads(1, "manthan-guard", allowed_cpus() if device.type == "cpu" else ())
        self._warm_up: threading.Thread | None = None
        self._prompts = Prompts(device)

    def warm_up(self) -> None:
        """Begin to compile the guard's kernels for the CPU. For a cache in RAM, the engine has compiled them."""
        if self._device.type != "cpu":
            args = (self._formats,)
            self._warm_up = threading.Thread(target=self._compile, args=args, name="manthan-warm-up", daemon=True)
            self._warm_up.start()

    def wait(self) -> None:
        """Wait until the kernels are compiled, COMPILE_S at most."""
        if self._warm_up is not None:
            self._warm_up.join(COMPILE_S)
            if self._warm_up.is_alive():
                logger.warning("Manthan: the guard's kernels were not compiled in %g s.", COMPILE_S)

    def _compile(self, formats: Sequence[BlockFormat]) -> None:
        """Compile kernels in another process, as compiling holds Python's lock, and load them from numba's cache."""
        names = [format.codec for format in formats]
        command = [sys.executable, "-m", precompile.__name__, formats[0].shape.dtype.name, *names]
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=COMPILE_S)
        for format in formats:
            format.warm_up()

    def begin_step(self, metadata: ManthanMetadata) -> None:
        if metadata.place is not None:
            self.reset()
        self._prompts.begin(metadata.tokens)

    def submit(self, jobs: Sequence[Transfer]) -> None:
        """Copy some blocks of these stores, on the model's stream. Have the thread measure each BATCH copied blocks."""
        self._prompts.end()
        group, tokens = self._formats[0].group, self._formats[0].shape.tokens
        ours = [(job, at) for job in jobs if job.group == group for at in range(len(job))]
        start, self._seen = self._seen, self._seen + len(ours)
        if self._is_busy:
            return
        if self._was_judged:
            chosen = [block for n, block in enumerate(ours, start) if n % EVERY == 0]
        else:
            chosen = ours[:: -(-len(ours) // A_STEP)] if ours else []
        for job, at in chosen[: BATCH - len(self._samples)]:
            self._samples.append((self._memory.gather_soon(int(job.block_ids[at])), job.part(at, at + 1, tokens)))
        if len(self._samples) == BATCH:
            samples, self._samples, self._is_busy = self._samples, [], True
            self._threads.submit(self._measure, samples, model_event(self._device), self._age)

    def take(self) -> list[Verdict]:
        with self._lock:
            taken, self._verdicts = self._verdicts, []
            return taken

    def take_progress(self) -> dict[int, int]:
        """Return this rank and its number of blocks taken for the first verdict; empty after it, or if unchanged."""
        with self._lock:
            blocks = len(self._samples) + BATCH * (len(self._found) + self._is_busy)
            if self._was_judged or blocks == self._told:
                return {}
            self._told = blocks
            return {self._rank: blocks}

    def offer(self, format: BlockFormat) -> None:
        """Compile the kernels of a coarser codec, forget all measurements, and measure this codec, too, from now on."""
        if self._device.type != "cpu":  # on a CPU the engine has compiled them
            self._compile([format])
        self._formats = [format, *self._formats]
        self.reset()

    def reset(self) -> None:
        """Forget all measurements, because weights or codecs are new."""
        with self._lock:
            self._age += 1
            self._found.clear()
            self._verdicts, self._samples, self._was_judged = [], [], False

    def shutdown(self) -> None:
        self._threads.shutdown()

    def _measure(
        self, samples: Sequence[tuple[Callable[[], Arrays], Transfer]], copied: torch.cuda.Event | None, age: int
    ) -> None:
        tokens = self._formats[0].shape.tokens
        found: list[Fidelity] | None = None
        self.wait()
        try:
            if copied is not None:
                copied.synchronize()
            blocks = [Sample(numbers(), job.first_token, job.exacts(tokens)[0] % tokens) for numbers, job in samples]
            found = [measure(format, blocks, self._rope) for format in self._formats]
        except NothingToMeasureError:
            self._is_busy = False
            return
        except Exception as error:  # after any failure the finest codec is used
            logger.warning("Manthan: the codecs' loss on this model's KV cannot be measured: %s", error)
        with self._lock:
            self._is_busy = False
            if age != self._age:
                return
            if found is None:
                self._found.clear()
                self._was_judged = False
                self._verdicts.append(Verdict(self._rank))
                return
            self._found.append(found)
            if len(self._found) >= BATCHES:
                self._was_judged = True
                middle = [Fidelity.median(of_codec) for of_codec in zip(*self._found, strict=True)]
                if self._decode_s:
                    middle = [replace(each, decode_s=self._decode_s.get(each.codec, 0.0)) for each in middle]
                self._verdicts.append(Verdict(self._rank, middle, self._prompts.seconds))


class Prompts:
    """Times large steps. seconds: least seconds for a token in the first TIMED_STEPS large steps; 0 until known."""

    def __init__(self, device: torch.device) -> None:
        self._is_cpu = device.type == "cpu"
        self._left, self._tokens, self.seconds = TIMED_STEPS, 0, 0.0
        self._start: Any = None
        self._steps: list[tuple[int, Any, Any]] = []  # number of tokens, start and end of each step, as `_now` returns

    def begin(self, tokens: int) -> None:
        self._tokens = tokens if self._left and tokens >= LEAST_PROMPT else 0
        if self._tokens:
            self._start = self._now()

    def end(self) -> None:
        if self._tokens:
            self._left -= 1
            self._steps.append((self._tokens, self._start, self._now()))
            self._tokens = 0
        while self._steps and (self._is_cpu or self._steps[0][2].query()):
            tokens, start, end = self._steps.pop(0)
            each = (end - start if self._is_cpu else start.elapsed_time(end) / 1e3) / tokens
            self.seconds = min(self.seconds or each, each)

    def _now(self) -> Any:
        """Return the time in seconds; for a GPU an event on the current stream."""
        if self._is_cpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
