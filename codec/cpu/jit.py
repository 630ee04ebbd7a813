"""How kernels are compiled by numba."""

from collections.abc import Callable
from typing import Any, TypeVar

import numba

F = TypeVar("F", bound=Callable[..., Any])


def jit(*signatures: Any) -> Callable[[F], F]:
    """njit without the GIL and with IEEE division, cached on disk where that is possible."""

    def compile_(function: F) -> F:
        options = {"nogil": True, "error_model": "numpy"}
        try:
            compiled: F = numba.njit(*signatures, cache=True, **options)(function)
        except RuntimeError:  # neither this folder nor the user's cache can be written to
            compiled = numba.njit(*signatures, **options)(function)
        return compiled

    return compile_
