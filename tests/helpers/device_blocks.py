"""Paged caches on any device whose blocks are more than keys and values in the model's dtype: latents (MLA), fp8,
recurrent states. What a GPU's codec makes of them is compared with numpy, byte for byte."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from manthan.codec.base import Dtype
from manthan.codec.block import BlockFormat, BlockShape, piece_dim
from manthan.codec.gpu.paged import Batch, PagedCodec, PagedLayout, RawLayout, status_cause
from manthan.codec.model import NO_FACTS, ModelFacts
from manthan.codec.rope import Rope
from manthan.codec.state import STATE_CODECS, StateLayout, StatePart

BLOCKS, LAYERS = 24, 3
IDS, SLOTS, TARGETS = [3, 7, 1, 20], [2, 0, 5, 1], [10, 11, 12, 13]
KEYS = [bytes([n]) * 32 for n in range(4)]
FIRST_TOKENS = [96, 0, 16, 2**20]
CPU = torch.device("cpu")


class World:
    """A paged cache, a codec over it, and room for codes full of 170. bits: all of the cache's numbers as integers,
    [layers, blocks, numbers of a block]. places: where in those a block's keys and values are, in the order of their
    shapes."""

    def __init__(
        self, bits: torch.Tensor, places: list[np.ndarray], codec: PagedCodec, format: BlockFormat, exact: int = 0
    ) -> None:
        self.bits, self.places, self.codec, self.format, self.exact = bits, places, codec, format, exact
        self.form = codec.form(exact)
        self.offsets = [slot * (self.form.nbytes + 48) for slot in SLOTS]
        self.codes = torch.full((8 * (self.form.nbytes + 48),), 170, dtype=torch.uint8, device=bits.device)
        self.nbytes = [self.form.nbytes] * 4

    def batch(self, ids: list[int]) -> Batch:
        return self.codec.batch(self.exact, KEYS, ids, FIRST_TOKENS, self.offsets, self.nbytes)

    def encode(self) -> list[str | None]:
        batch = self.batch(IDS)
        self.codec.encode(batch, self.codes)
        self.nbytes = batch.nbytes.tolist()
        return [status_cause(status) for status in batch.status.tolist()]

    def decode(self) -> list[str | None]:
        batch = self.batch(TARGETS)
        self.codec.verify(batch, self.codes)
        self.codec.decode(batch, self.codes)
        return [status_cause(status) for status in batch.status.tolist()]

    def block(self, i: int) -> np.ndarray:
        """The i-th encoded block."""
        return self.codes[self.offsets[i] :][: self.nbytes[i]].cpu().numpy()

    def write(self, i: int, block: np.ndarray) -> None:
        self.nbytes[i] = len(block)
        self.codes[self.offsets[i] :][: len(block)] = torch.from_numpy(block.copy()).to(self.codes.device)

    def numbers(self, block: int) -> list[np.ndarray]:
        """Keys and values of a paged block, as numpy's codec has them."""
        found = self.bits[:, block].cpu().numpy().view(self.format.shape.dtype.numpy)
        shapes = (self.format.shape.numbers, self.format.shape.value_numbers)
        return [found[:, at].reshape(shape) for at, shape in zip(self.places, shapes, strict=True)]

    def by_numpy(self, i: int) -> np.ndarray:
        numbers = self.numbers(IDS[i])
        return self.format.encode(*numbers, key=KEYS[i], first_token=FIRST_TOKENS[i], exact=self.exact)

    def check(self, rare: float = 0.0) -> None:
        """Both ways, bit for bit, and nothing else is written. rare: the share of bits of codes that may differ."""
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
        self.check_decoding(100 * rare)
        others = [block for block in range(BLOCKS) if block not in TARGETS]
        assert torch.equal(self.bits[:, others], before[:, others])
        outside = torch.ones(len(self.codes), dtype=torch.bool)
        for offset in self.offsets:
            outside[offset : offset + self.form.nbytes] = False
        assert bool((self.codes.cpu()[outside] == 170).all())

    def check_decoding(self, rare: float = 0.0) -> None:
        """rare: the share of numbers that may differ."""
        assert self.decode() == [None] * 4
        for i, target in enumerate(TARGETS):
            right = self.format.decode(self.block(i), key=KEYS[i])
            for x, y in zip(right, self.numbers(target), strict=True):
                differ = int((np.ascontiguousarray(x).view(y.dtype) != y).sum())
                assert differ <= rare * x.size
                assert rare or x.tobytes() == y.tobytes()


Make = Callable[[Any, BlockFormat], PagedCodec]


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
) -> World:
    """As vLLM has them: of each token its latent, and behind that RoPE's part."""
    torch.manual_seed(latent + tokens)
    width, piece = latent + rope, piece_dim(latent)
    x = torch.randn(layers, BLOCKS, tokens, width) * torch.logspace(-1, 1, BLOCKS)[:, None, None]
    x[..., :latent] += 3 * torch.randn(layers, 1, 1, latent)
    memory = x.to(dtype).view(layers, BLOCKS, tokens * width).to(device)
    caches, strides = tuple(memory), (tokens * width, piece, width)
    pieces = PagedLayout(caches, latent // piece, tokens, piece, *strides, key_at=0, value_at=None)
    layout = PagedLayout(caches, 1, tokens, rope, *strides, key_at=latent, value_at=None, latents=pieces)
    format = BlockFormat(codec, layout.shape, b"f" * 16, 2)
    at = np.arange(tokens * width).reshape(tokens, width)
    places = [at[:, latent:], at[:, :latent].reshape(tokens, -1, piece).swapaxes(0, 1)]
    bits = memory.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[memory.itemsize])
    return World(bits, [place.ravel() for place in places], make(layout, format), format, exact)


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
    """Heads beside each other; numbers that are finite, of all sizes."""
    chance = np.random.default_rng(head_dim + tokens)
    number = {Dtype.FLOAT8_E4M3: torch.float8_e4m3fn, Dtype.FLOAT8_E5M2: torch.float8_e5m2}[kind]
    shape = (LAYERS, BLOCKS, tokens, heads, 2, head_dim)
    x = chance.standard_normal(shape) * 2.0 ** chance.integers(-9, 5, (LAYERS, BLOCKS, 1, heads, 2, 1))
    memory = (
        torch.from_numpy(x).to(torch.float32).clamp(-448, 448).to(number).view(torch.uint8).view(LAYERS, BLOCKS, -1)
    )
    memory = memory.to(device)
    wide = 2 * head_dim
    strides = (tokens * heads * wide, wide, heads * wide)
    layout = PagedLayout(tuple(memory), heads, tokens, head_dim, *strides, key_at=0, value_at=head_dim, fp8=kind)
    rope = Rope(tuple(1e4 ** -np.arange(0, 1, 2 / head_dim)))
    format = BlockFormat(codec, layout.shape, b"f" * 16, 2, facts or ModelFacts(rope))
    at = np.arange(tokens * heads * wide).reshape(tokens, heads, 2, head_dim).transpose(2, 1, 0, 3)
    return World(memory, [place.ravel() for place in at], make(layout, format), format, exact)


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
