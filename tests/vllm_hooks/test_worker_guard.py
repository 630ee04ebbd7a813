"""The worker's side of the guard: encoded blocks are measured next to the model, for good, and nobody waits."""

import time
import types
from collections.abc import Iterator

import fake_cuda
import jobs
import logged
import numpy as np
import pytest
import torch

from manthan.codec.block import BlockFormat
from manthan.manager.events import FIRST_BLOCKS, Verdict
from manthan.vllm_hooks.connector import ManthanConnector
from manthan.vllm_hooks.messages import ManthanMetadata
from manthan.vllm_hooks.worker import guard
from manthan.vllm_hooks.worker.engine import Engine
from manthan.vllm_hooks.worker.guard import A_STEP, BATCH, BATCHES, EVERY, RankGuard


class World:
    def __init__(self, decode_s: dict[str, float] | None = None) -> None:
        self.layout = fake_cuda.paged_codec().layout
        self.blocks, self._step = len(self.layout.caches[0]), 0
        formats = [BlockFormat(name, self.layout.shape, b"f" * 16) for name in ("k3v3", "wht-4x")]
        self.guard = RankGuard(fake_cuda.memory_of(self.layout), formats, None, torch.device("cpu"), 3, decode_s)

    def numbers(self, of_values: bool = False) -> Iterator[torch.Tensor]:
        """[blocks, tokens, heads, head_dim] of each layer."""
        layout = self.layout
        for cache in layout.caches:
            yield cache.view(len(cache), layout.tokens, layout.heads, 2, layout.head_dim)[:, :, :, int(of_values)]

    def encode(self, blocks: int) -> None:
        """A step in which so many are."""
        self._step += 1
        ids = [(n + A_STEP * self._step) % self.blocks for n in range(blocks)]
        self.guard.submit([jobs.store([b""] * blocks, ids)])
        if self.guard._threads is not None:
            self.guard._threads.wait()

    def verdicts(self, steps: int = BATCH * BATCHES // A_STEP) -> list[Verdict]:
        for _ in range(steps):
            self.encode(A_STEP)
        return self.guard.take()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.guard.shutdown()


def test_64_blocks_of_several_steps_make_the_first_verdict(world: World) -> None:
    world.encode(1000)
    assert len(world.guard._samples) == A_STEP
    assert world.guard.take_progress() == {3: A_STEP}
    assert world.guard.take_progress() == {}
    world.guard.reset()
    assert world.guard.take_progress() == {3: 0}
    assert world.verdicts(BATCH * BATCHES // A_STEP - 1) == []
    assert world.guard.take_progress() == {3: FIRST_BLOCKS - A_STEP}
    [found] = world.verdicts(1)
    assert world.guard.take_progress() == {}
    assert found.rank == 3
    assert [(each.codec, each.is_faithful) for each in found.measured] == [("k3v3", True), ("wht-4x", True)]
    assert found.measured[0].decode_s > 0


def test_after_that_one_block_in_a_thousand_is_measured(world: World) -> None:
    assert len(world.verdicts()) == 1
    for numbers in world.numbers():
        numbers[..., 5] += 30
    found = []
    for _ in range(BATCH * (BATCHES + 1)):
        world.encode(EVERY)
        found += world.guard.take()
    assert len(found) == BATCHES + 1
    assert found[0].measured[0].is_faithful  # the median is of what was before
    assert [each.is_faithful for each in found[-1].measured] == [False, True]


def test_tokens_that_repeat_each_other_say_nothing(world: World) -> None:
    """As those of "word word word ...": their values do not differ, and noise would be divided by nothing."""
    before = [numbers.clone() for numbers in world.numbers(of_values=True)]
    for numbers in world.numbers(of_values=True):
        numbers[:] = numbers[0, 0].clone()
    assert world.verdicts() == []
    for numbers, was in zip(world.numbers(of_values=True), before, strict=True):
        numbers[:] = was
    [found] = world.verdicts()
    assert found.measured[0].is_faithful


def test_a_measurement_that_fails_is_told_of_and_others_follow(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with logged.warnings() as said, monkeypatch.context() as patch:
        patch.setattr(guard, "measure", lambda *_: 1 / 0)
        [found] = world.verdicts(BATCH // A_STEP)
    assert list(found.measured) == []
    assert said == ["Manthan: the codecs' loss on this model's KV cannot be measured: division by zero"]
    assert len(world.verdicts()) == 1


def test_the_first_prompts_tell_how_fast_the_model_computes(world: World) -> None:
    for tokens in (1, 1000, 10):
        world.guard.begin_step(ManthanMetadata(tokens=tokens))
        time.sleep(0.01)
        world.guard.submit([])
    [found] = world.verdicts()
    assert 1e-5 <= found.compute_s < 1e-2


def test_a_step_is_timed_from_where_vllm_binds_its_metadata() -> None:
    """vLLM's V2 runner calls `start_load_kv` after the forward pass."""
    connector, steps = object.__new__(ManthanConnector), list[ManthanMetadata]()
    guard = types.SimpleNamespace(begin_step=steps.append)
    parts = {"guard": guard, "calibrator": None, "engine": Engine()}
    connector.worker = types.SimpleNamespace(**parts, of_this_rank=lambda metadata: metadata)
    metadata = ManthanMetadata(tokens=7)
    connector.bind_connector_metadata(metadata)
    assert steps == [metadata]


def test_blocks_are_copied_before_anybody_overwrites_them(world: World) -> None:
    caches = [cache.clone() for cache in world.layout.caches]
    for _ in range(BATCH * BATCHES // A_STEP):
        world.guard.submit([jobs.store([b""] * A_STEP, range(A_STEP))])
        for cache in world.layout.caches:
            cache.fill_(float("nan"))
        if world.guard._threads is not None:
            world.guard._threads.wait()
        for cache, was in zip(world.layout.caches, caches, strict=True):
            cache.copy_(was)
    [found] = world.guard.take()
    assert np.isfinite(found.measured[0].logit_noise).all()


def test_a_codec_that_is_offered_is_measured_first_and_nothing_of_before_counts(world: World) -> None:
    assert world.verdicts(BATCH * BATCHES // A_STEP - 1) == []
    world.guard.offer(BlockFormat("wht-5x", world.layout.shape, b"g" * 16))
    assert world.verdicts(BATCH * BATCHES // A_STEP - 1) == []
    [found] = world.verdicts(1)
    assert [each.codec for each in found.measured] == ["wht-5x", "k3v3", "wht-4x"]
