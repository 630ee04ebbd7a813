"""The benchmarks' arithmetic: budgets are equal, and an answer from the wrong source is refused."""

from pathlib import Path
from typing import Any

import pytest

from manthan.benchmarks.engines import Answer, WrongPathError
from manthan.benchmarks.restore import Only, Setting, capacity_arm, check, chosen_arms
from manthan.benchmarks.restore_report import DISK, _color, latency_ratios, latency_rows
from manthan.benchmarks.shapes import Shape, write_model


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(
        model=write_model(tmp_path),
        block_size=16,
        eager=False,
        batched_tokens=8192,
        returns=12,
        tokens=32000,
        capacity_tokens=8000,
        capacity_sessions=16,
        seed=0,
        simple_offload=False,
        redis_url="redis://there",
        disk_folder=str(tmp_path),
    )


def store(arm: Any) -> dict[str, Any]:
    return arm.engine.manthan["tiers"]


@pytest.mark.parametrize(
    ("name", "layers", "kib", "groups", "window"),
    [
        ("qwen3-8b", 0, 144, 0, 0),
        ("qwen3.5-35b-a3b", 0, 80, 3, 0),
        ("gpt-oss-20b", 0, 48, 1, 128),
        ("gemma3-12b", 0, 384, 5, 1024),
        ("gemma3-12b", 12, 96, 5, 1024),
        ("deepseek-v2-lite", 0, 30.375, 0, 0),
    ],
)
def test_a_shape_of_a_public_model(
    name: str, layers: int, kib: float, groups: int, window: int, tmp_path: Path
) -> None:
    shape = Shape.of(write_model(tmp_path, name, layers))
    assert (shape.token_nbytes, shape.groups, shape.window) == (kib * 1024, groups, window)
    assert shape.is_latent == (name == "deepseek-v2-lite")


def test_both_arms_of_a_capacity_have_the_same_bytes(setting: Setting) -> None:
    block = 16 * 144 * 1024
    budget = 16 * 8000 * 144 * 1024
    plain, device = capacity_arm("plain", setting), capacity_arm("device", setting)
    assert plain.engine.blocks * block == budget
    assert budget - block < device.engine.blocks * block + store(device)["max_bytes"] <= budget
    assert capacity_arm("vllm-offload", setting).engine.offload_nbytes == budget
    assert store(capacity_arm("host", setting))["max_bytes"] == budget


def test_bars_have_a_color_for_vllm_one_for_manthan_and_one_for_each_arm_on_disk() -> None:
    names = [["hot", "recompute, hot", "vllm-offload"], ["host wht-5x", "host, hot", "device", "redis", "tiered"]]
    names += [[name] for name in DISK]
    found = [{_color(name) for name in alike} for alike in names]
    assert [len(colors) for colors in found] == [1] * len(names)
    assert len(set.union(*found)) == len(names)


@pytest.mark.parametrize(
    ("cached", "external", "claim"),
    [
        (0, 0, {"cached": True, "external": False}),
        (31984, 31984, {"cached": True, "external": False}),
        (31984, 0, {"cached": True, "external": True}),
        (31984, 16000, {"cached": True, "external": True}),
        (9600, 0, {"cached": False, "external": False}),
    ],
)
def test_an_answer_from_elsewhere_is_refused(cached: int, external: int, claim: dict[str, bool]) -> None:
    with pytest.raises(WrongPathError):
        check(Answer(0.1, 32000, cached, external), 16, **claim, what="return 1")


def test_arms_can_be_chosen(setting: Setting) -> None:
    assert [arm.name for arm in chosen_arms(None, "host, hot", setting)] == [
        "latency hot",
        "latency host",
        "capacity host",
    ]


def test_the_host_s_store_is_timed_with_each_codec(setting: Setting) -> None:
    arms = chosen_arms(Only.latency, "vllm-offload,host", setting, "wht-5x, k3v3")
    assert [arm.name for arm in arms] == ["latency vllm-offload", "latency host wht-5x", "latency host k3v3"]
    assert [(arm.engine.manthan or {}).get("codec", {}).get("name") for arm in arms] == [None, "wht-5x", "k3v3"]


def test_the_warm_up_does_not_count() -> None:
    def returns(*times: float) -> list[dict[str, float]]:
        return [{"ttft_s": time, "cached_tokens": 16} for time in times]

    arms = {"latency host": {"returns": returns(9, 2, 4)}, "latency vllm-offload": {"returns": returns(9, 6)}}
    rows = latency_rows({"arms": arms})
    assert {row.name: row.median for row in rows} == {"host": 3000, "vllm-offload": 6000}
    assert latency_ratios(rows) == {"host / vllm-offload": 0.5}
    arms["latency host klt-8x"] = {"returns": returns(9, 6)}
    rows = latency_rows({"arms": dict(reversed(arms.items()))})
    assert [row.name for row in rows] == ["vllm-offload", "host klt-8x", "host"]
    assert latency_ratios(rows) == {"host klt-8x / vllm-offload": 1, "host / vllm-offload": 0.5}
