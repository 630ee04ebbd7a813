"""Calibrated codecs on a GPU against the CPU's: each reads what the other wrote, and both refuse the same."""

from dataclasses import replace
from typing import Any

import device_blocks
import numpy as np
import profiles
import pytest
import torch
from device_blocks import BLOCKS, FIRST_TOKENS, GROUP, IDS, KEYS, LAYERS, TARGETS, World, as_floats, near

from manthan.benchmarks import made_up
from manthan.codec import wire
from manthan.codec.cpu.rans import START
from manthan.codec.gpu.klt_codec import KltPagedCodec
from manthan.codec.gpu.paged import DTYPES
from manthan.codec.model import ModelFacts
from manthan.codec.profile import PRESETS, Profile
from manthan.codec.rope import Rope

CUDA = torch.device("cuda", 0)
SHAPES = [(2, 64), (3, 64), (8, 128), (2, 40), (1, 256)]


def world_of(
    heads: int = 3,
    head_dim: int = 64,
    preset: str = "klt-8x",
    tokens: int = 16,
    profile: Profile | None = None,
    kv: tuple[torch.Tensor, torch.Tensor] | None = None,
    **more: Any,
) -> World:
    """Numbers that fit the profile, or `kv`: keys before RoPE and values, float32 [layers, heads, tokens, head_dim]."""
    profile = profile or made_up.profile(LAYERS, heads, head_dim, made_up.rope_of(head_dim))
    still = replace(profile, info=replace(profile.info, rope=None))
    keys, values = kv or made_up.kv(still, BLOCKS * tokens, CUDA)
    if profile.info.rope:
        firsts = dict(zip(IDS, FIRST_TOKENS, strict=True))
        positions = np.concatenate([np.arange(tokens) + firsts.get(block, 0) for block in range(BLOCKS)])
        keys = torch.from_numpy(profile.info.rope.turn(keys.cpu().numpy(), positions)).to(CUDA)
    numbers = torch.cat((keys, values), 3).unflatten(2, (BLOCKS, tokens)).permute(0, 2, 3, 1, 4)
    facts = ModelFacts(profile.info.rope, profile)
    return device_blocks.kv(
        KltPagedCodec, preset, heads, head_dim, tokens=tokens, facts=facts, numbers=numbers, device=CUDA, **more
    )


def coded_again(world: World, i: int) -> None:
    """Sections are, byte for byte, what the CPU's entropy coder makes of their integers."""
    block = wire.parse(world.block(i), key=KEYS[i], fingerprint=b"f" * 16, group=GROUP)
    codec = world.format._codecs[world.format.codec]
    for section, codes in zip(block.header.sections[-2:], block.payloads[-2:], strict=True):
        rows = codec._bases[section.kind].rows(section.tokens)
        written = codes[START:]
        again = np.zeros_like(written)
        whole = codec._coder.read(written, rows)
        assert codec._coder.write(whole, lambda _, rows=rows: rows, again) == (0, written.size)
        assert np.array_equal(again, written)


def check(world: World) -> None:
    before = world.bits.clone()
    assert world.encode() == [None] * 4
    world.check_decoding(near)
    for i, target in enumerate(TARGETS):
        assert world.form.header.nbytes < world.nbytes[i] <= world.form.nbytes
        by_cpu = world.by_numpy(i)
        assert abs(world.nbytes[i] - len(by_cpu)) <= 0.01 * len(by_cpu) + 32
        coded_again(world, i)
        for x, y in zip(world.numbers(IDS[i]), world.numbers(target), strict=True):
            assert (as_floats(x) - as_floats(y)).square().mean() < 0.2 * as_floats(x).square().mean()
    world.check_others(before, TARGETS)
    doublings = [world.doublings(i) for i in range(4)]
    for i in range(4):
        world.write(i, world.by_numpy(i))
    assert [world.doublings(i) for i in range(4)] == doublings
    world.check_decoding(near)


@pytest.mark.parametrize("exact", [0, 4])
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(("heads", "head_dim"), SHAPES)
def test_each_reads_what_the_other_wrote(heads: int, head_dim: int, preset: str, exact: int) -> None:
    check(world_of(heads, head_dim, preset, exact=exact))


@pytest.mark.parametrize("exact", [0, 4, 16])
@pytest.mark.parametrize("beside", [0, 132])
@pytest.mark.parametrize("preset", PRESETS)
def test_latents(preset: str, beside: int, exact: int) -> None:
    """A basis a layer, of four pieces; RoPE's part, the first tokens and the bytes beside are as they were."""
    both = made_up.profile(LAYERS, 4, 128, None)
    numbers, _ = made_up.kv(both, BLOCKS * 16, CUDA)
    profile = profiles.of_latents(both)
    told: dict[str, Any] = {"exact": exact, "beside": beside, "device": CUDA, "facts": ModelFacts(profile=profile)}
    of_tokens = numbers.unflatten(2, (BLOCKS, 16)).permute(0, 2, 3, 1, 4).flatten(3)
    world = device_blocks.latents(KltPagedCodec, preset, numbers=of_tokens, **told)
    before = world.bits.clone()
    assert world.encode() == [None] * 4
    for i in range(4):
        by_cpu = world.by_numpy(i)
        assert abs(world.nbytes[i] - len(by_cpu)) <= 0.01 * len(by_cpu) + 32
    means = torch.tensor([float(np.abs(layer.keys.mean).max()) for layer in profile.layers])
    for _ in range(2):
        assert world.decode() == [None] * 4
        for i, target in enumerate(TARGETS):
            right, found = world.format.decode(world.block(i), key=KEYS[i]), world.numbers(target)
            assert all(x.tobytes() == y.tobytes() for n, (x, y) in enumerate(zip(right, found, strict=True)) if n != 1)
            assert right[1][:, :, :exact].tobytes() == found[1][:, :, :exact].tobytes()
            x, y = as_floats(right[1]), as_floats(found[1])
            far = (x.abs().amax((1, 3)) + means[:, None])[:, None, :, None] * 2**-10
            assert bool(((x - y).abs() <= far + torch.finfo(torch.bfloat16).eps * x.abs()).all())
            world.write(i, world.by_numpy(i))  # and then what the CPU wrote
    world.check_others(before, TARGETS)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("exact", [0, 4])
def test_other_caches(dtype: torch.dtype, exact: int) -> None:
    check(world_of(dtype=dtype, exact=exact, offset=3))


@pytest.mark.parametrize("tokens", [8, 20, 32, 128])
@pytest.mark.parametrize("exact", [0, 3, 7])
def test_blocks_of_any_number_of_tokens(tokens: int, exact: int) -> None:
    check(world_of(tokens=tokens, exact=exact))


@pytest.mark.parametrize(
    "rope", [None, Rope(tuple(100.0 ** -np.arange(0, 1, 1 / 16))), Rope((1.0, 0.3, 0.01), 1.2, interleaved=True)]
)
def test_any_rope(rope: Rope | None) -> None:
    check(world_of(profile=made_up.profile(LAYERS, 3, 64, rope)))


@pytest.mark.parametrize("metric", [False, True])
def test_a_profile_that_was_measured(metric: bool) -> None:
    """Its transforms are not orthogonal where there is a metric."""
    keys, values, _ = profiles.kv(BLOCKS * 16, seed=99, rope=None)
    kv = torch.from_numpy(keys.copy()).to(CUDA), torch.from_numpy(values.copy()).to(CUDA)
    check(world_of(profiles.HEADS, profiles.HEAD_DIM, "klt-5x", profile=profiles.built(metric=metric), kv=kv))


def test_tables_may_be_outside_of_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.cuda.get_device_properties

    class Small:
        def __init__(self, device: Any) -> None:
            self._real = real(device)

        def __getattr__(self, name: str) -> Any:
            return 1024 if name == "shared_memory_per_block_optin" else getattr(self._real, name)

    monkeypatch.setattr(torch.cuda, "get_device_properties", Small)
    check(world_of())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("exact", [0, 3])
@pytest.mark.parametrize("interleaved", [False, True])
def test_numbers_that_are_far_from_the_profile(dtype: torch.dtype, exact: int, interleaved: bool) -> None:
    """Of one block, the keys of another, the values of a third: those sections double their steps."""
    rope = replace(made_up.rope_of(64), interleaved=interleaved)
    world = world_of(dtype=dtype, exact=exact, profile=made_up.profile(LAYERS, 3, 64, rope))
    for layer in world.layers:
        for block, at in ((IDS[0], slice(None)), (IDS[1], slice(64)), (IDS[2], slice(64, None))):
            layer[block, ..., at] *= 30
    assert world.encode() == [None] * 4
    world.check_decoding(near)
    forms = [[count > 0 for count in world.doublings(i)] for i in range(4)]
    assert forms == [[True, True], [True, False], [False, True], [False, False]]
    for i, target in enumerate(TARGETS):
        for x, y in zip(world.numbers(IDS[i]), world.numbers(target), strict=True):
            assert (as_floats(x) - as_floats(y)).square().mean() < 0.2 * as_floats(x).square().mean()
        world.write(i, world.by_numpy(i))
        assert [count > 0 for count in world.doublings(i)] == forms[i]
    world.check_decoding(near)


def test_sealed_damage_of_doubled_steps_is_refused_where_the_cpu_refuses_it() -> None:
    world = world_of()
    for layer in world.layers:
        layer *= 30
    assert "decode" in device_blocks.damaged_and_sealed(world, near, front=80)


def test_numbers_too_far_from_the_profile_are_reported() -> None:
    world = world_of(dtype=torch.float32)
    world.layers[1][IDS[1], 5, 2, 64:] = 3e38
    world.layers[2][IDS[2], 5, 2, :64] = 2.0**99
    assert world.encode() == [None, "decode", "decode", None]
