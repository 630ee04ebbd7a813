"""A process that has imported vLLM, to fork engines from: each import takes seven seconds, and an engine needs two.

Imported in that process, it has workers forked as well; the CPU build would import vLLM anew for each.
"""

import atexit
import gc
import multiprocessing
from multiprocessing.context import BaseContext

import vllm.entrypoints.llm
import vllm.v1.engine.core
import vllm.v1.executor.multiproc_executor as executor
import vllm.v1.worker.cpu_worker  # noqa: F401
from state_copies import copy_states_on_the_cpu

import manthan.codec.cpu
import manthan.vllm_hooks.connector  # noqa: F401
from manthan.codec.tables.frequencies import family


def forking() -> BaseContext:
    return multiprocessing.get_context("fork")


executor.get_mp_context = forking
copy_states_on_the_cpu()
family()  # the tables of wht-5x
gc.freeze()  # an engine collects garbage eight times as it starts
atexit.register(gc.unfreeze)  # Triton complains of what is left
