"""Nothing compiles after an engine is ready, and where kernels cannot be compiled it starts without them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import worker_store
from logged import warnings
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm_engine import Engine, Table

from manthan.codec.cpu.exact import EXACT
from manthan.manager.config.model import ConfigError
from manthan.vllm_hooks import settled
from manthan.vllm_hooks.transfer_config import EXTRA_KEY, is_on_gpu, kv_transfer_config


@pytest.mark.usefixtures("sweeping_engine")
def test_first_blocks_to_be_encoded_and_decoded_compile_nothing(engine: Engine) -> None:
    prompt, right = Table(1).question(0)
    assert engine.ask(prompt, "first").text == right
    engine.wait_until_cold(1)
    assert engine.ask(prompt, "first").cached_tokens > 0
    assert engine.metric("manthan_restored_blocks_total") > 0
    assert engine.on_worker(worker_store.compiled) == engine.compiled != {}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """An engine's configuration on a GPU, seen from a machine without NVRTC."""
    monkeypatch.setattr(settled, "is_on_gpu", lambda config: True)
    model = SimpleNamespace(model="m", revision=None, use_mla=False)
    parallel = SimpleNamespace(tensor_parallel_size=1)
    return SimpleNamespace(kv_transfer_config=kv_transfer_config(), model_config=model, parallel_config=parallel)


@pytest.mark.parametrize(
    ("capability", "reason"),
    [
        (DeviceCapability(9, 0), "the Python package cuda-bindings is not installed"),
        (DeviceCapability(7, 5), "its compute capability is 7.5, below 8.0"),
    ],
)
def test_a_gpu_whose_kernels_cannot_be_compiled_keeps_blocks_exact(
    gpu: Any, capability: DeviceCapability, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(current_platform, "get_device_capability", lambda: capability, raising=False)
    monkeypatch.setattr("manthan.codec.gpu.nvrtc.nvrtc", None)
    settled.kernel_fault.cache_clear()
    with warnings() as said:
        settled.settle_codec(gpu)
    settled.kernel_fault.cache_clear()
    config = gpu.kv_transfer_config.kv_connector_extra_config[EXTRA_KEY]
    assert (config["codec"]["name"], config["codec"]["backend"]) == (EXACT, "numpy")
    expected = "Manthan: codec exact is used, on the CPU, because kernels cannot be compiled: "
    assert said == [expected + reason]
    monkeypatch.setattr(settled, "kernel_fault", lambda: pytest.fail("it is known"))
    with warnings() as said:
        settled.settle_codec(gpu)  # in another process
    assert said == [expected + reason]
    gpu.kv_transfer_config.kv_connector_extra_config[EXTRA_KEY]["tiers"]["kind"] = "device"
    with pytest.raises(ConfigError, match=r"tiers.kind is device, but .* use host"):
        settled.settle_codec(gpu)


def test_on_a_gpu_that_shares_the_cpus_memory_auto_is_the_cpu(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No machine with such a GPU is at hand: the probe is asked about one that is made up."""
    gpu.cache_config = SimpleNamespace()
    monkeypatch.setattr(settled, "kernel_fault", lambda: f"UserWarning: a new GPU {settled.SHARED}")
    monkeypatch.setattr(settled, "is_on_gpu", is_on_gpu)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    monkeypatch.setattr(settled, "is_packed", lambda cache: True)
    assert is_on_gpu(gpu)
    for _ in range(2):
        settled.settle_codec(gpu)
        assert not is_on_gpu(gpu)
    gpu.kv_transfer_config.kv_connector_extra_config[EXTRA_KEY]["tiers"]["kind"] = "device"
    with pytest.raises(ConfigError, match=f"tiers.kind is device, but {settled.SHARED}: use host"):
        settled.settle_codec(gpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(is_integrated=True))
    with pytest.raises(SystemExit, match=settled.SHARED):
        exec(settled.PROBE)


def test_a_compiler_that_hangs_or_dies_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settled, "PROBE_S", 0.2)
    monkeypatch.setattr(settled, "PROBE", "import time; time.sleep(600)")
    assert settled._compiled("sm_90") == "the compiler did not end in 0.2 s"
    monkeypatch.setattr(settled, "PROBE_S", 60.0)
    monkeypatch.setattr(settled, "PROBE", "import os; os._exit(1)")
    assert settled._compiled("sm_90") == "the compiler's exit status is 1"
