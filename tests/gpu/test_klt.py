"""Calibrated codecs on a GPU and the CPU: each reads the other's blocks, at each level, and both refuse the same."""

from typing import Any

import device_blocks
import numpy as np
import pytest
import torch
from device_blocks import BLOCKS, FIRST_TOKENS, GROUP, IDS, KEYS, LAYERS, TARGETS, World, near, status_cause

from manthan.benchmarks import made_up
from manthan.codec import wire
from manthan.codec.cpu.klt import PRESETS
from manthan.codec.errors import ProfileError
from manthan.codec.gpu.klt_codec import KltPagedCodec
from manthan.codec.model import ModelFacts
from manthan.codec.rope import Rope

CUDA = torch.device("cuda", 0)
SHAPES = [(2, 64), (3, 64), (8, 128), (2, 40), (1, 256)]
LOSSY = [name for name in PRESETS if name != "klt-exact"]


def world_of(
    heads: int = 3,
    head_dim: int = 64,
    preset: str = "klt-5x",
    tokens: int = 16,
    layers: int = 2,
    scale: float = 1.0,
    rope: Rope | None = None,
    device: torch.device = CUDA,
    **more: Any,
) -> World:
    """layers: of a group. scale: by which numbers are further from the profile than it says."""
    together = max(1, min(layers, 2048 // (2 * heads * head_dim)))
    profile = made_up.profile(LAYERS, heads, head_dim, rope or made_up.rope_of(head_dim), together)
    keys, values = scale * made_up.grouped_kv(profile, BLOCKS * tokens)
    firsts = dict(zip(IDS, FIRST_TOKENS, strict=True))
    positions = np.concatenate([np.arange(tokens) + firsts.get(block, 0) for block in range(BLOCKS)])
    keys = profile.info.rope.turn(keys, positions)
    both = torch.from_numpy(np.concatenate([keys, values], 3))
    numbers = both.unflatten(2, (BLOCKS, tokens)).permute(0, 2, 3, 1, 4).to(device)
    facts = ModelFacts(profile.info.rope, profile)
    return device_blocks.kv(
        KltPagedCodec, preset, heads, head_dim, tokens=tokens, facts=facts, numbers=numbers, device=device, **more
    )


def check(world: World) -> None:
    before = world.bits.clone()
    assert world.encode() == [None] * 4
    assert [wire.part_ends(world.block(i)) for i in range(4)] == [
        [end for end in ends if end] for ends in world.encoded.ends.tolist()
    ]
    for written in (world.block, world.by_numpy):
        blocks = [written(i).copy() for i in range(4)]
        for part in range(len(wire.part_ends(blocks[0]))):
            for i, block in enumerate(blocks):
                world.write(i, block[: wire.part_ends(block)[(part + i) % len(wire.part_ends(block))]])
            world.check_decoding(near)
        for i, block in enumerate(blocks):
            world.write(i, block)
    world.check_others(before, TARGETS)
    for i, block in enumerate(blocks):
        assert abs(world.encoded.nbytes.tolist()[i] - len(block)) <= 0.01 * len(block) + 64


@pytest.mark.parametrize("exact", [0, 4])
@pytest.mark.parametrize("preset", LOSSY)
@pytest.mark.parametrize(("heads", "head_dim"), SHAPES)
def test_each_reads_what_the_other_wrote_at_each_level(heads: int, head_dim: int, preset: str, exact: int) -> None:
    check(world_of(heads, head_dim, preset, exact=exact))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("exact", [0, 4])
def test_other_caches(dtype: torch.dtype, exact: int) -> None:
    check(world_of(dtype=dtype, exact=exact, offset=3))


@pytest.mark.parametrize("tokens", [8, 20, 32, 128])
@pytest.mark.parametrize("exact", [0, 3, 7])
def test_blocks_of_any_number_of_tokens(tokens: int, exact: int) -> None:
    check(world_of(tokens=tokens, exact=exact))


@pytest.mark.parametrize(
    "rope", [Rope(tuple(100.0 ** -np.arange(0, 1, 1 / 16))), Rope((1.0, 0.3, 0.01), 1.2, interleaved=True)]
)
def test_any_rope(rope: Rope) -> None:
    check(world_of(rope=rope))


@pytest.mark.parametrize("exact", [0, 4, 16])
@pytest.mark.parametrize("opaque", [0, 132])
@pytest.mark.parametrize("preset", LOSSY)
def test_latents(preset: str, opaque: int, exact: int) -> None:
    """Four pieces a layer; RoPE's part, the first tokens and the opaque bytes are as they were."""
    profile = made_up.profile(LAYERS, 4, 128, None, latent=512)
    numbers = torch.from_numpy(made_up.grouped_kv(profile, BLOCKS * 16)[0])
    told: dict[str, Any] = {"exact": exact, "opaque": opaque, "device": CUDA, "facts": ModelFacts(profile=profile)}
    of_tokens = numbers.unflatten(2, (BLOCKS, 16)).permute(0, 2, 3, 1, 4).flatten(3)
    world = device_blocks.latents(KltPagedCodec, preset, numbers=of_tokens, **told)
    before = world.bits.clone()
    assert world.encode() == [None] * 4
    for _ in range(2):
        assert world.decode() == [None] * 4
        for i, target in enumerate(TARGETS):
            right, found = world.format.decode(world.block(i), key=KEYS[i]), world.numbers(target)
            assert all(x.tobytes() == y.tobytes() for n, (x, y) in enumerate(zip(right, found, strict=True)) if n != 1)
            near(world, i)
            world.write(i, world.by_numpy(i))  # and then what the CPU wrote
    world.check_others(before, TARGETS)


@pytest.mark.parametrize("layers", [1, 3])
def test_groups_of_any_number_of_layers(layers: int) -> None:
    check(world_of(layers=layers))


@pytest.mark.parametrize("scale", [6.0, 50.0], ids=["too many words", "no int16"])
@pytest.mark.parametrize("preset", LOSSY)
def test_numbers_far_from_the_profile_take_coarser_steps(preset: str, scale: float) -> None:
    world = world_of(preset=preset, scale=scale)
    assert world.encode() == [None] * 4
    assert all(wire.parse(world.block(i), group=GROUP).payloads[-1][1] for i in range(4))
    world.check_decoding(near)


def test_a_damaged_part_is_refused() -> None:
    world, rng = world_of(2, 40), np.random.default_rng(0)
    assert world.encode() == [None] * 4
    good = [world.block(i).copy() for i in range(4)]
    for _ in range(50):
        for i, block in enumerate(good):
            damaged = block.copy()
            damaged[rng.integers(len(block))] ^= 1 << rng.integers(8)
            world.write(i, damaged)
        batch = world.batch(TARGETS)
        world.codec.verify(batch, world.buffer)
        assert all(status_cause(status) is not None for status in batch.status.tolist())


def test_numbers_that_are_not_finite_are_not_stored() -> None:
    world = world_of()
    world.layers[1][IDS[2], 3, 1, 5] = float("nan")
    assert world.encode() == [None, None, "decode", None]


def test_products_too_large_for_fp16_are_not_stored() -> None:
    world = world_of()
    world.layers[1][IDS[2], 3] *= 2000.0
    assert world.encode() == [None, None, "decode", None]
    assert world.encoded.nbytes[2] == 0


def test_the_last_refinement_is_for_the_cpu() -> None:
    with pytest.raises(ProfileError, match="klt-exact has no GPU version"):
        world_of(preset="klt-exact")
