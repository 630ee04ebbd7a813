"""How much memory compressed blocks take next to a GPU, and where they are made: what can be told without one."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from loaded import load_config
from vllm.platforms import current_platform
from vllm.third_party import pynvml

from manthan.manager.config.resolve import ConfigError
from manthan.manager.tiers.arena import GRANULE
from manthan.vllm_hooks import kv_transfer_config
from manthan.vllm_hooks.worker.capacity import (
    COPIES_BYTES,
    PRIMARY_BYTES,
    STAGINGS_BYTES,
    TierBytes,
    set_gpu_memory_aside,
    share_memory,
)

GIB = 1 << 30


@pytest.mark.parametrize(
    ("store", "device", "host"),
    [
        ({"kind": "host", "max_bytes": 100}, 0, 50),
        ({"kind": "device", "max_bytes": 100}, 50, 0),
        ({"kind": "device", "max_bytes": 100, "host_bytes": 61}, 50, 30),
    ],
)
def test_each_rank_has_its_share_of_each_tier(store: dict[str, Any], device: int, host: int) -> None:
    share = TierBytes.of_a_rank(load_config(flags={"tiers": store}).tiers, 2)
    assert share == (device, host)


@pytest.mark.parametrize(
    ("tiers", "sizes", "usable"),
    [
        (TierBytes(0, 1000), {300}, 3 * GRANULE),
        (TierBytes(1000, 0), {300}, 3 * GRANULE),
        (TierBytes(1000, 2000), {512}, (3 + 7) * GRANULE - 512),
        (TierBytes(256, 256), {1024}, 0),
        (TierBytes(0, 100 * GRANULE), {300, 512}, 98 * GRANULE),
        (TierBytes(100 * GRANULE, 200 * GRANULE), {300, 512}, (98 + 196) * GRANULE - 512),
    ],
)
def test_usable_bytes(tiers: TierBytes, sizes: set[int], usable: int) -> None:
    """Two tiers promise a block less than they have. Blocks of several sizes leave a part of each tier free."""
    assert tiers.usable(sizes) == usable


class Gpu:
    """vLLM's configuration with a GPU of 100 GiB, as the platform would describe it."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        store: dict[str, Any],
        backend: str = "auto",
        memory: str = "0",
        **cache: Any,
    ) -> None:
        monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
        monkeypatch.setattr(
            type(current_platform), "get_device_total_memory", classmethod(lambda cls: 100 * GIB), raising=False
        )
        self.cache_config = SimpleNamespace(**{"gpu_memory_utilization": 0.9, "kv_cache_memory_bytes": None} | cache)
        self.kv_transfer_config = kv_transfer_config(tiers=store, codec={"backend": backend}, memory_bytes=memory)
        self.parallel_config = SimpleNamespace(world_size=2)


def test_the_device_tier_is_taken_out_of_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch, {"kind": "device", "max_bytes": "40GiB"})
    set_gpu_memory_aside(gpu)
    ours = 20 * GIB + STAGINGS_BYTES
    assert gpu.cache_config.gpu_memory_utilization == pytest.approx(0.9 - ours / (100 * GIB), abs=2e-6)
    gpu = Gpu(monkeypatch, {"kind": "device", "max_bytes": "40GiB"}, kv_cache_memory_bytes=50 * GIB)
    set_gpu_memory_aside(gpu)
    assert gpu.cache_config.kv_cache_memory_bytes == 50 * GIB - ours
    assert gpu.cache_config.gpu_memory_utilization == 0.9


def test_codes_made_on_the_cpu_take_no_gpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch, {"kind": "host", "max_bytes": "40GiB"}, backend="numpy")
    set_gpu_memory_aside(gpu)
    assert gpu.cache_config.gpu_memory_utilization == 0.9


def test_more_than_the_gpu_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"^--gpu-memory-utilization gives vLLM 90.0GiB .* or lower tiers.max_bytes"):
        set_gpu_memory_aside(Gpu(monkeypatch, {"kind": "device", "max_bytes": "200GiB"}))


def test_a_tier_larger_than_the_budget_of_one_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = integrated(monkeypatch, {"kind": "device", "max_bytes": "20GiB"}, "cuda", "16GiB")
    share_memory(machine)
    with pytest.raises(ConfigError, match=r"^memory_bytes gives vLLM .*: raise memory_bytes, or lower tiers.max_bytes"):
        set_gpu_memory_aside(machine)


def test_a_pool_too_small_for_the_stagings_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tier's size is named, because none is in GPU memory."""
    with pytest.raises(ConfigError, match=r"^--kv-cache-memory-bytes gives vLLM 1.0MiB .* --kv-cache-memory-bytes\.$"):
        set_gpu_memory_aside(Gpu(monkeypatch, {"kind": "host", "max_bytes": "40GiB"}, kv_cache_memory_bytes=2**20))


def integrated(monkeypatch: pytest.MonkeyPatch, store: dict[str, Any], backend: str, memory: str, **cache: Any) -> Gpu:
    """A GPU that shares 100 GiB with the CPU. As on a GB10, NVML does not say how much memory there is."""
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    monkeypatch.setattr(type(current_platform), "is_integrated_gpu", classmethod(lambda cls: True), raising=False)
    machine, found = Gpu(monkeypatch, store, backend, memory, **cache), SimpleNamespace(total_memory=100 * GIB)
    unsupported = MagicMock(side_effect=pynvml.NVMLError_NotSupported)
    monkeypatch.setattr(type(current_platform), "get_device_total_memory", unsupported)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    return machine


@pytest.mark.parametrize(
    ("store", "backend", "for_vllm"),
    [
        ({"kind": "host", "max_bytes": "40GiB"}, "numpy", 50 * GIB - 2 * COPIES_BYTES),
        ({"kind": "redis", "max_bytes": "40GiB", "host_bytes": "10GiB"}, "numpy", 80 * GIB - 2 * COPIES_BYTES),
        ({"kind": "device", "max_bytes": "40GiB", "host_bytes": "10GiB"}, "cuda", 40 * GIB - 2 * STAGINGS_BYTES),
        ({"kind": "redis", "max_bytes": "40GiB"}, "cuda", 90 * GIB - 2 * (PRIMARY_BYTES + STAGINGS_BYTES)),
    ],
)
def test_one_budget_of_one_memory_is_all_that_both_take(
    monkeypatch: pytest.MonkeyPatch, store: dict[str, Any], backend: str, for_vllm: int
) -> None:
    machine = integrated(monkeypatch, store, backend, "90GiB")
    share_memory(machine)
    set_gpu_memory_aside(machine)
    shares = 2 * 100 * GIB * machine.cache_config.gpu_memory_utilization
    assert for_vllm - 1e-3 * GIB < shares <= for_vllm


def test_a_budget_that_cannot_be_kept_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    store = {"kind": "host", "max_bytes": "40GiB"}
    for memory in ("40GiB", "201GiB"):
        with pytest.raises(ConfigError, match=r"memory_bytes is \d+.0GiB: it must be more than the 40.2GiB"):
            share_memory(integrated(monkeypatch, store, "numpy", memory))
    with pytest.raises(ConfigError, match="gives the pool a size: use one of them"):
        share_memory(integrated(monkeypatch, store, "numpy", "90GiB", kv_cache_memory_bytes=GIB))
    machine = integrated(monkeypatch, store, "numpy", "90GiB")
    monkeypatch.setattr(type(current_platform), "is_integrated_gpu", classmethod(lambda cls: False), raising=False)
    with pytest.raises(ConfigError, match="this GPU has its own: leave it out"):
        share_memory(machine)
