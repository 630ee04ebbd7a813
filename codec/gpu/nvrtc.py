"""CUDA C++ compiled at run time by NVRTC, the compiler library that PyTorch's CUDA wheels bring along."""

import ctypes
from functools import lru_cache
from typing import Any

import torch

from manthan.codec.gpu.kernel_cache import KernelCache, cache_folder

try:  # a dependency of PyTorch's CUDA wheels, absent with the CPU wheels
    from cuda.bindings import driver, nvrtc
except ImportError:
    driver = nvrtc = None

THREADS = 512
ALONE = THREADS // 32
"""Number of warps in a block of THREADS threads.

A launch with `n * ALONE` warps has n thread blocks, so that n busy warps spread over the multiprocessors.
"""


class CompileError(RuntimeError):
    """Kernels cannot be compiled, loaded or started: no GPU, no NVRTC, or an NVRTC that does not know the GPU."""


class Module:
    """Compiled kernels on a CUDA device. Each kernel has one parameter: a struct, passed by value.

    source: CUDA C++ that includes no header. Raises CompileError.
    """

    def __init__(self, source: str, device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise CompileError("there is no CUDA device")
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # makes the device's context current
            major, minor = torch.cuda.get_device_capability(device)
            self._module = _checked(driver.cuModuleLoadData(cubin(source, f"sm_{major}{minor}")))
        self._sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._device = device
        self._functions: dict[tuple[str, int, int], tuple[Any, int]] = {}
        self._shared: dict[str, int] = {}

    def launch(
        self, name: str, argument: ctypes.Structure, warps: int, *, threads: int = THREADS, shared: int = 0
    ) -> None:
        """Start a kernel on the current CUDA stream, with `warps` warps, rounded up to whole blocks of threads.

        The grid is bounded by the thread blocks that the device can hold at once: kernels loop over the rest. Raises
        CompileError if CUDA refuses the launch.

        threads: in a thread block. shared: bytes of dynamic shared memory in a thread block.
        """
        if not warps:
            return
        function, resident = self._function(name, threads, shared)
        blocks = min(-(-warps * 32 // threads), resident)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        stream = torch.cuda.current_stream(self._device).cuda_stream
        grid, block = (blocks, 1, 1), (threads, 1, 1)
        _checked(driver.cuLaunchKernel(function, *grid, *block, shared, stream, ctypes.addressof(pointers), 0))

    def _function(self, name: str, threads: int, shared: int) -> tuple[Any, int]:
        key = name, threads, shared
        if key not in self._functions:
            function = _checked(driver.cuModuleGetFunction(self._module, name.encode()))
            if shared > self._shared.get(name, 0):  # never lowered: launches with more may follow
                self._shared[name] = shared
                attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                _checked(driver.cuFuncSetAttribute(function, attribute, shared))
            per_sm = _checked(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, threads, shared))
            self._functions[key] = function, per_sm * self._sms
        return self._functions[key]


_cache = lru_cache(KernelCache)


def cubin(source: str, architecture: str) -> bytes:
    """Return the compiled kernels of `source` for a GPU architecture ("sm_90"), from the kernel cache if present.

    Raises CompileError.
    """
    if nvrtc is None:
        raise CompileError("the Python package cuda-bindings is not installed")
    version = ".".join(map(str, _checked(nvrtc.nvrtcVersion())))
    options = ("--std=c++17", f"--gpu-architecture={architecture}")
    return _cache(cache_folder()).compiled((version, *options, source), lambda: _compile(source, options))


def _compile(source: str, options: tuple[str, ...]) -> bytes:
    program = _checked(nvrtc.nvrtcCreateProgram(source.encode(), b"manthan.cu", 0, [], []))
    error = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])[0]
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = bytearray(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
        nvrtc.nvrtcGetProgramLog(program, log)
        said = log.decode(errors="replace")
        raise CompileError(f"NVRTC cannot compile with {' '.join(options)}: {error.name}: {said}")
    made = bytearray(_checked(nvrtc.nvrtcGetCUBINSize(program)))
    _checked(nvrtc.nvrtcGetCUBIN(program, made))
    _checked(nvrtc.nvrtcDestroyProgram(program))
    return bytes(made)


def _checked(answer: tuple[Any, ...]) -> Any:
    """Return what a call of cuda-bindings answers after the error code: None, a result, or a tuple of results.

    Raises CompileError for an error code other than 0.
    """
    error, *results = answer
    if int(error) != 0:
        raise CompileError(f"CUDA answers {error.name}")
    return (results[0] if len(results) == 1 else tuple(results)) if results else None
