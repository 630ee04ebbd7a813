"""wht-5x and wht-4x on a GPU against the CPU's: the same bytes, the same numbers, and both refuse the same."""

from types import SimpleNamespace
from typing import Any

import device_blocks
import pytest
import torch
from device_blocks import IDS, KEYS, TARGETS, World, rope_of

from manthan.codec import registry, wht
from manthan.codec.errors import CodecError
from manthan.codec.gpu import wht_codec
from manthan.codec.gpu.paged import DTYPES, GOOD
from manthan.codec.rope import Rope
from manthan.codec.wht import NAME, PRESETS, WhtPreset

KEY_NUMBERS, VALUE_NUMBERS = slice(64), slice(64, 128)


def world_of(*shape: Any, codec: str = NAME, **more: Any) -> World:
    return device_blocks.kv(wht_codec.WhtPagedCodec, codec, *shape, device=torch.device("cuda", 0), **more)


@pytest.mark.parametrize("exact", [0, 4])
@pytest.mark.parametrize("tokens", [16, 128])
@pytest.mark.parametrize(("heads", "head_dim"), [(3, 64), (2, 80), (3, 96), (8, 128), (1, 256)])
def test_the_cpu_s_bytes_and_numbers(heads: int, head_dim: int, tokens: int, exact: int) -> None:
    world_of(heads, head_dim, tokens=tokens, exact=exact, layers=2).check()


@pytest.mark.parametrize("tokens", [1, 16, 20])
def test_finer_steps(tokens: int) -> None:
    world_of(tokens=tokens, codec="wht-4x").check()


@pytest.mark.parametrize("codec", PRESETS)
def test_what_was_decoded_is_encoded_to_the_same(codec: str) -> None:
    """All but the few rows of keys whose step the first rounding moved, and these after another time."""
    world = world_of(codec=codec)
    world.encode()
    for _ in range(4):
        world.decode()
        numbers = [world.numbers(target) for target in TARGETS]
        for layer in world.layers:
            layer[IDS] = layer[TARGETS]
        world.encode()
    world.decode()
    for target, before in zip(TARGETS, numbers, strict=True):
        assert [x.tobytes() for x in world.numbers(target)] == [x.tobytes() for x in before]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("exact", [0, 1, 5])
@pytest.mark.parametrize(("head_dim", "offset", "apart"), [(64, 0, 0), (96, 3, 0), (64, 0, 3), (64, 0, 64)])
def test_any_dtype_and_layout(head_dim: int, offset: int, apart: int, exact: int, dtype: torch.dtype) -> None:
    world_of(head_dim=head_dim, offset=offset, apart=apart, dtype=dtype, exact=exact).check()


@pytest.mark.parametrize(("heads", "head_dim"), [(1, 32), (5, 40), (1, 264), (2, 512), (40, 64), (4, 64), (8, 64)])
def test_other_shapes(heads: int, head_dim: int) -> None:
    world_of(heads, head_dim).check()


@pytest.mark.parametrize("tokens", [8, 20, 33])
@pytest.mark.parametrize("exact", [0, 3, 7])
def test_blocks_of_any_number_of_tokens(tokens: int, exact: int) -> None:
    world_of(tokens=tokens, exact=exact).check()


@pytest.mark.parametrize(
    "rope",
    [Rope(()), rope_of(64, 32), rope_of(64, 24), Rope((1.0, 0.3, 0.01), 1.2, interleaved=True)],
    ids=["none", "half", "some", "interleaved"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_any_rope(rope: Rope, dtype: torch.dtype) -> None:
    world_of(rope=rope, dtype=dtype).check()


@pytest.mark.parametrize("shared", [2**11, 2**15, 100 * 2**10])
@pytest.mark.parametrize("tokens", [16, 20])
def test_rows_and_tables_may_be_outside_of_shared_memory(
    monkeypatch: pytest.MonkeyPatch, tokens: int, shared: int
) -> None:
    small = SimpleNamespace(shared_memory_per_block_optin=shared)
    with monkeypatch.context() as patch:
        patch.setattr(wht_codec, "properties_of", lambda device: small)
        world = world_of(8, 64, tokens=tokens)
    world.check()


@pytest.fixture
def fine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds so small that only zeros fit without larger steps."""
    fine = WhtPreset(NAME, 0.05, 0.05)
    monkeypatch.setitem(PRESETS, NAME, fine)
    monkeypatch.setitem(registry.PRESETS, NAME, fine)
    monkeypatch.setattr(wht, "SLACK", (1, 2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("exact", [0, 3])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.usefixtures("fine")
def test_sections_that_would_be_too_long(dtype: torch.dtype, exact: int, interleaved: bool) -> None:
    world = world_of(dtype=dtype, exact=exact, rope=Rope(rope_of(64).frequencies, 1.0, interleaved))
    for layer in world.layers:
        for block, at in ((IDS[1], KEY_NUMBERS), (IDS[2], VALUE_NUMBERS), (IDS[3], slice(None))):
            layer[block, ..., at] = 0
    world.check()
    found = [[count > 0 for count in world.doublings(i)] for i in range(4)]
    assert found == [[True, True], [False, True], [True, False], [False, False]]


@pytest.mark.usefixtures("fine")
def test_sealed_damage_of_doubled_steps_is_refused_where_the_cpu_refuses_it() -> None:
    assert {None, "decode"} <= device_blocks.damaged_and_sealed(world_of(), device_blocks.same, front=700)


def test_keys_that_no_transform_makes_gaussian() -> None:
    """Two tokens of each head, opposite to each other, and one number of each, are all that there is."""
    world = world_of(tokens=32, rope=Rope(()))
    for layer in world.layers:
        layer[IDS[1], ..., KEY_NUMBERS] = 0
        layer[IDS[1], 5, :, 7], layer[IDS[1], 9, :, 7] = 1000, -1000
    world.check()


def test_numbers_of_all_sizes() -> None:
    """Tokens, heads and layers that are much smaller or larger than others, and none: escapes, steps that are not."""
    world = world_of(4, dtype=torch.float32)
    for layer in world.layers:
        layer *= 2.0 ** torch.randint(-12, 13, layer.shape[:-1], device=layer.device)[..., None]
    world.layers[0][IDS[0]] = 0
    world.layers[1][IDS[1], 3:9] = 0
    world.layers[2][IDS[1]] *= 1e-30
    world.layers[0][IDS[2]] *= 1e-44
    world.layers[1][IDS[2], :, :, VALUE_NUMBERS] = -0.0
    world.layers[2][IDS[3], 5, 1] = 2.0**39.9
    world.check()


@pytest.mark.parametrize("number", [2.0**40, -(2.0**60)])
def test_what_is_too_large_is_reported(number: float) -> None:
    world = world_of()
    world.layers[1][7, 9, 2, 3] = number
    assert world.encode() == [None, "decode", None, None]
    with pytest.raises(CodecError, match=r"2\*\*40 on"):
        world.by_numpy(1)


def test_launches_of_few_tokens_do_not_stand_in_the_way_of_others() -> None:
    """A kernel that has been started with less shared memory is started with as much as before."""
    world = world_of()
    buffer = torch.zeros_like(world.buffer)
    for exact in (0, 12, 0):
        batch = world.codec.batch(exact, KEYS, IDS, device_blocks.FIRST_TOKENS, world.offsets)
        world.codec.encode(batch, buffer)
        assert bool((batch.status == GOOD).all())
