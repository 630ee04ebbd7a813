"""What vLLM's CPU build lacks for tokens that are proposed to a model with states: its kernels that copy states between
blocks are Triton's. Here the same two are written down for one CPU; all else is vLLM's own."""

import ctypes
from collections.abc import Callable
from typing import Any

from vllm.v1.worker import mamba_utils


class Kernel:
    """Called as Triton's are: `kernel[grid](...)`."""

    def __init__(self, body: Callable[..., None]) -> None:
        self._body = body

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **more: self._body(grid, *args, **more)


def before(grid: tuple[int, ...], columns: Any, sources: Any, biases: Any, *layout: Any, **_: Any) -> None:
    """The running state goes on in another block."""
    for request in range(grid[0]):
        source, column = int(sources[request]), int(columns[request])
        if source not in (-1, column):
            _copy(grid[1], request, source, column, int(biases[request]), layout)


def behind(
    grid: tuple[int, ...],
    accepted: Any,
    columns: Any,
    scheduled: Any,
    computed: Any,
    drafts: Any,
    *layout: Any,
    block_size: int,
    **_: Any,
) -> None:
    """The state behind a block's last token stays in that block, where accepted tokens go on beyond."""
    accepted_out = layout[-3]
    for request in range(grid[0]):
        column = int(columns[request])
        running = int(computed[request] + scheduled[request] - drafts[request])
        end = (running + int(accepted[request]) - 1) // block_size * block_size
        if end < running:
            continue
        target, bias = end // block_size - 1, end - running
        if column == target:
            accepted_out[request] = 1
        if (column, 0) != (target, bias):
            _copy(grid[1], request, column, target, bias, layout)


def _copy(states: int, request: int, source: int, target: int, bias: int, layout: Any) -> None:
    """From column to column of a request's blocks. A convolution's window moves on by so many tokens; of a recurrent
    state there is one for each of them, in columns of its own."""
    tables, row, bases, strides, elements, inners, widths, groups = layout[:8]
    for state in range(states):
        table = int(tables[int(groups[state])]) + request * int(row) * 4
        token, width = int(inners[state] * elements[state]), int(widths[state])
        first = _address(bases, strides, state, table, source if width else source + bias) + bias * token * (width > 0)
        nbytes = token * (width - bias if width else 1)
        ctypes.memmove(_address(bases, strides, state, table, target), first, nbytes)


def _address(bases: Any, strides: Any, state: int, table: int, column: int) -> int:
    block = ctypes.c_int32.from_address(table + 4 * column).value
    return int(bases[state]) + block * int(strides[state])


def copy_states_on_the_cpu() -> None:
    """For all engines of this process."""
    here: Any = mamba_utils
    here.precopy_mamba_align_fused_kernel, here.postprocess_mamba_fused_kernel = Kernel(before), Kernel(behind)
