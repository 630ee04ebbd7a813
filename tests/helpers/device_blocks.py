"""Paged caches on any device: keys and values in the model's dtype or fp8, latents (MLA), recurrent states.

What a GPU's codec makes of them is compared with numpy, byte for byte."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import scaled_latents
import torch

from manthan.codec import wire
from manthan.codec.base import Dtype
from manthan.codec.block import BlockFormat, BlockShape, Scales, piece_dim
from manthan.codec.cpu.state import STATE_CODECS, StateLayout, StatePart
from manthan.codec.errors import CodecError
from manthan.codec.gpu.paged import FP8, Batch, PagedCodec, PagedLayout, RawLayout, status_cause
from manthan.codec.model import NO_FACTS, ModelFacts
from manthan.codec.rope import Rope

BLOCKS, LAYERS, GROUP = 24, 3, 2
IDS, SLOTS, TARGETS = [3, 7, 1, 20], [2, 0, 5, 1], [10, 11, 12, 13]
KEYS = [bytes([n]) * 32 for n in range(4)]
FIRST_TOKENS = [96, 0, 16, 2**20]
CPU = torch.device("cpu")
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class World:
    """A paged cache, a codec over it, and a buffer full of 170 for encoded blocks. bits: all of the cache's numbers as
    integers, [layers, blocks, numbers of a block]. places: where in those a block's keys and values are, in the order
    of their shapes; for bytes of several runs, of all layers each, a list. layers: of keys and values, views of the
    numbers, [blocks, tokens, heads, keys and values] each."""

    layers: tuple[torch.Tensor, ...] = ()
    encoded: Batch

    def __init__(
        self,
        bits: torch.Tensor,
        places: Sequence[np.ndarray | list[np.ndarray]],
        codec: PagedCodec,
        format: BlockFormat,
        exact: int = 0,
    ) -> None:
        self.bits, self.places, self.codec, self.format, self.exact = bits, places, codec, format, exact
        self.form = codec.form(exact)
        self.offsets = [slot * (self.form.nbytes + 48) for slot in SLOTS]
        self.buffer = torch.full((8 * (self.form.nbytes + 48),), 170, dtype=torch.uint8, device=bits.device)
        self.nbytes = [self.form.nbytes] * 4

    def batch(self, ids: list[int]) -> Batch:
        return self.codec.batch(self.exact, KEYS, ids, FIRST_TOKENS, self.offsets, self.nbytes)

    def encode(self) -> list[str | None]:
        self.encoded = self.batch(IDS)
        self.codec.encode(self.encoded, self.buffer)
        self.nbytes = self.encoded.nbytes.tolist()
        return [status_cause(status) for status in self.encoded.status.tolist()]

    def decode(self) -> list[str | None]:
        batch = self.batch(TARGETS)
        self.codec.verify(batch, self.buffer)
        self.codec.decode(batch, self.buffer)
        return [status_cause(status) for status in batch.status.tolist()]

    def block(self, i: int) -> np.ndarray:
        """The i-th encoded block."""
        return self.buffer[self.offsets[i] :][: self.nbytes[i]].cpu().numpy()

    def write(self, i: int, block: np.ndarray) -> None:
        self.nbytes[i] = len(block)
        self.buffer[self.offsets[i] :][: len(block)] = torch.from_numpy(block.copy()).to(self.buffer.device)

    def numbers(self, block: int) -> list[np.ndarray]:
        """Arrays of a paged block, as numpy's codec has them."""
        found = self.bits[:, block].cpu().numpy().view(self.format.shape.dtype.numpy)
        parts = zip(self.places, self.format.shape.arrays, strict=True)
        return [
            np.concatenate([found[:, run].ravel() for run in (at if isinstance(at, list) else [at])])
            .view(dtype)
            .reshape(shape)
            for at, (shape, dtype) in parts
        ]

    def by_numpy(self, i: int) -> np.ndarray:
        numbers = self.numbers(IDS[i])
        return self.format.encode(*numbers, key=KEYS[i], first_token=FIRST_TOKENS[i], exact=self.exact)

    def doublings(self, i: int) -> list[int]:
        """Of the steps of the i-th block's sections."""
        return [int(payload[1]) for payload in wire.parse(self.block(i), group=GROUP).payloads[-2:]]

    def is_refused(self, i: int) -> bool:
        """Whether numpy does not decode it."""
        try:
            self.format.decode(self.block(i), key=KEYS[i])
        except CodecError:
            return True
        return False

    def check(self, alike: "Alike | None" = None, rare: float = 0.0) -> None:
        """Both ways, bit for bit, and nothing else is written. rare: the share of encoded bits that may differ."""
        before = self.bits.clone()
        assert self.encode() == [None] * 4
        for i in range(4):
            found, right = self.block(i), self.by_numpy(i)
            assert len(found) == len(right)
            assert np.array_equal(found[16 : self.form.header.nbytes], right[16 : self.form.header.nbytes])
            differ = int(np.unpackbits(found[16:] ^ right[16:]).sum())
            assert differ <= rare * 8 * len(right)
            assert rare or np.array_equal(found, right)
        assert torch.equal(self.bits, before)
        self.check_decoding(alike)
        self.check_others(before, TARGETS)

    def check_decoding(self, alike: "Alike | None" = None) -> None:
        assert self.decode() == [None] * 4
        for i in range(4):
            (alike or same)(self, i)

    def check_others(self, before: torch.Tensor, written: list[int]) -> None:
        """No other block of the cache was written than these, and nothing between encoded blocks."""
        others = [block for block in range(BLOCKS) if block not in written]
        assert torch.equal(self.bits[:, others], before[:, others])
        outside = torch.ones(len(self.buffer), dtype=torch.bool)
        for offset in self.offsets:
            outside[offset : offset + self.form.nbytes] = False
        assert bool((self.buffer.cpu()[outside] == 170).all())


Alike = Callable[[World, int], None]
"""Compares what was decoded of the i-th block with what numpy decodes."""


def same(world: World, i: int) -> None:
    right = world.format.decode(world.block(i), key=KEYS[i])
    for x, y in zip(right, world.numbers(TARGETS[i]), strict=True):
        assert x.tobytes() == y.tobytes()


def as_floats(numbers: np.ndarray) -> torch.Tensor:
    x = torch.from_numpy(np.array(numbers))
    return (x.view(torch.bfloat16) if x.dtype is torch.uint16 else x).float()


def near(world: World, i: int) -> None:
    """Of a calibrated codec: exact tokens bit for bit; others but for a few hundredths that are rounded otherwise."""
    decoded, numbers = world.format.decode(world.block(i), key=KEYS[i]), world.numbers(TARGETS[i])
    for right, found in zip(decoded[:2], numbers[:2], strict=True):
        assert right[:, :, : world.exact].tobytes() == found[:, :, : world.exact].tobytes()
        x, y = as_floats(right)[:, :, world.exact :], as_floats(found)[:, :, world.exact :]
        if x.numel():
            assert (x - y).square().mean().sqrt() < 0.005 * x.square().mean().sqrt()


def resealed(block: np.ndarray) -> np.ndarray:
    """The block with right checksums, of the base and of its refinements."""
    ends = wire.part_ends(block)
    bodies = [block[end + 16 : next] for end, next in pairwise(ends)]
    return wire.refined(wire.seal(block[: ends[0]].copy()), bodies)


def damaged(world: World) -> None:
    """Damage is told apart and not written."""
    assert world.encode() == [None] * 4
    blocks = [world.block(i).copy() for i in range(3)]
    for block, at in zip(blocks, (-9, 20, 70), strict=True):
        block[at] ^= 99
    for i, block in enumerate(blocks):
        world.write(i, resealed(block) if i else block)
    before = world.bits.clone()
    assert world.decode() == ["checksum", "fingerprint", "key", None]
    world.check_others(before, TARGETS[3:])


def damaged_and_sealed(world: World, alike: Alike, front: int) -> set[str | None]:
    """Bytes of the base that changed before the checksum was made, most of them among so many at the encoded `front`.
    What numpy refuses is refused and not written; what it does not is decoded to the same. The causes."""
    rng, found = np.random.default_rng(world.exact), set[str | None]()
    assert world.encode() == [None] * 4
    blocks, start = [world.block(i) for i in range(4)], world.form.starts[-2:][0]
    for _ in range(50):
        for i, block in enumerate(blocks):
            bad, end = block.copy(), wire.part_ends(block)[0]
            for _ in range(rng.choice([1, 1, 3])):
                least, most = (start, min(start + front, end)) if rng.random() < 0.6 else (128, end)
                at = rng.integers(least, most)
                bad[at] = rng.choice([bad[at] ^ 1 << rng.integers(8), 255])
            world.write(i, resealed(bad))
        world.bits[:, TARGETS] = 7
        for i, (cause, target) in enumerate(zip(world.decode(), TARGETS, strict=True)):
            assert (cause is not None) == world.is_refused(i)
            found.add(cause)
            if cause is None:
                alike(world, i)
            else:
                assert bool((world.bits[:, target] == 7).all())
    return found


Make = Callable[[Any, BlockFormat], PagedCodec]


def rope_of(head_dim: int, turned: int | None = None) -> Rope:
    """turned: how many numbers of a vector are, if not all."""
    return Rope(tuple(1e4 ** -np.arange(0, 1, 2 / (turned or head_dim))))


def kv(
    make: Make,
    codec: str = "wht-5x",
    heads: int = 3,
    head_dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    tokens: int = 16,
    exact: int = 0,
    rope: Rope | None = None,
    facts: ModelFacts | None = None,
    numbers: torch.Tensor | None = None,
    offset: int = 0,
    apart: int = 0,
    layers: int = LAYERS,
    device: torch.device = CPU,
    opaque: int = 0,
) -> World:
    """Gaussian numbers, keys about a mean; or these, [layers, blocks, tokens, heads, keys and values].

    offset: numbers ahead of each layer's, behind a multiple of 16 bytes. apart: between two heads. opaque: see
    `latents`.
    """
    torch.manual_seed(heads * head_dim + tokens)
    if numbers is None:
        numbers = torch.randn(layers, BLOCKS, tokens, heads, 2 * head_dim + apart, device=device)
        numbers[..., :head_dim] += 4 * torch.randn(layers, 1, 1, heads, head_dim, device=device)
    plain = numbers.reshape(layers, BLOCKS, -1)
    room = torch.zeros(layers, plain[0].numel() + 16, dtype=dtype, device=device)
    memory = room[:, offset : offset + plain[0].numel()].unflatten(1, plain.shape[1:]).copy_(plain)
    memory = with_bytes(memory, tokens * opaque) if opaque else memory
    facts = facts or ModelFacts(rope or rope_of(head_dim))
    world = _adjacent(make, codec, memory, heads, head_dim, tokens, exact, facts, opaque=opaque)
    world.layers = tuple(memory[:, :, : plain.shape[2]].unflatten(2, numbers.shape[2:]))
    return world


def with_bytes(memory: torch.Tensor, nbytes: int) -> torch.Tensor:
    """Return numbers [layers, blocks, numbers of a block] with so many bytes of noise behind each block."""
    layers, blocks, _ = memory.shape
    noise = torch.randint(0, 256, (layers * blocks * nbytes,), dtype=torch.uint8).view(memory.dtype)
    return torch.cat([memory, noise.view(layers, blocks, -1).to(memory.device)], 2)


def opaque_bytes(memory: torch.Tensor, tokens: int, opaque: int) -> RawLayout | None:
    """Layout of the bytes behind each block; None without any. opaque: see `latents`."""
    if not opaque:
        return None
    raw = tuple(layer.view(torch.uint8)[:, -tokens * opaque :] for layer in memory)
    return RawLayout(raw, BlockShape(1, len(memory) * opaque, tokens, 1, Dtype.UINT8))


def _adjacent(
    make: Make,
    codec: str,
    memory: torch.Tensor,
    heads: int,
    head_dim: int,
    tokens: int,
    exact: int,
    facts: ModelFacts,
    fp8: Dtype | None = None,
    opaque: int = 0,
) -> World:
    """Heads next to each other."""
    size = memory.shape[2]
    end = size - tokens * opaque // memory.itemsize
    wide = end // tokens // heads
    others = opaque_bytes(memory, tokens, opaque)
    strides = (size, wide, heads * wide)
    layout = PagedLayout(tuple(memory), heads, tokens, head_dim, *strides, 0, head_dim, fp8=fp8, opaque=others)
    format = BlockFormat(codec, layout.shape, b"f" * 16, GROUP, facts)
    at = np.arange(end).reshape(tokens, heads, wide).swapaxes(0, 1)
    places = [at[..., :head_dim].ravel(), at[..., head_dim : 2 * head_dim].ravel()]
    places += [np.arange(end, size)] if opaque else []
    return World(memory.view(INTEGERS[memory.itemsize]), places, make(layout, format), format, exact)


def latents(
    make: Make,
    codec: str = "wht-5x",
    latent: int = 512,
    rope: int = 64,
    tokens: int = 16,
    exact: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device = CPU,
    layers: int = LAYERS,
    opaque: int = 0,
    fp8: Dtype | None = None,
    facts: ModelFacts = NO_FACTS,
    numbers: torch.Tensor | None = None,
) -> World:
    """As vLLM has them: of each token its latent, and behind that RoPE's part.

    opaque: bytes a token of other layers, as many as of latents. Their blocks follow those of latents. fp8: kind of
    numbers of 8 bits, if they are. numbers: latents [layers, blocks, tokens, numbers], if not random ones.
    """
    torch.manual_seed(latent + tokens)
    width, piece = latent + rope, piece_dim(latent)
    x = torch.randn(layers, BLOCKS, tokens, width) * torch.logspace(-1, 1, BLOCKS)[:, None, None]
    x[..., :latent] += 3 * torch.randn(layers, 1, 1, latent)
    if numbers is not None:
        x[..., :latent] = numbers.cpu()
    number = x.clamp(-400, 400).to(FP8[fp8]).view(torch.uint8) if fp8 else x.to(dtype)
    plain = number.view(layers, BLOCKS, tokens * width)
    memory = (with_bytes(plain, tokens * opaque) if opaque else plain).to(device)
    end, size = tokens * width, memory.shape[2]
    caches, strides = tuple(memory), (size, piece, width)
    pieces = PagedLayout(caches, latent // piece, tokens, piece, *strides, key_at=0, value_at=None, fp8=fp8)
    layout = PagedLayout(
        *(caches, 1, tokens, rope, *strides),
        key_at=latent,
        value_at=None,
        fp8=fp8,
        latents=pieces,
        opaque=opaque_bytes(memory, tokens, opaque),
    )
    format = BlockFormat(codec, layout.shape, b"f" * 16, GROUP, facts)
    at = np.arange(end).reshape(tokens, width)
    places = [at[:, latent:], at[:, :latent].reshape(tokens, -1, piece).swapaxes(0, 1)]
    places += [np.arange(end, size)] if opaque else []
    return World(
        memory.view(INTEGERS[memory.itemsize]), [place.ravel() for place in places], make(layout, format), format, exact
    )


def scaled(
    make: Make,
    codec: str = "wht-5x",
    scales: Scales = scaled_latents.V32,
    tokens: int = 64,
    exact: int = 0,
    device: torch.device = CPU,
    layers: int = LAYERS,
    opaque: int = 0,
    facts: ModelFacts = NO_FACTS,
    numbers: np.ndarray | None = None,
) -> World:
    """Latents in fp8 with their own scales, in vLLM's pages. opaque, numbers: see `latents`."""
    x, turned = scaled_latents.made_up((layers, BLOCKS, tokens), scales, seed=tokens)
    x = numbers if numbers is not None else x * np.logspace(-1, 1, BLOCKS, dtype=np.float32)[:, None, None]
    pages = torch.from_numpy(scaled_latents.page(x, turned, scales))
    memory = (with_bytes(pages, tokens * opaque) if opaque else pages).to(device)
    latent, size, end = scaled_latents.LATENT[scales], memory.shape[2], tokens * scales.row
    raw = [slice(end, end + tokens * scales.stride)] if scales.place else []
    raw += [slice(size - tokens * opaque, size)] if opaque else []
    others = [layer[:, at] for at in raw for layer in memory]
    raw_shape = BlockShape(1, sum(other.shape[1] for other in others) // tokens, tokens, 1, Dtype.UINT8)
    caches, strides = tuple(memory), (size, scales.piece, scales.row)
    shared: dict[str, Any] = {"value_at": None, "fp8": Dtype.FLOAT8_E4M3}
    pieces = PagedLayout(caches, latent // scales.piece, tokens, scales.piece, *strides, key_at=0, **shared)
    layout = PagedLayout(
        *(caches, 1, tokens, scales.row - latent, *strides),
        key_at=latent,
        latents=pieces,
        opaque=RawLayout(tuple(others), raw_shape) if others else None,
        scales=scales,
        **shared,
    )
    format = BlockFormat(codec, layout.shape, b"f" * 16, GROUP, facts)
    at = np.arange(tokens * scales.row).reshape(tokens, scales.row)
    places = [at[:, latent:], at[:, :latent].reshape(tokens, -1, scales.piece).swapaxes(0, 1)]
    runs = [[np.arange(at.start, at.stop) for at in raw]] if raw else []
    return World(memory, [*(place.ravel() for place in places), *runs], make(layout, format), format, exact)


def fp8(
    make: Make,
    codec: str = "wht-5x",
    kind: Dtype = Dtype.FLOAT8_E4M3,
    heads: int = 3,
    head_dim: int = 64,
    tokens: int = 16,
    exact: int = 0,
    device: torch.device = CPU,
    facts: ModelFacts | None = None,
) -> World:
    """Heads next to each other; numbers that are finite, of all sizes."""
    chance = np.random.default_rng(head_dim + tokens)
    number = FP8[kind]
    shape = (LAYERS, BLOCKS, tokens, heads, 2, head_dim)
    x = chance.standard_normal(shape) * 2.0 ** chance.integers(-9, 5, (LAYERS, BLOCKS, 1, heads, 2, 1))
    memory = (
        torch.from_numpy(x).to(torch.float32).clamp(-448, 448).to(number).view(torch.uint8).view(LAYERS, BLOCKS, -1)
    )
    facts = facts or ModelFacts(rope_of(head_dim))
    return _adjacent(make, codec, memory.to(device), heads, head_dim, tokens, exact, facts, kind)


CONV, HEADS, ROWS = 96, 4, 8


def states(
    make: Make,
    option: str,
    number: Dtype = Dtype.FLOAT32,
    row: int = 16,
    padding: int = 64,
    apart: int = 0,
    device: torch.device = CPU,
) -> World:
    """A convolution's state of noise, matrices with rows of very different sizes, padding; `apart` bytes between
    layers' blocks."""
    chance, size = np.random.default_rng(row), number.numpy.itemsize
    x = chance.standard_normal((LAYERS, BLOCKS, HEADS * ROWS, row)) * 10.0 ** chance.uniform(
        -4, 4, (LAYERS, BLOCKS, HEADS * ROWS, 1)
    )
    matrices = torch.from_numpy(x).to({4: torch.float32, 2: torch.bfloat16}[size])
    if number is Dtype.FLOAT16:
        matrices = matrices.to(torch.float16).clamp(-60000, 60000)
    plain = matrices.view(torch.uint8).view(LAYERS, BLOCKS, -1)
    nbytes = CONV + plain.shape[2] + padding
    memory = torch.from_numpy(chance.integers(0, 256, (LAYERS, BLOCKS, nbytes + apart), np.uint8))
    memory[:, :, CONV : CONV + plain.shape[2]] = plain
    memory = memory.to(device)
    parts = (StatePart(CONV), StatePart(plain.shape[2], row, number))
    run = math.gcd(nbytes, 1 << 20)
    shape = BlockShape(1, LAYERS * nbytes // run, 1, run, Dtype.UINT8)
    facts = ModelFacts(state=StateLayout(LAYERS, nbytes, parts)) if option in STATE_CODECS else NO_FACTS
    format = BlockFormat(STATE_CODECS.get(option, option), shape, b"f" * 16, 1, facts)
    layout = RawLayout(tuple(layer[:, :nbytes] for layer in memory), shape)
    return World(memory, [np.arange(nbytes), np.arange(0)], make(layout, format), format)
