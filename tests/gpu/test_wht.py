"""wht-5x and wht-4x on a GPU against the CPU's: the same bytes, the same numbers, and both refuse the same."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from manthan.codec import registry, wire
from manthan.codec.block import BlockFormat
from manthan.codec.cpu import rows
from manthan.codec.errors import CodecError
from manthan.codec.gpu import wht_codec
from manthan.codec.gpu.paged import DTYPES, GOOD, Batch, PagedLayout, status_cause
from manthan.codec.model import ModelFacts
from manthan.codec.rope import Rope
from manthan.codec.wht import NAME, PRESETS, Wht

LAYERS, BLOCKS, GROUP = 3, 24, 2
IDS, SLOTS, TARGETS = [3, 7, 1, 20], [2, 0, 5, 1], [10, 11, 12, 13]
KEYS = [bytes([i]) * 32 for i in range(4)]
FIRST_TOKENS = [96, 0, 16, 2**20]
DEVICE = "cuda"


def rope_of(head_dim: int, turned: int | None = None) -> Rope:
    """turned: how many numbers of a vector are, if not all."""
    return Rope(tuple(1e4 ** -np.arange(0, 1, 2 / (turned or head_dim))))


class World:
    """A paged cache, heads beside each other, of Gaussian numbers, keys about a mean; room for codes full of 170."""

    def __init__(
        self,
        heads: int = 3,
        head_dim: int = 64,
        dtype: torch.dtype = torch.bfloat16,
        tokens: int = 16,
        exact: int = 0,
        rope: Rope | None = None,
        offset: int = 0,
        layers: int = LAYERS,
        apart: int = 0,
        codec: str = NAME,
    ) -> None:
        """offset: numbers ahead of each layer's, behind a multiple of 16 bytes. apart: between two heads."""
        self.exact, self.head_dim, self.tokens = exact, head_dim, tokens
        self.keys, self.values = slice(head_dim), slice(head_dim, 2 * head_dim)
        torch.manual_seed(heads * head_dim + tokens)
        wide = 2 * head_dim + apart
        x = torch.randn(layers, BLOCKS, tokens, heads, wide, device=DEVICE)
        x[..., self.keys] += 4 * torch.randn(layers, 1, 1, heads, head_dim, device=DEVICE)
        self.layers = tuple(self._at(layer.to(dtype), offset) for layer in x)
        strides = (tokens * heads * wide, wide, heads * wide)
        layout = PagedLayout(self.layers, heads, tokens, head_dim, *strides, key_at=0, value_at=head_dim)
        self.format = BlockFormat(codec, layout.shape, b"f" * 16, GROUP, ModelFacts(rope or rope_of(head_dim), None))
        self.codec = wht_codec.WhtPagedCodec(layout, self.format)
        self.form = self.codec.form(exact)
        self.places = [slot * (self.form.nbytes + 48) for slot in SLOTS]
        self.codes = torch.full((8 * (self.form.nbytes + 48),), 170, dtype=torch.uint8, device=DEVICE)
        self.nbytes = [self.form.nbytes] * 4

    @staticmethod
    def _at(x: torch.Tensor, offset: int) -> torch.Tensor:
        room = torch.empty(x.numel() + offset, dtype=x.dtype, device=DEVICE)[offset:].view(x.shape)
        return room.copy_(x)

    def batch(self, ids: list[int]) -> Batch:
        return self.codec.batch(self.exact, KEYS, ids, FIRST_TOKENS, self.places, self.nbytes)

    def encode(self) -> list[str | None]:
        self.encoded = self.batch(IDS)
        self.codec.encode(self.encoded, self.codes)
        self.nbytes = self.encoded.nbytes.tolist()
        return [status_cause(status) for status in self.encoded.status.tolist()]

    def decode(self) -> list[str | None]:
        batch = self.batch(TARGETS)
        self.codec.verify(batch, self.codes)
        self.codec.decode(batch, self.codes)
        return [status_cause(status) for status in batch.status.tolist()]

    def block(self, i: int) -> np.ndarray:
        return self.codes[self.places[i] :][: self.nbytes[i]].cpu().numpy()

    def write(self, i: int, block: np.ndarray) -> None:
        self.nbytes[i] = len(block)
        self.codes[self.places[i] :][: len(block)] = torch.from_numpy(block.copy()).to(DEVICE)

    def numbers(self, block: int) -> list[np.ndarray]:
        """Keys and values of a paged block, [layers, heads, tokens, head_dim] as numpy has them."""
        both = torch.stack([layer[block].transpose(0, 1) for layer in self.layers]).cpu()
        both = both.view(torch.uint16) if both.dtype is torch.bfloat16 else both
        return [np.ascontiguousarray(both[..., part].numpy()) for part in (self.keys, self.values)]

    def by_cpu(self, i: int) -> np.ndarray:
        numbers = self.numbers(IDS[i])
        return self.format.encode(*numbers, key=KEYS[i], first_token=FIRST_TOKENS[i], exact=self.exact)

    def doublings(self, i: int) -> list[int]:
        return [int(payload[1]) for payload in wire.parse(self.block(i), group=GROUP).payloads[-2:]]


def assert_decoded(world: World, i: int) -> None:
    right = world.format.decode(world.block(i), key=KEYS[i])
    for x, y in zip(right, world.numbers(TARGETS[i]), strict=True):
        assert x.tobytes() == y.tobytes()


def check(world: World) -> None:
    """Both ways, bit for bit, and nothing else is written."""
    before = [layer.clone() for layer in world.layers]
    assert world.encode() == [None] * 4
    for i in range(4):
        assert world.form.header.nbytes < world.nbytes[i] <= world.form.nbytes
        assert np.array_equal(world.block(i), world.by_cpu(i))
    assert world.decode() == [None] * 4
    for i in range(4):
        assert_decoded(world, i)
    others = [block for block in range(BLOCKS) if block not in TARGETS]
    assert all(torch.equal(now[others], then[others]) for now, then in zip(world.layers, before, strict=True))
    outside = torch.ones(len(world.codes), dtype=torch.bool)
    for place in world.places:
        outside[place : place + world.form.nbytes] = False
    assert bool((world.codes.cpu()[outside] == 170).all())


@pytest.mark.parametrize("exact", [0, 4])
@pytest.mark.parametrize("tokens", [16, 32, 128])
@pytest.mark.parametrize(("heads", "head_dim"), [(3, 64), (2, 80), (3, 96), (8, 128), (1, 256)])
def test_the_cpu_s_bytes_and_numbers(heads: int, head_dim: int, tokens: int, exact: int) -> None:
    check(World(heads, head_dim, tokens=tokens, exact=exact, layers=2))


@pytest.mark.parametrize("tokens", [1, 16, 20])
def test_finer_steps(tokens: int) -> None:
    check(World(tokens=tokens, codec="wht-4x"))


@pytest.mark.parametrize("codec", PRESETS)
def test_what_was_decoded_is_encoded_to_the_same(codec: str) -> None:
    """All but the few rows of keys whose step the first rounding moved, and these after another time."""
    world = World(codec=codec)
    world.encode()
    for _ in range(4):
        world.decode()
        numbers = [world.numbers(target) for target in TARGETS]
        for layer in world.layers:
            layer[IDS] = layer[TARGETS]
        world.encode()
    world.decode()
    for target, (keys, values) in zip(TARGETS, numbers, strict=True):
        again = world.numbers(target)
        assert again[0].tobytes() == keys.tobytes()
        assert again[1].tobytes() == values.tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("exact", [0, 1, 5])
@pytest.mark.parametrize("head_dim", [64, 96])
def test_any_dtype(head_dim: int, exact: int, dtype: torch.dtype) -> None:
    check(World(head_dim=head_dim, dtype=dtype, exact=exact))


@pytest.mark.parametrize(("heads", "head_dim"), [(1, 32), (5, 40), (1, 264), (2, 512), (40, 64), (4, 64), (8, 64)])
def test_other_shapes(heads: int, head_dim: int) -> None:
    check(World(heads, head_dim))


@pytest.mark.parametrize("tokens", [8, 20, 33])
@pytest.mark.parametrize("exact", [0, 3, 7])
def test_blocks_of_any_number_of_tokens(tokens: int, exact: int) -> None:
    check(World(tokens=tokens, exact=exact))


@pytest.mark.parametrize(
    "rope",
    [Rope(()), rope_of(64, 32), rope_of(64, 24), Rope((1.0, 0.3, 0.01), 1.2, interleaved=True)],
    ids=["none", "half", "some", "interleaved"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_any_rope(rope: Rope, dtype: torch.dtype) -> None:
    check(World(rope=rope, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("offset", "apart"), [(3, 0), (0, 3), (0, 64)])
def test_other_layouts(offset: int, apart: int, dtype: torch.dtype) -> None:
    check(World(offset=offset, apart=apart, dtype=dtype))


@pytest.mark.parametrize("shared", [2**11, 2**15, 100 * 2**10])
@pytest.mark.parametrize("tokens", [16, 20])
def test_rows_and_tables_may_be_outside_of_shared_memory(
    monkeypatch: pytest.MonkeyPatch, tokens: int, shared: int
) -> None:
    small = SimpleNamespace(shared_memory_per_block_optin=shared)
    with monkeypatch.context() as patch:
        patch.setattr(wht_codec, "properties_of", lambda device: small)
        world = World(8, 64, tokens=tokens)
    check(world)


@pytest.fixture
def fine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds so small that only zeros fit without larger steps."""
    fine = Wht(NAME, 0.05, 0.05)
    monkeypatch.setitem(PRESETS, NAME, fine)
    monkeypatch.setitem(registry.PRESETS, NAME, fine)
    monkeypatch.setattr(rows, "SLACK", (1, 2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("exact", [0, 3])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.usefixtures("fine")
def test_sections_that_would_be_too_long(dtype: torch.dtype, exact: int, interleaved: bool) -> None:
    world = World(dtype=dtype, exact=exact, rope=Rope(rope_of(64).frequencies, 1.0, interleaved))
    for layer in world.layers:
        for block, at in ((IDS[1], world.keys), (IDS[2], world.values), (IDS[3], slice(None))):
            layer[block, ..., at] = 0
    check(world)
    found = [[count > 0 for count in world.doublings(i)] for i in range(4)]
    assert found == [[True, True], [False, True], [True, False], [False, False]]


def test_keys_that_no_transform_makes_gaussian() -> None:
    """Two tokens of each head, opposite to each other, and one number of each, are all that there is."""
    world = World(tokens=32, rope=Rope(()))
    for layer in world.layers:
        layer[IDS[1], ..., world.keys] = 0
        layer[IDS[1], 5, :, 7], layer[IDS[1], 9, :, 7] = 1000, -1000
    check(world)


def test_numbers_of_all_sizes() -> None:
    """Tokens, heads and layers that are much smaller or larger than others, and none: escapes, steps that are not."""
    world = World(4, dtype=torch.float32)
    for layer in world.layers:
        layer *= 2.0 ** torch.randint(-12, 13, layer.shape[:-1], device=DEVICE)[..., None]
    world.layers[0][IDS[0]] = 0
    world.layers[1][IDS[1], 3:9] = 0
    world.layers[2][IDS[1]] *= 1e-30
    world.layers[0][IDS[2]] *= 1e-44
    world.layers[1][IDS[2], :, :, world.values] = -0.0
    world.layers[2][IDS[3], 5, 1] = 2.0**39.9
    check(world)


@pytest.mark.parametrize("at", [3, 67])
@pytest.mark.parametrize("exact", [0, 5])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf"), 2.0**40, -(2.0**60)])
def test_what_is_not_finite_or_too_large_is_reported(number: float, exact: int, at: int) -> None:
    world = World(exact=exact)
    world.layers[1][7, 9, 2, at] = number
    world.layers[2][7, 6, 1, at] = number
    assert world.encode() == [None, "decode", None, None]
    coded = world.tokens - exact
    assert world.encoded.status[1].item() == 3 * coded + 2 * coded + 9 - exact
    for i in (0, 2, 3):
        assert np.array_equal(world.block(i), world.by_cpu(i))
    with pytest.raises(CodecError, match=f"2\\*\\*40 and more|{world.encoded.status[1].item()}"):
        world.by_cpu(1)


@pytest.mark.parametrize("exact", [3, 16])
def test_exact_tokens_may_be_anything(exact: int) -> None:
    world = World(exact=exact)
    noise = torch.randint(0, 256, (BLOCKS, exact, 3 * 2 * 64 * 2), dtype=torch.uint8, device=DEVICE)
    for layer in world.layers:
        layer[:, :exact] = noise.view(torch.bfloat16).view(layer[:, :exact].shape)
    check_codes(world)
    for block, target in zip(IDS, TARGETS, strict=True):
        for then, now in zip(world.numbers(block), world.numbers(target), strict=True):
            assert then[:, :, :exact].tobytes() == now[:, :, :exact].tobytes()
    if exact == world.tokens:
        assert not world.form.varies
        assert world.nbytes == [world.form.nbytes] * 4


def check_codes(world: World) -> None:
    assert world.encode() == [None] * 4
    assert all(np.array_equal(world.block(i), world.by_cpu(i)) for i in range(4))
    assert world.decode() == [None] * 4


def refused(world: World, block: np.ndarray, i: int) -> bool:
    """Whether the CPU does not decode it."""
    try:
        world.format.decode(block, key=KEYS[i])
    except CodecError:
        return True
    return False


def test_damage_is_told_apart_and_not_written() -> None:
    world = World(exact=2)
    world.encode()
    blocks = [world.block(i) for i in range(4)]
    harms: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "checksum": lambda block: np.append(block[:-9], block[-9:] ^ 1),
        "fingerprint": lambda block: wire.seal(_with(block, 20, 1)),
        "key": lambda block: wire.seal(_with(block, 70, 99)),
    }
    before = [layer.clone() for layer in world.layers]
    for i, harm in enumerate(harms.values()):
        world.write(i, harm(blocks[i]))
    assert world.decode() == [*harms, None]
    kept = [block for block in range(BLOCKS) if block != TARGETS[3]]
    assert all(torch.equal(now[kept], then[kept]) for now, then in zip(world.layers, before, strict=True))


def _with(block: np.ndarray, at: int, value: int) -> np.ndarray:
    changed = block.copy()
    changed[at] = value
    return changed


def test_launches_of_few_tokens_do_not_stand_in_the_way_of_others() -> None:
    """A kernel that has been started with less shared memory is started with as much as before."""
    world = World()
    codes = torch.zeros_like(world.codes)
    for exact in (0, 12, 0):
        batch = world.codec.batch(exact, KEYS, IDS, FIRST_TOKENS, world.places)
        world.codec.encode(batch, codes)
        assert bool((batch.status == GOOD).all())


@pytest.mark.parametrize("change", [-16, 16])
def test_a_size_that_is_not_the_block_s(change: int) -> None:
    world = World()
    world.encode()
    world.nbytes[2] += change
    assert world.decode() == [None, None, "checksum", None]
    world.write(2, wire.seal(world.block(2).copy()))
    assert world.decode() == [None, None, "size", None]


@pytest.mark.parametrize("exact", [0, 2])
def test_sealed_damage_is_refused_where_the_cpu_refuses_it(exact: int) -> None:
    damage(exact, False)


@pytest.mark.usefixtures("fine")
def test_sealed_damage_of_doubled_steps_is_refused_where_the_cpu_refuses_it() -> None:
    damage(0, True)


def damage(exact: int, doubled: bool) -> None:
    """Bytes that changed before the checksum was made, in every part of the codes. What is refused is not written;
    what is not, is decoded to the same."""
    world, rng = World(exact=exact), np.random.default_rng(exact)
    world.encode()
    assert [count > 0 for count in world.doublings(0)] == [doubled] * 2
    blocks = [world.block(i) for i in range(4)]
    start = world.form.starts[-2]
    verdicts = []
    for _ in range(60):
        for i, block in enumerate(blocks):
            bad = block.copy()
            for _ in range(rng.choice([1, 1, 3])):
                front = rng.random() < 0.7
                at = rng.integers(start, min(start + 700, len(bad))) if front else rng.integers(128, len(bad))
                bad[at] = rng.choice([bad[at] ^ 1 << rng.integers(8), 255])
            world.write(i, wire.seal(bad))
        for layer in world.layers:
            layer[TARGETS] = 7
        for i, (cause, target) in enumerate(zip(world.decode(), TARGETS, strict=True)):
            assert (cause is not None) == refused(world, world.block(i), i)
            verdicts.append(cause)
            if cause is None:
                assert_decoded(world, i)
            else:
                assert all(bool((layer[target] == 7).all()) for layer in world.layers)
    assert {None, "decode"} <= {*verdicts}


@pytest.mark.parametrize("exact", [0, 3])
@pytest.mark.parametrize("nbytes", [1, 2**18])
def test_groups_of_blocks(monkeypatch: pytest.MonkeyPatch, nbytes: int, exact: int) -> None:
    """However many are worked on at a time, the codes and the numbers are the same."""
    world, n = World(exact=exact), 16
    room = world.form.nbytes
    keys = [i.to_bytes(32, "big") for i in range(n)]
    places = (room * np.random.default_rng(1).permutation(n)).tolist()
    firsts, sources, targets = list(range(n)), [i % 8 for i in range(n)], list(range(8, 24))
    made: list[tuple[Any, ...]] = []
    for scratch in (nbytes, wht_codec.SCRATCH_BYTES):
        monkeypatch.setattr(wht_codec, "SCRATCH_BYTES", scratch)
        codes = torch.zeros(n * room, dtype=torch.uint8, device=DEVICE)
        encoded = world.codec.batch(exact, keys, sources, firsts, places)
        world.codec.encode(encoded, codes)
        batch = world.codec.batch(exact, keys, targets, firsts, places, encoded.nbytes.tolist())
        world.codec.verify(batch, codes)
        world.codec.decode(batch, codes)
        assert bool((encoded.status == GOOD).all() and (batch.status == GOOD).all())
        made.append((codes, torch.stack([layer[targets] for layer in world.layers])))
    assert all(torch.equal(one, other) for one, other in zip(*made, strict=True))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_sizes_are_about_what_is_expected(head_dim: int) -> None:
    world = World(8, head_dim)
    world.encode()
    expected = world.format.expected_nbytes(0)
    assert all(0.9 * expected < nbytes < 1.1 * expected for nbytes in world.nbytes)
    assert world.form.varies
    assert expected < world.form.nbytes
