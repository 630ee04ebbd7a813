"""A process that has imported vLLM, to fork engines from: each import takes seven seconds, and an engine needs two.

Imported in that process, it has workers forked as well; the CPU build would import vLLM anew for each.
"""

import atexit
import gc
import multiprocessing
from multiprocessing.context import BaseContext
from typing import Any

import vllm.distributed.device_communicators.shm_broadcast as shm_broadcast
import vllm.entrypoints.llm
import vllm.v1.engine.core
import vllm.v1.executor.multiproc_executor as executor
import vllm.v1.worker.cpu_worker  # noqa: F401
from state_copies import copy_states_on_the_cpu
from vllm.platforms import current_platform

import manthan.codec.cpu
import manthan.vllm_hooks.connector  # noqa: F401
from manthan.codec.cpu.numbers import kernels
from manthan.codec.tables.frequencies import family


def forking() -> BaseContext:
    return multiprocessing.get_context("fork")


class Patient(shm_broadcast.SpinCondition):
    """Wait for a message that another process writes: spin for a moment, and then look twenty times a second.

    vLLM's spins for a second after each message, and takes the cores that other tests compute on. Then it waits for a
    notice, which may be lost.
    """

    SPINS_S, LOOKS_MS = 0.01, 50

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        if self.is_reader:
            self.busy_loop_s = self.SPINS_S

    def wait(self, timeout_ms: int | None = None) -> None:
        super().wait(min(self.LOOKS_MS, self.LOOKS_MS if timeout_ms is None else timeout_ms))


executor.get_mp_context = forking
shm_broadcast.SpinCondition = Patient  # type: ignore[misc]
copy_states_on_the_cpu()
current_platform.register_triton_kernel_overrides()  # half a second for each engine, and no longer with numba
type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)  # type: ignore[method-assign]
family()  # the tables of wht-5x
kernels()  # which imports numba
gc.freeze()  # an engine collects garbage eight times as it starts
atexit.register(gc.unfreeze)  # Triton complains of what is left
unfreeze = gc.unfreeze
gc.unfreeze = lambda: None  # an engine that ends would look through all of it, for nothing
