"""Calibrated codecs on a GPU against the CPU's: each reads what the other wrote, and both refuse the same."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import profiles
import pytest
import torch

from manthan.benchmarks import made_up
from manthan.codec import wire
from manthan.codec.block import BlockFormat, BlockShape
from manthan.codec.cpu import klt
from manthan.codec.cpu.rows import parse
from manthan.codec.errors import CodecError
from manthan.codec.gpu import klt_codec
from manthan.codec.gpu.paged import DTYPES, GOOD, Batch, PagedLayout, status_cause
from manthan.codec.model import ModelFacts
from manthan.codec.profile import PRESETS, Profile
from manthan.codec.rope import Rope

LAYERS, BLOCKS, GROUP = 3, 24, 2
IDS, SLOTS, TARGETS = [3, 7, 1, 20], [2, 0, 5, 1], [10, 11, 12, 13]
KEYS = [bytes([i]) * 32 for i in range(4)]
FIRST_TOKENS = [96, 0, 16, 2**20]
SHAPES = [(2, 64), (3, 64), (8, 128), (2, 40), (1, 256)]


def profile_of(heads: int, head_dim: int, rope: Rope | None) -> Profile:
    return made_up.profile(LAYERS, heads, head_dim, rope)


def fitting(profile: Profile, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys before RoPE, and values, float32 [layers, heads, tokens, head_dim]."""
    still = replace(profile, info=replace(profile.info, rope=None))
    return made_up.kv(still, tokens, torch.device("cuda"))


class World:
    """A paged cache, heads beside each other, whose block i holds tokens i * tokens of a chain; room for codes full of
    170. scale: of the numbers; 1 fits the profile."""

    def __init__(
        self,
        heads: int = 3,
        head_dim: int = 64,
        preset: str = "klt-8x",
        dtype: torch.dtype = torch.bfloat16,
        tokens: int = 16,
        exact: int = 0,
        profile: Profile | None = None,
        kv: Callable[[Profile, int], tuple[torch.Tensor, torch.Tensor]] = fitting,
        scale: float = 1,
        offset: int = 0,
    ) -> None:
        self.exact, self.head_dim, self.tokens = exact, head_dim, tokens
        profile = profile or profile_of(heads, head_dim, made_up.rope_of(head_dim))
        self.facts = ModelFacts(profile.info.rope, profile)
        keys, values = kv(profile, BLOCKS * tokens)
        if profile.info.rope:
            positions = np.concatenate([np.arange(tokens) + first for first in self._firsts(tokens)])
            keys = torch.from_numpy(profile.info.rope.turn(keys.cpu().numpy(), positions)).cuda()
        side = torch.stack((keys, values), 3) * scale  # [layers, heads, tokens, 2, head_dim]
        blocks = side.view(LAYERS, heads, BLOCKS, tokens, 2 * head_dim).permute(0, 2, 3, 1, 4)
        self.layers = tuple(self._at(blocks[layer].to(dtype), offset) for layer in range(LAYERS))
        strides = (tokens * heads * 2 * head_dim, 2 * head_dim, heads * 2 * head_dim)
        layout = PagedLayout(self.layers, heads, tokens, head_dim, *strides, key_at=0, value_at=head_dim)
        self.format = BlockFormat(preset, layout.shape, b"f" * 16, GROUP, self.facts)
        self.codec = klt_codec.KltPagedCodec(layout, self.format)
        self.form = self.codec.form(exact)
        self.places = [slot * (self.form.nbytes + 48) for slot in SLOTS]
        self.codes = torch.full((8 * (self.form.nbytes + 48),), 170, dtype=torch.uint8, device="cuda")
        self.nbytes = [self.form.nbytes] * 4

    @staticmethod
    def _firsts(tokens: int) -> list[int]:
        """Of each block of the cache."""
        found = dict(zip(IDS, FIRST_TOKENS, strict=True))
        return [found.get(block, 0) for block in range(BLOCKS)]

    @staticmethod
    def _at(x: torch.Tensor, offset: int) -> torch.Tensor:
        """A copy that begins so many numbers behind a multiple of 16 bytes."""
        room = torch.empty(x.numel() + offset, dtype=x.dtype, device="cuda")[offset:].view(x.shape)
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
        self.codes[self.places[i] :][: len(block)] = torch.from_numpy(block.copy()).cuda()

    def numbers(self, block: int) -> list[np.ndarray]:
        """Keys and values of a paged block, [layers, heads, tokens, head_dim] as numpy has them."""
        both = torch.stack([layer[block].transpose(0, 1) for layer in self.layers]).cpu()
        both = both.view(torch.uint16) if both.dtype is torch.bfloat16 else both
        return [np.ascontiguousarray(part.numpy()) for part in both.split(self.head_dim, -1)]

    def by_cpu(self, i: int) -> np.ndarray:
        numbers = self.numbers(IDS[i])
        return self.format.encode(*numbers, key=KEYS[i], first_token=FIRST_TOKENS[i], exact=self.exact)


def as_floats(numbers: np.ndarray) -> torch.Tensor:
    x = torch.from_numpy(np.array(numbers))
    return (x.view(torch.bfloat16) if x.dtype is torch.uint16 else x).float()


def assert_alike(world: World, i: int, target: int) -> None:
    """What the GPU has decoded and what the CPU does: exact tokens bit for bit; others within their dtype's rounding
    and 2**-10 of what is furthest from the mean in their token of the layer; 0.4 of that is seen."""
    decoded = world.format.decode(world.block(i), key=KEYS[i])
    for right, found, side in zip(decoded, world.numbers(target), ("keys", "values"), strict=True):
        assert right[:, :, : world.exact].tobytes() == found[:, :, : world.exact].tobytes()
        x, y = as_floats(right)[:, :, world.exact :], as_floats(found)[:, :, world.exact :]
        means = torch.from_numpy(np.stack([getattr(layer, side).mean for layer in world.facts.profile.layers]))
        # a mean that is turned is still as long
        far = (x.abs().amax((1, 3)) + means.abs().amax(1, keepdim=True))[:, None, :, None] * 2**-10
        step = torch.finfo(world.layers[0].dtype).eps * x.abs()
        assert bool(((x - y).abs() <= far + step).all()), float(((x - y).abs() / (far + step)).max())


def coded_again(world: World, i: int) -> None:
    """Sections are, byte for byte, what the CPU's entropy coder makes of their integers."""
    block = wire.parse(world.block(i), key=KEYS[i], fingerprint=b"f" * 16, group=GROUP)
    codec = world.format._codecs[world.format.codec]
    for section, codes in zip(block.header.sections[-2:], block.payloads[-2:], strict=True):
        rows = klt._rows(section, codec._of(section))
        coded = parse(codes[klt.START :], rows)
        again = codec._coder.encode(codec._coder.decode(coded, rows), rows, codes.size)
        assert all(np.array_equal(one, other) for one, other in zip(coded, again, strict=True))


def check(world: World) -> None:
    before = [layer.clone() for layer in world.layers]
    assert world.encode() == [None] * 4
    assert world.decode() == [None] * 4
    for i, target in enumerate(TARGETS):
        assert world.form.header.nbytes < world.nbytes[i] <= world.form.nbytes
        block, by_cpu = world.block(i), world.by_cpu(i)
        assert abs(len(block) - len(by_cpu)) <= 0.01 * len(by_cpu) + 32
        coded_again(world, i)
        assert_alike(world, i, target)
        for x, y in zip(world.numbers(IDS[i]), world.numbers(target), strict=True):
            error = (as_floats(x) - as_floats(y)).square().mean() / as_floats(x).square().mean()
            assert error < 0.2
    others = [block for block in range(BLOCKS) if block not in TARGETS]
    assert all(torch.equal(now[others], then[others]) for now, then in zip(world.layers, before, strict=True))
    outside = torch.ones(len(world.codes), dtype=torch.bool)
    for place in world.places:
        outside[place : place + world.form.nbytes] = False
    assert bool((world.codes.cpu()[outside] == 170).all())
    for i in range(4):
        world.write(i, world.by_cpu(i))
    assert world.decode() == [None] * 4
    for i, target in enumerate(TARGETS):
        assert_alike(world, i, target)


@pytest.mark.parametrize("exact", [0, 4])
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(("heads", "head_dim"), SHAPES)
def test_each_reads_what_the_other_wrote(heads: int, head_dim: int, preset: str, exact: int) -> None:
    check(World(heads, head_dim, preset, exact=exact))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("exact", [0, 4])
def test_other_caches(dtype: torch.dtype, exact: int) -> None:
    check(World(dtype=dtype, exact=exact))


@pytest.mark.parametrize("tokens", [8, 20, 32, 128])
@pytest.mark.parametrize("exact", [0, 3, 7])
def test_blocks_of_any_number_of_tokens(tokens: int, exact: int) -> None:
    check(World(tokens=tokens, exact=exact))


@pytest.mark.parametrize(
    "rope", [None, Rope(tuple(100.0 ** -np.arange(0, 1, 1 / 16))), Rope((1.0, 0.3, 0.01), 1.2, interleaved=True)]
)
def test_any_rope(rope: Rope | None) -> None:
    check(World(profile=profile_of(3, 64, rope)))


def test_caches_that_begin_anywhere() -> None:
    check(World(offset=3))


@pytest.mark.parametrize("metric", [False, True])
def test_a_profile_that_was_measured(metric: bool) -> None:
    """Its transforms are not orthogonal where there is a metric."""

    def kv(profile: Profile, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values, _ = profiles.kv(tokens, seed=99, rope=None)
        return torch.from_numpy(keys.copy()).cuda(), torch.from_numpy(values.copy()).cuda()

    check(World(profiles.HEADS, profiles.HEAD_DIM, "klt-5x", profile=profiles.built(metric=metric), kv=kv))


def test_tables_may_be_outside_of_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.cuda.get_device_properties

    class Small:
        def __init__(self, device: Any) -> None:
            self._real = real(device)

        def __getattr__(self, name: str) -> Any:
            return 1024 if name == "shared_memory_per_block_optin" else getattr(self._real, name)

    monkeypatch.setattr(torch.cuda, "get_device_properties", Small)
    check(World())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("exact", [0, 3])
@pytest.mark.parametrize("interleaved", [False, True])
def test_numbers_that_are_far_from_the_profile(dtype: torch.dtype, exact: int, interleaved: bool) -> None:
    """Of one block, the keys of another, the values of a third: those sections double their steps."""
    rope = replace(made_up.rope_of(64), interleaved=interleaved)
    world = World(dtype=dtype, exact=exact, profile=profile_of(3, 64, rope))
    for layer in world.layers:
        for block, at in ((IDS[0], slice(None)), (IDS[1], slice(64)), (IDS[2], slice(64, None))):
            layer[block, :, :, at] *= 30
    assert world.encode() == [None] * 4
    assert world.decode() == [None] * 4
    forms = []
    for i, target in enumerate(TARGETS):
        forms.append(doubled(world, i))
        assert len(world.block(i)) <= world.form.nbytes
        assert_alike(world, i, target)
        for x, y in zip(world.numbers(IDS[i]), world.numbers(target), strict=True):
            assert (as_floats(x) - as_floats(y)).square().mean() < 0.2 * as_floats(x).square().mean()
    assert forms == [[True, True], [True, False], [False, True], [False, False]]
    for i in range(4):
        world.write(i, world.by_cpu(i))
        assert doubled(world, i) == forms[i]
    assert world.decode() == [None] * 4
    for i, target in enumerate(TARGETS):
        assert_alike(world, i, target)


def doubled(world: World, i: int) -> list[bool]:
    return [payload[1] > 0 for payload in wire.parse(world.block(i), group=GROUP).payloads[-2:]]


def test_numbers_too_far_from_the_profile_are_reported() -> None:
    world = World(dtype=torch.float32)
    world.layers[1][IDS[1], 5, 2, 64:] = 3e38
    world.layers[2][IDS[2], 5, 2, :64] = 2.0**99
    assert world.encode() == [None, "decode", "decode", None]


@pytest.mark.parametrize("exact", [0, 5])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("at", [3, 67])
def test_what_is_not_finite_is_reported(number: float, exact: int, at: int) -> None:
    world = World(exact=exact)
    world.layers[1][7, 9, 2, at] = number
    assert world.encode() == [None, "decode", None, None]
    coded = world.tokens - exact
    assert world.encoded.status[1].item() == 3 * coded + 2 * coded + 9 - exact


@pytest.mark.parametrize("exact", [3, 16])
def test_exact_tokens_may_be_anything(exact: int) -> None:
    world = World(exact=exact)
    noise = torch.randint(0, 256, (BLOCKS, exact, 3 * 2 * 64 * 2), dtype=torch.uint8, device="cuda")
    for layer in world.layers:
        layer[:, :exact] = noise.view(torch.bfloat16).view(layer[:, :exact].shape)
    assert world.encode() == [None] * 4
    assert world.decode() == [None] * 4
    for block, target in zip(IDS, TARGETS, strict=True):
        for then, now in zip(world.numbers(block), world.numbers(target), strict=True):
            assert then[:, :, :exact].tobytes() == now[:, :, :exact].tobytes()
    if exact == world.tokens:
        assert world.nbytes == [world.form.nbytes] * 4
        assert all(np.array_equal(world.block(i), world.by_cpu(i)) for i in range(4))


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


@pytest.mark.parametrize("change", [-16, 16])
def test_a_size_that_is_not_the_block_s(change: int) -> None:
    world = World()
    world.encode()
    world.nbytes[2] += change
    assert world.decode() == [None, None, "checksum", None]
    block = world.block(2).copy()
    world.write(2, wire.seal(block))
    assert world.decode() == [None, None, "size", None]


@pytest.mark.parametrize("scale", [1, 30])
@pytest.mark.parametrize("exact", [0, 2])
def test_sealed_damage_is_refused_where_the_cpu_refuses_it(exact: int, scale: float) -> None:
    """Bytes that changed before the checksum was made: in lengths, doublings, sizes, states, words. What is refused is
    not written, what is not, is decoded to the same."""
    world, rng = World(exact=exact, scale=scale), np.random.default_rng(exact)
    world.encode()
    blocks = [world.block(i) for i in range(4)]
    start = world.form.starts[-2]
    verdicts = []
    for _ in range(40):
        for i, block in enumerate(blocks):
            bad = block.copy()
            for _ in range(rng.choice([1, 1, 3])):
                front = rng.random() < 0.5
                at = rng.integers(start, min(start + 80, len(bad))) if front else rng.integers(128, len(bad))
                bad[at] ^= 1 << rng.integers(8)
            world.write(i, wire.seal(bad))
        for layer in world.layers:
            layer[TARGETS] = 7
        causes = world.decode()
        for i, (cause, target) in enumerate(zip(causes, TARGETS, strict=True)):
            assert (cause is not None) == refused(world, world.block(i), i)
            verdicts.append(cause)
            if cause is None:
                assert_alike(world, i, target)
            else:
                assert all(bool((layer[target] == 7).all()) for layer in world.layers)
    assert {"decode", "size"} <= {*verdicts}


@pytest.mark.parametrize("exact", [0, 3])
@pytest.mark.parametrize("numbers", [1, 2**16])
def test_groups_of_blocks(monkeypatch: pytest.MonkeyPatch, numbers: int, exact: int) -> None:
    """However many are worked on at a time, the codes fit, and come back as the same numbers."""
    world, n = World(exact=exact), 16
    room = world.form.nbytes
    keys, codes = [i.to_bytes(32, "big") for i in range(n)], torch.zeros(n * room, dtype=torch.uint8, device="cuda")
    places = (room * np.random.default_rng(1).permutation(n)).tolist()
    firsts, sources, targets = list(range(n)), [i % 8 for i in range(n)], list(range(8, 24))
    monkeypatch.setattr(klt_codec, "SCRATCH_BYTES", 3 * numbers)
    monkeypatch.setattr(klt_codec, "PRODUCTS_AT_ONCE", numbers)
    encoded = world.codec.batch(exact, keys, sources, firsts, places)
    world.codec.encode(encoded, codes)
    assert bool((encoded.status == GOOD).all())
    found = []
    for _ in range(2):
        batch = world.codec.batch(exact, keys, targets, firsts, places, encoded.nbytes.tolist())
        world.codec.verify(batch, codes)
        world.codec.decode(batch, codes)
        assert bool((batch.status == GOOD).all())
        found.append(torch.stack([layer[targets] for layer in world.layers]).float().cpu())
        monkeypatch.undo()
    assert torch.allclose(*found, rtol=0.01, atol=0.01)
    for i, key in enumerate(keys):
        block = codes[places[i] :][: encoded.nbytes[i]].cpu().numpy()
        decoded = world.format.decode(block, key=key)
        right = torch.cat([as_floats(x) for x in decoded], 3).transpose(1, 2)
        assert torch.allclose(right, found[0][:, i], rtol=0.01, atol=0.01)


def test_a_codec_with_no_profile_is_refused() -> None:
    shape = BlockShape(LAYERS, 3, 16, 64)
    with pytest.raises(CodecError, match="needs a profile of the model"):
        BlockFormat("klt-8x", shape, b"f" * 16, GROUP)
