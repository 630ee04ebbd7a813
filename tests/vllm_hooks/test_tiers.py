"""Where codes go beside a GPU, and how much memory that takes: what can be told without one."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform

from manthan.manager.config.resolve import ConfigError, load_config
from manthan.vllm_hooks import kv_transfer_config
from manthan.vllm_hooks.support import UnsupportedError
from manthan.vllm_hooks.worker.capacity import STAGING_BYTES, STAGINGS, TierBytes, set_gpu_memory_aside
from manthan.vllm_hooks.worker.half import codec_backend
from manthan.vllm_hooks.worker.tiers import Demotion, Tier, Tiers

GIB = 1 << 30


def tier(slots: int) -> Tier:
    return Tier(torch.zeros(slots, 16, dtype=torch.uint8))


def keep(tiers: Tiers, key: bytes) -> Demotion | None:
    taken = tiers.take()
    taken.tier.slots.put(key, taken.slot)
    return taken.demotion


def test_a_full_device_moves_the_oldest_to_the_host() -> None:
    tiers = Tiers(tier(2), tier(2))
    assert [keep(tiers, key) for key in (b"a", b"b")] == [None, None]
    assert tiers.find([b"a", b"b"]) == (tiers.device, tiers.device.slots.get([b"a", b"b"]))
    tiers.find([b"a"])  # b is the oldest now
    moved = keep(tiers, b"c")
    assert tiers.find([b"b"]) == (tiers.host, [moved.host_slot])
    assert tiers.device.slots.get([b"c"]) == [moved.device_slot]
    assert tiers.find([b"a", b"b"])[1] == tiers.device.slots.get([b"a"])  # a run ends where its tier does
    keep(tiers, b"d")
    assert tiers.take() is None
    assert tiers.used == 4 * 16
    tiers.drop([b"b", b"d"])
    assert tiers.find([b"b"]) is None
    assert tiers.take() is not None
    tiers.clear()
    assert tiers.used == 0


def test_while_all_of_the_device_is_written_to_new_codes_go_to_the_host() -> None:
    tiers = Tiers(tier(2), tier(3))
    taken = [tiers.take() for _ in range(6)]
    assert [t and t.tier for t in taken] == [tiers.device] * 2 + [tiers.host] * 3 + [None]
    assert all(t.demotion is None for t in taken[:5])


def test_one_tier_is_full_when_it_is_full() -> None:
    tiers = Tiers(None, tier(1))
    assert keep(tiers, b"a") is None
    assert tiers.take() is None


@pytest.mark.parametrize(
    ("store", "device", "host"),
    [
        ({"kind": "host", "max_bytes": 100}, 0, 50),
        ({"kind": "device", "max_bytes": 100}, 50, 0),
        ({"kind": "device", "max_bytes": 100, "host_bytes": 61}, 50, 30),
    ],
)
def test_each_rank_has_its_share_of_each_tier(store: dict[str, Any], device: int, host: int) -> None:
    share = TierBytes.of_a_rank(load_config(flags={"cold_store": store}).cold_store, 2)
    assert share == (device, host)
    assert share.blocks(20) == device // 20 + host // 20


def test_host_bytes_belong_to_two_kinds() -> None:
    with pytest.raises(ConfigError, match=r"behind cold_store.kind device or in front of kind tiered, but kind is hos"):
        load_config(flags={"cold_store": {"kind": "host", "host_bytes": "1GiB"}})


class Gpu:
    """vLLM's configuration beside a GPU of 100 GiB, as the platform would describe it."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, store: dict[str, Any], backend: str = "auto", **cache: Any
    ) -> None:
        monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
        monkeypatch.setattr(
            type(current_platform), "get_device_total_memory", classmethod(lambda cls: 100 * GIB), raising=False
        )
        self.cache_config = SimpleNamespace(**{"gpu_memory_utilization": 0.9, "kv_cache_memory_bytes": None} | cache)
        self.kv_transfer_config = kv_transfer_config(cold_store=store, backend=backend)
        self.parallel_config = SimpleNamespace(world_size=2)


def test_the_device_tier_is_taken_out_of_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch, {"kind": "device", "max_bytes": "40GiB"})
    set_gpu_memory_aside(gpu)
    ours = 20 * GIB + STAGINGS * STAGING_BYTES
    assert gpu.cache_config.gpu_memory_utilization == pytest.approx(0.9 - ours / (100 * GIB), abs=2e-6)
    gpu = Gpu(monkeypatch, {"kind": "device", "max_bytes": "40GiB"}, kv_cache_memory_bytes=50 * GIB)
    set_gpu_memory_aside(gpu)
    assert gpu.cache_config.kv_cache_memory_bytes == 50 * GIB - ours
    assert gpu.cache_config.gpu_memory_utilization == 0.9


def test_exact_copies_take_room_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch, {"max_bytes": "40GiB"}, kv_cache_memory_bytes=50 * GIB)
    gpu.kv_transfer_config = kv_transfer_config(codec={"window_tokens": 1})
    set_gpu_memory_aside(gpu)
    assert gpu.cache_config.kv_cache_memory_bytes == 50 * GIB - (STAGINGS + 1) * STAGING_BYTES


def test_codes_made_on_the_cpu_take_no_gpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch, {"kind": "host", "max_bytes": "40GiB"}, backend="numpy")
    set_gpu_memory_aside(gpu)
    assert gpu.cache_config.gpu_memory_utilization == 0.9


def test_ram_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"of RAM cannot be pinned .*: lower cold_store.max_bytes"):
        Tier.pinned(1 << 60, 1 << 20)


def test_more_than_the_gpu_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"max_bytes is 200.0GiB of GPU memory: --gpu-memory-utilization leaves vLLM"):
        set_gpu_memory_aside(Gpu(monkeypatch, {"kind": "device", "max_bytes": "200GiB"}))


def test_the_backend_suits_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert codec_backend("auto", cpu) == codec_backend("numpy", cpu) == codec_backend("numpy", gpu) == "numpy"
    with pytest.raises(UnsupportedError, match="backend is cuda, but vLLM runs on the CPU"):
        codec_backend("cuda", cpu)
    for integrated, chosen in ((True, "numpy"), (False, "cuda")):  # there is no GPU of the one kind and the other here
        found = SimpleNamespace(is_integrated=integrated)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, found=found: found)
        assert codec_backend("auto", gpu) == chosen
        assert codec_backend("cuda", gpu) == "cuda"
