"""What holds for the kernels of all codecs against numpy, and those of k3v3: the same bytes and numbers."""

from collections.abc import Callable
from typing import Any, NamedTuple

import device_blocks
import numpy as np
import pytest
import torch
from device_blocks import IDS, KEYS, LAYERS, TARGETS, World, as_floats, near, same

from manthan.benchmarks import made_up
from manthan.codec.errors import CodecError
from manthan.codec.gpu import klt_codec, wht_codec
from manthan.codec.gpu.k3v3_codec import K3v3PagedCodec
from manthan.codec.gpu.klt_codec import KltPagedCodec
from manthan.codec.gpu.paged import DTYPES, GOOD
from manthan.codec.gpu.wht_codec import WhtPagedCodec
from manthan.codec.model import ModelFacts
from manthan.codec.profile import Profile

CUDA = torch.device("cuda", 0)


def fitting(profile: Profile, tokens: int) -> torch.Tensor:
    """Keys without RoPE and values that fit a profile, as `device_blocks.kv` takes them."""
    both = made_up.kv(profile, device_blocks.BLOCKS * tokens, CUDA)
    blocks = [x.unflatten(2, (device_blocks.BLOCKS, tokens)).permute(0, 2, 3, 1, 4) for x in both]
    return torch.cat(blocks, -1)


def klt(heads: int = 3, tokens: int = 16, **more: Any) -> World:
    """Without RoPE, so that any position fits."""
    profile = made_up.profile(LAYERS, heads, 64, None)
    numbers = fitting(profile, tokens)
    facts = ModelFacts(None, profile)
    return device_blocks.kv(
        KltPagedCodec, "klt-8x", heads, tokens=tokens, numbers=numbers, facts=facts, device=CUDA, **more
    )


def wht(**more: Any) -> World:
    return device_blocks.kv(WhtPagedCodec, "wht-5x", device=CUDA, **more)


def k3v3(**more: Any) -> World:
    return device_blocks.kv(K3v3PagedCodec, "k3v3", device=CUDA, **more)


def close(world: World, i: int) -> None:
    """Exact tokens bit for bit; few others differ, by the last bit of the dtype or of the sum before a cancellation."""
    right, found = world.format.decode(world.block(i), key=KEYS[i]), world.numbers(TARGETS[i])
    for x, y in zip(right, found, strict=True):
        assert x[:, :, : world.exact].tobytes() == y[:, :, : world.exact].tobytes()
        assert (x != y).mean() <= 0.01
        x, y, number = as_floats(x), as_floats(y), torch.finfo(world.layers[0].dtype)
        tiny = 2e-6 * x.pow(2).mean(-1, keepdim=True).sqrt()
        assert bool(((x - y).abs() <= torch.maximum(tiny, number.eps * x.abs().clamp(min=number.tiny))).all())


class Kernels(NamedTuple):
    make: Callable[..., World]
    alike: device_blocks.Alike


ALL = {"wht-5x": Kernels(wht, same), "klt-8x": Kernels(klt, near), "k3v3": Kernels(k3v3, close)}
each = pytest.mark.parametrize("name", ALL)
each_that_varies = pytest.mark.parametrize("name", ["wht-5x", "klt-8x"])


@each
@pytest.mark.parametrize("exact", [3, 16])
def test_exact_tokens_may_be_anything(name: str, exact: int) -> None:
    """Not finite, denormal, minus zero."""
    world = ALL[name].make(exact=exact, offset=3)
    noise = torch.randint(-(2**15), 2**15, (device_blocks.BLOCKS, exact, 3, 128), dtype=torch.int16, device=CUDA)
    for layer in world.layers:
        layer[:, :exact].view(torch.int16).copy_(noise)
    assert world.encode() == [None] * 4
    assert world.decode() == [None] * 4
    for i, (block, target) in enumerate(zip(IDS, TARGETS, strict=True)):
        for then, now in zip(world.numbers(block), world.numbers(target), strict=True):
            assert then[:, :, :exact].tobytes() == now[:, :, :exact].tobytes()
        assert exact < 16 or np.array_equal(world.block(i), world.by_numpy(i))


@each
@pytest.mark.parametrize("exact", [0, 4, 16])
def test_damage_is_told_apart_and_not_written(name: str, exact: int) -> None:
    device_blocks.damaged(ALL[name].make(exact=exact))


@each_that_varies
@pytest.mark.parametrize("exact", [0, 2])
def test_sealed_damage_is_refused_where_numpy_refuses_it(name: str, exact: int) -> None:
    world = ALL[name].make(exact=exact)
    assert "decode" in device_blocks.damaged_and_sealed(world, ALL[name].alike, front=400)


@each_that_varies
@pytest.mark.parametrize("change", [-16, 16])
def test_a_size_that_is_not_the_block_s(name: str, change: int) -> None:
    world = ALL[name].make()
    world.encode()
    world.nbytes[2] += change
    assert world.decode() == [None, None, "checksum", None]
    if name == "wht-5x":  # a block without refinements
        world.write(2, device_blocks.wire.seal(world.block(2).copy()))
        assert world.decode() == [None, None, "size", None]


@each
@pytest.mark.parametrize("at", [3, 67])
@pytest.mark.parametrize("exact", [0, 5])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_reported(name: str, number: float, exact: int, at: int) -> None:
    world = ALL[name].make(exact=exact)
    world.layers[1][7, 9, 2, at] = number
    world.layers[2][7, 6, 1, at] = number
    assert world.encode() == [None, "decode", None, None]
    bad = 3 * (16 - exact) + 2 * (16 - exact) + 9 - exact
    assert world.encoded.status[1].item() == (0 if name.startswith("klt") else bad)
    with pytest.raises(CodecError):
        world.by_numpy(1)


@each_that_varies
@pytest.mark.parametrize("exact", [0, 3])
@pytest.mark.parametrize("nbytes", [1, 2**18])
def test_groups_of_blocks(monkeypatch: pytest.MonkeyPatch, name: str, nbytes: int, exact: int) -> None:
    """However many are worked on at a time, the numbers are the same; where nothing is rounded, the bytes, too."""
    monkeypatch.setattr(wht_codec, "SCRATCH_BYTES", nbytes)
    monkeypatch.setattr(klt_codec, "SCRATCH_BYTES", 3 * nbytes)
    monkeypatch.setattr(klt_codec, "PRODUCTS_AT_ONCE", nbytes)
    world = ALL[name].make(exact=exact)
    assert world.encode() == [None] * 4
    world.check_decoding(ALL[name].alike)
    grouped = [world.block(i) for i in range(4)]
    monkeypatch.undo()
    assert world.encode() == [None] * 4
    assert name == "klt-8x" or all(np.array_equal(one, world.block(i)) for i, one in enumerate(grouped))


@each
def test_many_blocks_at_once(name: str) -> None:
    """More than fit on the GPU side by side; each has the bytes that it gets alone, but for products' rounding."""
    world, n = ALL[name].make(), 3000
    world.encode()
    start, room, alone = world.form.header.nbytes, world.form.nbytes, world.block(1)
    buffer = torch.zeros(n * room, dtype=torch.uint8, device=CUDA)
    keys, places = [i.to_bytes(32, "big") for i in range(n)], room * np.random.default_rng(1).permutation(n)
    batch = world.codec.batch(0, keys, [IDS[1]] * n, [0] * n, places.tolist())
    world.codec.encode(batch, buffer)
    assert bool((batch.status == GOOD).all())
    right = torch.from_numpy(alone[start:].copy()).to(CUDA)
    assert name == "klt-8x" or bool((buffer.view(n, room)[:, start : len(alone)] == right).all())


# -- k3v3 -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("exact", [0, 1, 8, 16])
@pytest.mark.parametrize("head_dim", [32, 40, 64, 80, 96, 112, 128, 160, 192, 256, 512])
def test_codes_are_numpys_and_come_back_as_numpys_numbers(head_dim: int, exact: int, dtype: torch.dtype) -> None:
    k3v3(head_dim=head_dim, exact=exact, dtype=dtype).check(close, rare=1e-4)


@pytest.mark.parametrize("tokens", [20, 24, 128])
@pytest.mark.parametrize("exact", [0, 4])
def test_blocks_of_any_number_of_tokens(tokens: int, exact: int) -> None:
    k3v3(head_dim=96, tokens=tokens, exact=exact).check(close, rare=1e-4)


@pytest.mark.parametrize("head_dim", [80, 112, 128])
def test_extremes_are_encoded_as_numpy_does(head_dim: int) -> None:
    world = k3v3(head_dim=head_dim)
    block = world.layers[0][IDS[0], :, 0, :head_dim]
    for t, factor in enumerate((0.0, 1e-39, 1e37, 1e-30, 3e38, 1e-20, 1e18)):
        block[t] *= factor
    block[8] = 0
    block[8, 5] = 3.3e38
    block[9] = 3.38e38
    block.nan_to_num_()
    assert world.encode() == [None] * 4
    assert np.array_equal(world.block(0), world.by_numpy(0))
