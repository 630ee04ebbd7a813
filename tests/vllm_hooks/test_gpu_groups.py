"""The path beside a GPU for several KV cache groups, with CUDA's part played on the CPU: chains, windows and states in
one allocation."""

import random
from collections.abc import Callable, Sequence

import fake_cuda
import numpy as np
import pytest
import torch
from fake_cuda import BLOCKS, DIM, HEADS, LAYERS, TOKENS, FormatCodec

from manthan.codec.base import Dtype
from manthan.codec.block import BlockFormat, BlockShape
from manthan.codec.gpu.paged import PagedCodec, PagedLayout, RawLayout
from manthan.codec.model import ModelFacts
from manthan.manager.stores.arena import room
from manthan.vllm_hooks.messages import GroupBlocks, Load, LoadResult, ManthanMetadata, SpillBlock, SpillResult
from manthan.vllm_hooks.worker import gpu_path
from manthan.vllm_hooks.worker.gpu_path import GpuPath
from manthan.vllm_hooks.worker.tiers import Tier, Tiers

CHAIN, WINDOW, STATE = 5, 0, 2
EXACTS = (0, 3, TOKENS)
WIDTH = HEADS * TOKENS * 2 * DIM
"""Numbers of a block in a layer, in bf16."""


def layouts(memory: torch.Tensor) -> tuple[PagedLayout, RawLayout]:
    """A group's layers in bf16 [LAYERS, BLOCKS, WIDTH], which those of the others take as well; and as bytes."""
    strides = (WIDTH, 2 * DIM, HEADS * 2 * DIM)
    plain = PagedLayout(tuple(memory), HEADS, TOKENS, DIM, *strides, key_at=0, value_at=DIM)
    rows = tuple(memory.view(torch.uint8))
    shape = BlockShape(1, LAYERS, TOKENS, rows[0].shape[1] // TOKENS, Dtype.UINT8)
    return plain, RawLayout(rows, shape)


class World:
    """place: bytes of the tiers on the device and on the host. names: of other codecs that may be ordered."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, place: tuple[int, int], staging: int, names: Sequence[str]
    ) -> None:
        self.gpu = fake_cuda.install(monkeypatch)
        monkeypatch.setattr(gpu_path, "STAGING_BYTES", staging)
        monkeypatch.setattr(gpu_path, "RESTORE_STAGING_BYTES", staging)
        torch.manual_seed(1)
        self.memory = torch.randn(LAYERS, BLOCKS, WIDTH).bfloat16()
        self.plain, raw = layouts(self.memory)
        rope = fake_cuda.made_up.rope_of(DIM)
        formats = {
            CHAIN: BlockFormat("wht-4x", self.plain.shape, b"c" * 16, CHAIN, ModelFacts(rope)),
            WINDOW: BlockFormat("k3v3", self.plain.shape, b"w" * 16, WINDOW),
            STATE: BlockFormat("exact", raw.shape, b"s" * 16, STATE),
        }
        self.codecs: dict[int, PagedCodec] = {
            CHAIN: FormatCodec(self.plain, formats[CHAIN]),
            WINDOW: FormatCodec(self.plain, formats[WINDOW]),
            STATE: fake_cuda.raw_codec(raw, formats[STATE]),
        }
        tiers = [Tier(torch.zeros(nbytes, dtype=torch.uint8)) if nbytes else None for nbytes in place]
        self.tiers = Tiers(*tiers)
        self.made: dict[tuple[int, str], PagedCodec] = {}
        self.path = GpuPath(self.codecs, self.tiers, True, EXACTS, self.make, names=names)

    def make(self, group: int, name: str) -> PagedCodec:
        assert (group, name) not in self.made
        made = FormatCodec(self.plain, BlockFormat(name, self.plain.shape, b"g" * 16, group))
        self.made[group, name] = made
        return made

    def spill(self, *spills: SpillBlock) -> list[SpillResult]:
        self.path.submit_spills(ManthanMetadata(spills=list(spills)))
        self.path.take_finished_loads()
        by_name = {(result.group, result.key): result for result in self.path.take_report().spills}
        assert len(by_name) == len(spills)
        return [by_name[spill.group, spill.key] for spill in spills]

    def load(self, *parts: GroupBlocks) -> LoadResult:
        self.path.submit_loads(ManthanMetadata(loads=[Load("request", parts)]))
        assert self.path.take_finished_loads() == {"request"}
        [result] = self.path.take_report().loads
        return result

    def as_restored(self, spill: SpillBlock) -> torch.Tensor:
        """What all layers' numbers of a block become, as numpy says."""
        if spill.group == STATE:
            return self.memory[:, spill.block_id].clone()
        heads = self.memory[:, spill.block_id].view(LAYERS, TOKENS, HEADS, 2, DIM).permute(3, 0, 2, 1, 4)
        form = self.made.get((spill.group, spill.codec), self.codecs[spill.group]).format
        both = heads.contiguous().view(torch.uint16).numpy()
        told = {"key": spill.key, "first_token": spill.first_token, "exact": spill.exact}
        back = np.stack(form.decode(form.encode(both[0], both[1], **told), key=spill.key))
        return torch.from_numpy(back).view(torch.bfloat16).permute(1, 3, 2, 0, 4).reshape(LAYERS, WIDTH)


def key(n: int) -> bytes:
    return n.to_bytes(32, "big")


def order(group: int, n: int, block_id: int, exact: int = 0) -> SpillBlock:
    return SpillBlock(key(n), group, block_id, TOKENS * n, 0 if group == STATE else exact)


def part(spills: Sequence[SpillBlock], targets: Sequence[int]) -> GroupBlocks:
    return GroupBlocks(spills[0].group, [spill.key for spill in spills], list(targets))


@pytest.fixture(params=["device", "host", "device and host"])
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., World]:
    """With room for so many blocks that are all exact."""

    def made(blocks: int = 20, staging: int = 1 << 15, names: Sequence[str] = ()) -> World:
        nbytes = blocks * room(LAYERS * WIDTH * 2 + 512)
        place = {"device": (nbytes, 0), "host": (0, nbytes), "device and host": (nbytes // 3, nbytes)}[request.param]
        return World(monkeypatch, place, staging, names)

    return made


@pytest.mark.parametrize("staging", [1 << 16, 1])
def test_blocks_of_all_groups_come_back_together(make: Callable[..., World], staging: int) -> None:
    """The same keys in every group; blocks of others, which lie in the same memory, are as they were."""
    world, rng = make(staging=staging), random.Random(staging)
    for _ in range(20):
        sources, targets = (rng.sample(some, 9) for some in (range(BLOCKS // 2), range(BLOCKS // 2, BLOCKS)))
        chain = [order(CHAIN, n, sources[n], rng.choice(EXACTS)) for n in range(4)]
        window = [order(WINDOW, n, sources[4 + n], rng.choice(EXACTS)) for n in range(2, 5)]
        states = [order(STATE, 3, sources[0])._replace(block_id=sources[8])]
        spills = rng.sample([*chain, *window, *states], 8)
        right = {(spill.group, spill.key): world.as_restored(spill) for spill in spills}
        assert {result.cause for result in world.spill(*spills)} == {None}
        before = world.memory.clone()
        parts = [part(chain, targets[:4]), part(window, targets[4:7]), part(states, targets[7:8])]
        result = world.load(*parts)
        assert result.failed == []
        stored = [tier.blocks() for tier in world.tiers.all]
        names = [(each.group, name) for each in parts for name in each.keys]
        assert result.nbytes == sum(stored[name not in stored[0]][name].nbytes for name in names)
        for name, target in zip(names, targets, strict=False):
            assert torch.equal(world.memory[:, target], right[name])
        others = [block for block in range(BLOCKS) if block not in targets[:8]]
        assert torch.equal(world.memory[:, others].view(torch.uint16), before[:, others].view(torch.uint16))
        assert world.path.take_failed_loads() == set()
        for each in parts:
            world.tiers.drop(each.group, each.keys)
        assert world.tiers.used == 0


@pytest.mark.parametrize("bad", [CHAIN, WINDOW, STATE])
@pytest.mark.parametrize("is_gone", [True, False])
def test_what_is_bad_in_one_group_fails_the_load(make: Callable[..., World], bad: int, is_gone: bool) -> None:
    """Counted through the parts: the first that is bad is told, and what is missing ends the load where it is."""
    world = make()
    chain, window = [order(CHAIN, n, n) for n in range(3)], [order(WINDOW, n, 10 + n) for n in range(1, 3)]
    states = [order(STATE, 2, 20)]
    world.spill(*chain, *window, *states)
    if is_gone:
        world.tiers.drop(bad, [key(2)])
    else:
        [tier] = [tier for tier in world.tiers.all if (bad, key(2)) in tier.blocks()]
        tier.codes[tier.blocks()[bad, key(2)].extents[0].start + 700] ^= 1
    before = world.memory.clone()
    result = world.load(part(chain, [40, 41, 42]), part(window, [43, 44]), part(states, [45]))
    assert result.failed == [(bad, key(2), "missing" if is_gone else "checksum")]
    assert world.path.take_failed_loads() == {"request"}
    assert world.path.take_failed_blocks() == set()
    [target] = {CHAIN: [42], WINDOW: [44], STATE: [45]}[bad]
    assert torch.equal(world.memory[:, target], before[:, target])


def test_the_guard_s_codec_is_each_group_s_own_and_states_stay_as_they_are(make: Callable[..., World]) -> None:
    """It is made when the engine starts, and the configured ones stay beside it."""
    world = make(names=["wht-5x"])
    made = [(WINDOW, "wht-5x"), (CHAIN, "wht-5x")]
    assert sorted(world.made) == made
    spills = [
        order(group, n, 1 + n)._replace(codec=codec)
        for n, (group, codec) in enumerate(
            (group, codec) for codec in ("wht-5x", "") for group in (CHAIN, WINDOW, STATE)
        )
    ]
    assert [result.cause for result in world.spill(*spills)] == [None] * 6
    assert [codec.format.codec for codec in world.path.codecs.values()] == ["wht-4x", "k3v3", "exact"]
    right = [world.as_restored(spill) for spill in spills]
    parts = [part([spills[n], spills[n + 3]], [40 + n, 43 + n]) for n in range(3)]
    assert world.load(*parts).failed == []
    assert all(torch.equal(world.memory[:, 40 + n], numbers) for n, numbers in enumerate(right))
    assert sorted(world.made) == made
