"""Python, vLLM, torch and the GPU."""

import platform
import subprocess
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic import ByteSize

from manthan.manager.config.model import ConfigError, ManthanConfig
from manthan.manager.doctor.finding import Finding, Mark
from manthan.vllm_hooks.support import VLLM, check_version

VLLM_CHECK, TORCH, GPU = "vLLM", "torch", "GPU"
OLDEST_CAPABILITY = (8, 0)
"""Of GPUs that the kernels run on: Ampere."""
DEVICES = "/dev/nvidia[0-9]"


def check_versions() -> Iterator[Finding]:
    yield Finding("Python", Mark.OK, f"{platform.python_version()}.")
    yield Finding("Manthan", Mark.OK, f"{version('manthan-kv')}.")
    yield check_vllm(_version("vllm"))


def check_vllm(found: str | None) -> Finding:
    """found: the version of the installed vLLM, or of a server's; None for none."""
    if found is None:
        why = f"vLLM is not installed in this environment: pip install 'manthan-kv[vllm]' (vllm{VLLM})."
        return Finding(VLLM_CHECK, Mark.WRONG, why)
    try:
        check_version(found)
    except ConfigError as error:
        return Finding(VLLM_CHECK, Mark.WRONG, str(error))
    return Finding(VLLM_CHECK, Mark.OK, f"{found}, of those that are supported ({VLLM}).")


def check_gpus(config: ManthanConfig) -> Iterator[Finding]:
    """What torch is made for, and what GPUs it finds."""
    if (found := _version("torch")) is None:
        yield Finding(TORCH, Mark.WRONG, "torch is not installed in this environment: it comes with vLLM.")
        return
    import torch

    made_for: Any = torch.version
    if (cuda := made_for.cuda) is None:
        yield _without_cuda(found, config)
        return
    try:
        torch.cuda.init()
        count = torch.cuda.device_count()
    except Exception as error:  # RuntimeError of a driver that is too old, AssertionError, what CUDA says
        yield Finding(
            TORCH,
            Mark.WRONG,
            f"{found} is made for CUDA {cuda}, but no GPU can be used ({_line(error)}): see the driver.",
        )
        return
    driver = _driver()
    yield Finding(TORCH, Mark.OK, f"{found}, made for CUDA {cuda}{f'; the driver is {driver}' if driver else ''}.")
    for number in range(count):
        yield _gpu(torch.cuda.get_device_properties(number), torch.cuda.mem_get_info(number), number, config)


def pinner() -> Callable[[int], str] | None:
    """What pins so many bytes of RAM for a GPU, and says why not, or ""; None where there is no GPU."""
    if _version("torch") is None:
        return None
    import torch

    if not torch.cuda.is_available():
        return None

    def pin(nbytes: int) -> str:
        from manthan.vllm_hooks import compat

        memory = torch.empty(nbytes, dtype=torch.uint8)
        try:
            compat.pin(memory)
        except (RuntimeError, ImportError) as error:
            return _line(error)
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
        return ""

    return pin


def _without_cuda(found: str, config: ManthanConfig) -> Finding:
    if any(Path("/").glob(DEVICES.lstrip("/"))):
        return Finding(
            TORCH, Mark.WRONG, f"{found} is made for CPUs, but this machine has a GPU: install vLLM's CUDA build."
        )
    wants = [f"{key} is {value}" for key, value in _of_gpus(config) if value]
    if wants:
        return Finding(
            TORCH, Mark.WRONG, f"{found} is made for CPUs, but {wants[0]}, which needs a GPU: use host, numpy or auto."
        )
    return Finding(TORCH, Mark.OK, f"{found}, made for CPUs: no GPU is used.")


def _of_gpus(config: ManthanConfig) -> list[tuple[str, str]]:
    store, backend = config.cold_store.kind, config.backend
    return [
        ("cold_store.kind", store if store == "device" else ""),
        ("backend", backend if backend == "cuda" else ""),
    ]


def _gpu(about: Any, memory: tuple[int, int], number: int, config: ManthanConfig) -> Finding:
    free, total = memory
    capability = about.major, about.minor
    said = f"{number} is {about.name}, compute capability {about.major}.{about.minor}"
    if capability < OLDEST_CAPABILITY:
        return Finding(GPU, Mark.WRONG, f"{said}: the kernels need 8.0 (Ampere) or newer; set backend to numpy.")
    store = config.cold_store
    if store.kind == "device" and store.max_bytes >= total:
        return Finding(
            GPU,
            Mark.WRONG,
            f"{said}, with {_size(total)} of memory, but cold_store.max_bytes is {_size(store.max_bytes)} of it: lower "
            "that.",
        )
    return Finding(GPU, Mark.OK, f"{said}, {_size(free)} of {_size(total)} free.")


def _driver() -> str:
    """The NVIDIA driver's version; empty where nobody tells it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return lines[0].strip() if lines else ""


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def _size(nbytes: int) -> str:
    return ByteSize(nbytes).human_readable()
