"""Blocks of a GPU's cache for stores that only the CPU reaches, with PyTorch's codec on the CPU: numpy reads what they
write and writes what they read, whatever is exact."""

import random
from collections.abc import Callable

import fake_cuda
import numpy as np
import pytest
import torch
from fake_cuda import BLOCKS, TOKENS, FormatCodec

from manthan.codec import wire
from manthan.codec.block import BlockFormat
from manthan.codec.gpu import klt_codec
from manthan.codec.gpu.nvrtc import CompileError
from manthan.codec.gpu.paged import PagedCodec
from manthan.manager.stores.cold_store import Found
from manthan.vllm_hooks.messages import SpillBlock
from manthan.vllm_hooks.support import UnsupportedError
from manthan.vllm_hooks.worker import paged_blocks
from manthan.vllm_hooks.worker.blocks import Buffer, CpuBlocks, DeviceMemory
from manthan.vllm_hooks.worker.half import paged_codec
from manthan.vllm_hooks.worker.paged_blocks import PagedBlocks

GROUP = 3
EXACT = [0, 0, 3, TOKENS, TOKENS, TOKENS, 1, 0, TOKENS - 1]


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda.install(monkeypatch)


class World:
    """Two ways to the same blocks of one cache."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, codec: PagedCodec | None = None) -> None:
        codec = codec or fake_cuda.paged_codec(dtype=dtype, group=GROUP)
        self.caches = codec.layout.caches
        self.ours = PagedBlocks(codec)
        self.numpy = CpuBlocks(DeviceMemory(codec.layout), codec.format)
        self.spills = [SpillBlock(bytes([n]) * 32, GROUP, n, TOKENS * n, exact) for n, exact in enumerate(EXACT)]
        self.keys = [spill.key for spill in self.spills]
        self.targets = list(range(BLOCKS - len(EXACT), BLOCKS))

    def restored(self, by: PagedBlocks | CpuBlocks, bufs: list[Buffer]) -> list[torch.Tensor]:
        """The caches' bits after decoding into TARGETS, which were zero."""
        for cache in self.caches:
            cache[self.targets] = 0
        assert by.decode_all(self.keys, self.targets, bufs) == [None] * len(bufs)
        return [cache.clone().view(torch.uint8) for cache in self.caches]


@pytest.fixture(params=[1 << 20, 1], ids=["all at once", "one exact block at a time"])
def staging(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_blocks, "STAGING_BYTES", request.param)


@pytest.mark.usefixtures("staging")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_both_ways_write_and_read_the_same(dtype: torch.dtype) -> None:
    world = World(dtype)
    ours, numpys = world.ours.encode_all(world.spills), world.numpy.encode_all(world.spills)
    assert all(np.array_equal(a, b) for a, b in zip(ours, numpys, strict=True))
    pairs = zip(world.restored(world.ours, numpys), world.restored(world.numpy, ours), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.usefixtures("staging")
def test_blocks_of_several_codecs_lie_side_by_side() -> None:
    """An order may name the codec; whoever reads looks at the block."""
    world = World()
    layout = world.ours.codec.layout
    finer = FormatCodec(layout, BlockFormat("wht-4x", layout.shape, b"g" * 16, GROUP))
    ours = PagedBlocks(world.ours.codec, finer)
    numpy = CpuBlocks(DeviceMemory(layout), world.ours.format, finer.format)
    spills = [spill._replace(codec="wht-4x") if n % 3 else spill for n, spill in enumerate(world.spills)]
    made, numpys = ours.encode_all(spills), numpy.encode_all(spills)
    assert all(np.array_equal(a, b) for a, b in zip(made, numpys, strict=True))
    found = [{section.codec for section in wire.parse(buf, group=GROUP).header.sections} - {"exact"} for buf in made]
    assert found == [{"k3v3"}, {"wht-4x"}, {"wht-4x"}, set(), set(), set(), {"k3v3"}, {"wht-4x"}, {"wht-4x"}]
    pairs = zip(world.restored(ours, numpys), world.restored(numpy, made), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert world.ours.decode_all(world.keys[1:2], world.targets[1:2], made[1:2]) == ["size"]  # it knows one codec


@pytest.mark.usefixtures("staging")
def test_blocks_whose_sizes_vary_are_as_long_as_they_are() -> None:
    world = World(codec=fake_cuda.varying_codec(group=GROUP))
    ours, numpys = world.ours.encode_all(world.spills), world.numpy.encode_all(world.spills)
    assert all(np.array_equal(a, b) for a, b in zip(ours, numpys, strict=True))
    assert len({len(buf) for buf in ours}) > len({*EXACT})
    assert torch.equal(*(torch.stack(world.restored(by, ours)) for by in (world.ours, world.numpy)))
    for change in (-16, 16, -len(ours[0]) // 2 * 2, 1 << 20):
        other = np.resize(ours[0], max(0, len(ours[0]) + change))
        assert world.ours.decode_all(world.keys[:1], world.targets[:1], [other])[0] in ("truncated", "trailing")


def test_a_block_that_cannot_be_encoded_costs_itself_alone() -> None:
    world = World()
    world.caches[0][1, 0] = float("nan")
    causes = [made if isinstance(made, str) else "" for made in world.ours.encode_all(world.spills)]
    assert causes == ["", "encode", *[""] * 7]


def sealed(change: Callable[[Buffer], object]) -> Callable[[Buffer], Buffer]:
    """What `change` does to a copy, and the checksum that it should have."""

    def changed(buf: Buffer) -> Buffer:
        buf = buf.copy()
        change(buf)
        return wire.seal(buf)

    return changed


def with_byte(at: int, value: int) -> Callable[[Buffer], object]:
    return lambda buf: buf.__setitem__(at, value)


HARM: dict[str, tuple[Callable[[Buffer], Found], str]] = {
    "none": (lambda buf: None, "missing"),
    "not to be opened": (lambda buf: "seal", "seal"),
    "nothing": (lambda buf: buf[:0], "truncated"),
    "no entry": (lambda buf: buf[:150], "truncated"),
    "a short end": (lambda buf: buf[:-16], "truncated"),
    "a long end": (lambda buf: np.append(buf, np.zeros(16, np.uint8)), "trailing"),
    "a bit": (lambda buf: np.append(buf[:-20], buf[-20:] ^ 1), "checksum"),
    "magic": (sealed(with_byte(0, 1)), "magic"),
    "format 9": (sealed(with_byte(4, 9)), "version"),
    "fingerprint": (sealed(with_byte(20, 1)), "fingerprint"),
    "group": (sealed(with_byte(48, 9)), "key"),
    "key": (sealed(with_byte(70, 99)), "key"),
    "a place that cannot be": (sealed(with_byte(47, 255)), "size"),
    "tokens": (sealed(with_byte(52, 9)), "size"),
    "tokens of the first section": (sealed(with_byte(128 + 16, 200)), "size"),
    "its codec": (sealed(with_byte(128 + 32, 33)), "size"),
}


@pytest.mark.parametrize("which", [1, 2, 4], ids=["codes", "both", "exact"])
@pytest.mark.parametrize("what", HARM)
def test_nothing_else_than_what_was_written_is_read(what: str, which: int) -> None:
    world, (harm, cause) = World(), HARM[what]
    bufs: list[Buffer | None] = list(world.ours.encode_all(world.spills))
    bufs[which] = harm(bufs[which])
    for cache in world.caches:
        cache[world.targets] = 0
    causes = world.ours.decode_all(world.keys, world.targets, bufs)
    assert (causes.index(cause), {*causes} - {None}) == (which, {cause})
    for cache in world.caches:
        assert cache[world.targets[:which]].abs().amax(1).min() > 0
        assert not cache[world.targets[which]].any()
        assert not cache[world.targets[which + 1 :][len(causes) :]].any()


def test_blocks_of_a_place_or_a_form_that_they_do_not_have_are_refused() -> None:
    """Whole blocks of another shape, codec or group, each in good order."""
    world = World()
    shape = world.ours.format.shape
    numbers = np.zeros(shape.numbers, np.uint16)
    others = {
        "size": BlockFormat("wht-5x", shape, b"f" * 16, GROUP),
        "fingerprint": BlockFormat("k3v3", shape, b"g" * 16, GROUP),
        "key": BlockFormat("k3v3", shape, b"f" * 16, GROUP + 1),
    }
    for cause, other in others.items():
        buf = other.encode(numbers, numbers, key=world.keys[0], first_token=0, exact=0)
        assert world.ours.decode_all(world.keys[:1], world.targets[:1], [buf]) == [cause]


def test_a_calibrated_codec_is_nothing_on_a_gpu_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(*args: object) -> None:
        raise CompileError("the Python package cuda-bindings is not installed")

    monkeypatch.setattr(klt_codec, "KltPagedCodec", made)
    codec = fake_cuda.varying_codec()
    with pytest.raises(UnsupportedError, match=r"klt-8x needs CUDA kernels .* not installed; use backend numpy"):
        paged_codec(codec.layout, codec.format)


def test_nothing_to_do() -> None:
    world = World()
    assert world.ours.encode_all([]) == []
    assert world.ours.decode_all([], [], []) == []


def test_headers_with_other_bits_are_refused_where_numpy_refuses_them() -> None:
    world, rng = World(), random.Random(1)
    [buf] = world.ours.encode_all(world.spills[2:3])
    refused = 0
    for _ in range(500):
        bad = buf.copy()
        for _ in range(rng.choice([1, 1, 3])):
            bad[rng.randrange(320)] ^= 1 << rng.randrange(8)
        bad = wire.seal(bad) if rng.random() < 0.7 else bad
        ours, numpys = (by.decode_all(world.keys[2:3], world.targets[:1], [bad]) for by in (world.ours, world.numpy))
        assert (ours == [None]) == (numpys == [None])
        refused += ours != [None]
    assert refused > 400
