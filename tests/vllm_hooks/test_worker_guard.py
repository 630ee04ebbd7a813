"""The worker's side of the guard: blocks of the cache are measured beside the model, and there is always an answer."""

import threading
import time
from collections.abc import Sequence

import fake_cuda
import logged
import numpy as np
import pytest
import torch
from fake_cuda import TOKENS

from manthan.codec.block import BlockFormat
from manthan.vllm_hooks.messages import SpillBlock, Verdict
from manthan.vllm_hooks.worker.blocks import DeviceMemory
from manthan.vllm_hooks.worker.guard import Guard

SAMPLES = [SpillBlock(bytes([n]) * 32, 0, n, TOKENS * n, exact=4 if n == 0 else 0) for n in range(4)]


class World:
    def __init__(self, codec: str = "k3v3") -> None:
        self.layout = fake_cuda.paged_codec().layout
        self.formats = [BlockFormat(name, self.layout.shape, b"f" * 16) for name in (codec, "k4v4c")]
        self.prepared: list[str] = []
        self.guard = Guard(
            DeviceMemory(self.layout),
            self.formats,
            None,
            torch.device("cpu"),
            lambda form: self.prepared.append(form.codec),
        )

    def add(self, bias: float, of_values: bool = False) -> None:
        """To a number of each key or value, so that they have it in common."""
        layout = self.layout
        for cache in layout.caches:
            numbers = cache.view(len(cache), layout.tokens, layout.heads, 2, layout.head_dim)
            numbers[:, :, :, int(of_values), 5] += bias

    def measure(self, samples: Sequence[SpillBlock] = SAMPLES) -> Verdict:
        self.guard.submit(samples)
        verdicts = self.wait()
        self.guard.shutdown()
        assert self.guard.take() == []
        return verdicts[0]

    def wait(self) -> list[Verdict]:
        """Until something was found."""
        until = time.monotonic() + 300
        while not (verdicts := self.guard.take()):
            assert time.monotonic() < until, "there is no answer"
            time.sleep(0.001)
        return verdicts


def test_warming_up_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is beside the start, and beside what waits until the paged cache is not read."""
    world, begun, end = World(), threading.Event(), threading.Event()

    def compile_for_long() -> None:
        begun.set()
        end.wait(60)

    monkeypatch.setattr(world.formats[0], "warm_up", compile_for_long)
    world.guard.warm_up()
    assert begun.wait(60)
    world.guard.wait()
    assert world.measure().codec == "k3v3"
    end.set()


def test_a_faithful_codec_needs_no_other() -> None:
    world = World()
    found = world.measure()
    assert [each.codec for each in found.measured] == ["k3v3"]
    assert found.measured[0].tokens == 4 * TOKENS - 4
    assert (found.place, found.codec, world.prepared) == (0, "k3v3", [])


def test_what_takes_its_place_is_measured_and_prepared() -> None:
    world = World()
    world.add(30.0)
    found = world.measure()
    assert [each.is_faithful for each in found.measured] == [False, True]
    assert (found.place, found.codec, world.prepared) == (1, "k4v4c", ["k4v4c"])


def test_where_none_is_faithful_nothing_is_prepared() -> None:
    """Means are taken off keys alone."""
    world = World()
    world.add(300.0, of_values=True)
    found = world.measure()
    assert [each.is_faithful for each in found.measured] == [False, False]
    assert (found.place, found.codec, world.prepared) == (2, "exact", [])


def test_kv_that_cannot_be_encoded_is_answered_for() -> None:
    world = World()
    world.layout.caches[1][2, 0] = float("nan")
    with logged.warnings() as said:
        found = world.measure()
    assert (list(found.measured), found.place, found.codec) == ([], 0, "")
    assert said[0].startswith("Manthan: what the codec does to this model's KV cannot be measured: vector")


def test_whatever_fails_is_answered_for(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    monkeypatch.setattr(DeviceMemory, "gather", lambda *_: 1 / 0)
    with logged.warnings() as said:
        assert list(world.measure().measured) == []
    assert said == ["Manthan: what the codec does to this model's KV cannot be measured"]


def test_the_models_thread_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    release = []
    gather = DeviceMemory.gather

    def slow(memory: DeviceMemory, block_id: int) -> tuple[np.ndarray, np.ndarray]:
        while not release:
            time.sleep(0.001)
        return gather(memory, block_id)

    monkeypatch.setattr(DeviceMemory, "gather", slow)
    world.guard.submit(SAMPLES)
    assert world.guard.take() == []
    release.append(True)
    assert len(world.wait()) == 1
    world.guard.shutdown()


def test_nothing_is_asked_and_nothing_begun() -> None:
    world = World()
    world.guard.submit([])
    world.guard.shutdown()
    assert world.guard.take() == []
