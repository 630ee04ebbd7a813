"""Calibration while serving: some of the first blocks that go cold are sent to a process that makes a profile of
them."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, Full, Queue
from typing import TYPE_CHECKING, NamedTuple

from vllm.logger import init_logger

from manthan.codec.base import Numbers
from manthan.codec.block import BlockFormat
from manthan.codec.profile import Profile, ProfileInfo
from manthan.manager.calibration import traffic
from manthan.manager.calibration.places import has_weights, profile_path
from manthan.manager.calibration.traffic import TOKENS, Job
from manthan.manager.config.profiles import CALIBRATED
from manthan.vllm_hooks.messages import SpillBlock
from manthan.vllm_hooks.settled import wants_profile
from manthan.vllm_hooks.transfer_config import from_vllm_config
from manthan.vllm_hooks.worker.blocks import PagedMemory
from manthan.vllm_hooks.worker.threads import allowed_cpus, move_to

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.manthan.worker")

EVERY = 2
"""One block of so many that go cold together is taken: a profile is of several sessions."""
WAITING = 8
"""Blocks that wait to be read at most; what comes meanwhile is left out."""
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

Block = tuple[int, Numbers, Numbers]
"""The place of its first token in its chain, keys and values."""


def calibration_job(vllm_config: "VllmConfig", form: BlockFormat) -> Job | None:
    """What a profile of this rank's blocks takes; None where none is wanted. form: knows how keys are turned."""
    config, model, parallel = from_vllm_config(vllm_config), vllm_config.model_config, vllm_config.parallel_config
    made_up = vllm_config.load_config.load_format == "dummy"
    if made_up or not (config.codec.calibrate and wants_profile(vllm_config)):
        return None
    if not has_weights(model.model, model.revision):  # nobody could tell whose profile it is
        return None
    assert vllm_config.kv_transfer_config is not None
    shape = form.shape
    info = ProfileInfo(model.model, shape.layers, shape.heads, shape.head_dim, form.facts.rope, "none")
    return Job(
        info,
        shape.tokens,
        shape.dtype,
        CALIBRATED,
        str(profile_path(model.model, parallel.world_size, model.revision)),
        model.get_total_num_kv_heads(),
        parallel.rank,
        parallel.world_size,
        str(vllm_config.kv_transfer_config.engine_id),
        TOKENS,
    )


class Sample(NamedTuple):
    """A block's place, and what gives its keys and values once they have come."""

    first_token: int
    numbers: Callable[[], tuple[Numbers, Numbers]]


class Calibration:
    """memory: the paged cache. made: called with the profile, on a thread of its own; it says what becomes of it."""

    def __init__(self, memory: PagedMemory, job: Job, made: Callable[[Profile], str]) -> None:
        self._memory, self._job, self._made = memory, job, made
        self._blocks: Queue[Block | None] = Queue(WAITING)
        self._wants_more, self._stopped = True, False
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="manthan-calibrate", daemon=True)
        self._thread.start()

    def see(self, spills: Sequence[SpillBlock]) -> None:
        """These blocks go cold, and are not written to until this returns. It does not wait for anything else."""
        self.take(self.begin(spills))

    def begin(self, spills: Sequence[SpillBlock]) -> list[Sample]:
        """Begin to copy some of these blocks, on the current stream, before which they are not written to. Those that
        have come are to be taken."""
        room = WAITING - self._blocks.qsize() if self._wants_more else 0
        return [Sample(s.first_token, self._memory.gather_soon(s.block_id)) for s in spills[::EVERY][:room]]

    def take(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            if self._wants_more:
                with suppress(Full):  # another thread was faster
                    self._blocks.put_nowait((sample.first_token, *sample.numbers()))

    def stop(self) -> None:
        """Whatever has not been made is given up."""
        self._wants_more, self._stopped = False, True
        self._forget()
        self._blocks.put(None)
        if self._process is not None:
            self._process.kill()
        self._thread.join()

    def _run(self) -> None:
        move_to(allowed_cpus())
        block = self._blocks.get()
        if block is None:
            return
        began = time.monotonic()
        try:
            path = self._profile_of(block)
            if path is not None:
                self._tell(path, time.monotonic() - began)
        except Exception as error:  # it costs the profile, nothing else
            if not self._stopped:
                logger.warning("Manthan: no profile is made of the traffic: %s: %s", type(error).__name__, error)
        self._wants_more = False
        self._forget()

    def _forget(self) -> None:
        """Blocks that wait."""
        with suppress(Empty):
            while True:
                self._blocks.get_nowait()

    def _profile_of(self, block: Block | None) -> str | None:
        """Where the profile is that was made of this block and of those that follow; empty where other ranks must
        finish theirs, None where it was given up."""
        with subprocess.Popen(
            [sys.executable, "-P", "-m", traffic.__name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | ONE_THREAD,
        ) as process:
            self._process = process
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(self._job.to_json())
            while block is not None:
                first_token, keys, values = block
                process.stdin.write(first_token.to_bytes(8, "little"))
                process.stdin.write(keys.tobytes() + values.tobytes())
                process.stdin.flush()
                if process.stdout.read(1) != traffic.MORE:
                    break
                block = self._blocks.get()
            if block is None:
                return None
            self._wants_more = False
            said = json.loads(process.stdout.readline() or '{"error": "the process that was to make it has ended"}')
        if "error" in said:
            raise RuntimeError(said["error"])
        return str(said["path"])

    def _tell(self, path: str, seconds: float) -> None:
        if not path:
            logger.info("Manthan: this rank's part of a profile is made")
            return
        profile = Profile.load(Path(path))
        [(preset, ratio)] = profile.info.ratios.items()
        logger.info(
            "Manthan: made a profile of %d tokens of the first cold sessions in %.0f s, with which %s is %.2f times "
            "smaller than bf16: %s; %s",
            profile.info.tokens,
            seconds,
            preset,
            ratio,
            path,
            self._made(profile),
        )
