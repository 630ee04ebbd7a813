"""The torch backend against the numpy codec, on the CPU: the same bytes, the same numbers, each refusal."""

from dataclasses import replace

import numpy as np
import pytest
import xxhash

torch = pytest.importorskip("torch")

from manthan.codec import wire  # noqa: E402
from manthan.codec.block import BlockFormat  # noqa: E402
from manthan.codec.cpu.numpy_codec import NumpyCodec  # noqa: E402
from manthan.codec.errors import ShapeError  # noqa: E402
from manthan.codec.gpu import torch_codec as torch_backend  # noqa: E402
from manthan.codec.gpu import torch_vectors  # noqa: E402
from manthan.codec.gpu.paged import BAD_CHECKSUM, BAD_HEADER, GOOD, Batch, PagedLayout, status_cause  # noqa: E402
from manthan.codec.model import NO_FACTS, ModelFacts  # noqa: E402
from manthan.codec.registry import SPECS  # noqa: E402
from manthan.codec.rope import Rope  # noqa: E402
from manthan.codec.tables.constants import tables  # noqa: E402

HEAD_DIMS = [32, 40, 64, 80, 96, 128, 192, 256, 512]
NAMES = list(SPECS)
KINDS = ("key", "value")
FINGERPRINT = bytes(range(16))
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def plain(name, head_dim):
    """The codec that all others have to agree with."""
    return NumpyCodec(SPECS[name], head_dim, fused=False)


def constants(name, head_dim, kind):
    """What encode_vectors and decode_vectors take after the data."""
    bits = SPECS[name].bits(kind)
    return tables(head_dim, bits, SPECS[name].rotated, SPECS[name].unbiased), bits


def split(codes, n, bits, head_dim):
    """Scales [n, 2] and planes [n, width] of a codec's codes."""
    start, width = -(-2 * n // 16) * 16, bits * head_dim // 8
    return codes[: 2 * n].reshape(n, 2), codes[start : start + n * width].reshape(n, width)


def same_bits(a, b):
    """Whether two arrays are equal to the last bit, minus zero and all."""
    return a.shape == b.shape and a.tobytes() == b.tobytes()


# ---- vectors


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", NAMES)
def test_vectors_agree_with_numpy_bit_for_bit(name, head_dim, vectors):
    noise = np.random.default_rng(head_dim).standard_normal((301, head_dim)).astype(np.float32)
    huge = noise / np.abs(noise).max() * np.float32(3e38)
    kinds = {"noise": noise, "huge": huge, "edges": vectors.edges(head_dim), "one": noise[:1]}
    for what, x in {**kinds, **vectors.structured(head_dim)}.items():
        for kind in KINDS:
            codes = plain(name, head_dim).encode(x, kind)
            scales, planes = split(codes, len(x), SPECS[name].bits(kind), head_dim)
            made = torch_vectors.encode_vectors(torch.tensor(x), *constants(name, head_dim, kind))
            assert made[2].all(), what
            assert np.array_equal(made[0].numpy(), scales), what
            assert np.array_equal(made[1].numpy(), planes), what
            found, finite = torch_vectors.decode_vectors(*made[:2], *constants(name, head_dim, kind))
            assert finite.all(), what
            assert same_bits(found.numpy(), plain(name, head_dim).decode(codes, len(x), kind)), what
            bf16 = torch_vectors.cast(found, torch.bfloat16).view(torch.uint16).numpy()
            assert same_bits(bf16, plain(name, head_dim).decode(codes, len(x), kind, np.uint16)), what


@pytest.mark.parametrize("head_dim", [40, 80])
def test_every_step_is_the_same_to_the_last_bit(head_dim):
    """Another order of additions, or a root that is off in its last bit, shows in one of thousands of vectors."""
    x = np.random.default_rng(0).standard_normal((200_000, head_dim)).astype(np.float32)
    codes = split(plain("lloyd4", head_dim).encode(x), len(x), 4, head_dim)
    made = torch_vectors.encode_vectors(torch.tensor(x), *constants("lloyd4", head_dim, "key"))
    assert all(map(np.array_equal, (part.numpy() for part in made[:2]), codes))


@pytest.mark.parametrize("name", NAMES)
def test_vectors_that_are_not_finite_leave_the_others_alone(name):
    x = np.random.default_rng(0).standard_normal((20, 64)).astype(np.float32)
    clean = torch_vectors.encode_vectors(torch.tensor(x), *constants(name, 64, "key"))
    bad = {3: np.nan, 7: np.inf, 8: -np.inf, 19: -np.nan}
    for row, number in bad.items():
        x[row, row] = number
    made = torch_vectors.encode_vectors(torch.tensor(x), *constants(name, 64, "key"))
    assert made[2].tolist() == [row not in bad for row in range(20)]
    for before, after in zip(clean[:2], made[:2], strict=True):
        assert torch.equal(before[made[2]], after[made[2]])


@pytest.mark.parametrize("scale", [0x7F80, 0x7FC0, 0xFF80, 0xFFFF])
def test_scales_that_are_not_finite_leave_the_others_alone(scale):
    x = torch.randn((20, 64), generator=torch.Generator().manual_seed(0))
    scales, planes, _ = torch_vectors.encode_vectors(x, *constants("lloyd3", 64, "key"))
    clean, _ = torch_vectors.decode_vectors(scales, planes, *constants("lloyd3", 64, "key"))
    scales[5] = torch.tensor([scale & 255, scale >> 8], dtype=torch.uint8)
    found, finite = torch_vectors.decode_vectors(scales, planes, *constants("lloyd3", 64, "key"))
    assert finite.tolist() == [row != 5 for row in range(20)]
    assert torch.equal(found[finite], clean[finite])


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("name", NAMES)
def test_any_codes_decode_to_the_same_numbers(name, head_dim):
    """Also those that encoding does not make: every scale, minus signs and overflow included."""
    rng = np.random.default_rng(head_dim)
    every = np.arange(2**16, dtype=np.uint16)
    every = every[(every & 0x7F80) != 0x7F80][:: 7 if head_dim == 64 else 61]
    for kind in KINDS:
        codec = plain(name, head_dim)
        codes = rng.integers(0, 256, codec.encoded_nbytes(len(every), kind), np.uint8)
        codes[: 2 * len(every)] = np.frombuffer(every.tobytes(), np.uint8)
        parts = split(codes, len(every), SPECS[name].bits(kind), head_dim)
        found, _ = torch_vectors.decode_vectors(*map(torch.tensor, parts), *constants(name, head_dim, kind))
        assert same_bits(found.numpy(), codec.decode(codes, len(every), kind))
        bf16 = torch_vectors.cast(found, torch.bfloat16).view(torch.uint16).numpy()
        assert same_bits(bf16, codec.decode(codes, len(every), kind, np.uint16))
        fp16 = torch_vectors.cast(found, torch.float16).numpy()
        assert same_bits(fp16, np.clip(found.numpy(), -65504, 65504).astype(np.float16))


def test_no_vectors():
    made = torch_vectors.encode_vectors(torch.empty((0, 80)), *constants("k4v3", 80, "key"))
    assert [tuple(part.shape) for part in made] == [(0, 2), (0, 40), (0,)]
    found, finite = torch_vectors.decode_vectors(*made[:2], *constants("k4v3", 80, "key"))
    assert (found.shape, finite.shape) == ((0, 80), (0,))


# ---- whole blocks

LAYERS, HEADS, TOKENS, BLOCKS = 3, 2, 5, 9
IDS, SLOTS = [7, 0, 3, 8], [2, 5, 0, 1]
FIRST_TOKENS = [5 * n for n in IDS]
LAYOUTS = ["interleaved", "halves", "heads first", "heads outermost"]


def paged(layout, head_dim, dtype):
    """A layout's PagedLayout over random numbers: each cache is a part of a larger tensor."""
    inner = {
        "interleaved": ((BLOCKS, TOKENS, HEADS, 2 * head_dim), (0, 2, 1), head_dim),
        "halves": ((2, BLOCKS, TOKENS, HEADS, head_dim), (1, 3, 2), BLOCKS * TOKENS * HEADS * head_dim),
        "heads first": ((BLOCKS, 2, HEADS, TOKENS, head_dim), (0, 2, 3), HEADS * TOKENS * head_dim),
        "heads outermost": ((2, HEADS, BLOCKS, TOKENS, head_dim), (2, 1, 3), HEADS * BLOCKS * TOKENS * head_dim),
    }
    shape, (block, head, token), value_at = inner[layout]
    size, generator = int(np.prod(shape)), torch.Generator().manual_seed(head_dim)
    caches = tuple(
        torch.randn(size + 96, generator=generator).to(dtype)[64 : 64 + size].view(shape) for _ in range(LAYERS)
    )
    block, head, token = (caches[0].stride(dim) for dim in (block, head, token))
    return PagedLayout(caches, HEADS, TOKENS, head_dim, block, head, token, 0, value_at)


def vector(layout, layer, kind, block, head, token):
    """One vector of the paged cache, as a view."""
    at = layout.value_at if kind == "value" else layout.key_at
    at += block * layout.block_stride + head * layout.head_stride + token * layout.token_stride
    return layout.caches[layer].as_strided((layout.head_dim,), (1,), layout.caches[layer].storage_offset() + at)


def vectors_of(layout, kind, block):
    """[layers, heads, tokens] flattened, by head_dim: one block's vectors in the cache's dtype."""
    places = np.ndindex(LAYERS, HEADS, TOKENS)
    return torch.stack([vector(layout, layer, kind, block, head, token) for layer, head, token in places])


def as_numpy(x):
    """A tensor's numbers for the numpy codec, and for comparing bits: bf16 as uint16."""
    return x.view(torch.uint16).numpy() if x.dtype == torch.bfloat16 else x.numpy()


def turns(head_dim, interleaved=False):
    """What a codec is told of a model whose RoPE leaves some numbers alone."""
    return ModelFacts(Rope(tuple(100.0 ** -np.arange(0, 1, 4 / head_dim)), interleaved=interleaved))


class World:
    """A paged cache, its codec, and room for encoded blocks filled with 170. exact: of each block's first tokens."""

    def __init__(self, name="k4v3", head_dim=64, layout="interleaved", dtype="bf16", exact=0, facts=NO_FACTS):
        self.layout, self.exact = paged(layout, head_dim, DTYPES[dtype]), exact
        self.format = BlockFormat(name, self.layout.shape, FINGERPRINT, group=3, facts=facts)
        self.codec = torch_backend.TorchPagedCodec(self.layout, self.format)
        self.nbytes = self.codec.form(exact).nbytes
        self.places = [slot * (self.nbytes + 32) for slot in SLOTS]
        self.codes = torch.full((7 * (self.nbytes + 32) + 5,), 170, dtype=torch.uint8)
        self.keys = [bytes([i]) * 32 for i in IDS]

    def batch(self, ids=IDS, first_tokens=FIRST_TOKENS):
        """These blocks, and the codes of IDS."""
        return self.codec.batch(self.exact, self.keys, ids, first_tokens, self.places)

    def encode(self):
        """All of IDS; returns the status."""
        batch = self.batch()
        self.codec.encode(batch, self.codes)
        return batch.status.tolist()

    def decode(self, ids, batch=None):
        """Into these blocks; returns the status."""
        batch = batch or self.batch(ids)
        self.codec.verify(batch, self.codes)
        self.codec.decode(batch, self.codes)
        return batch.status.tolist()

    def block(self, i):
        """The i-th encoded block's bytes, as a view."""
        return self.codes[self.places[i] :][: self.nbytes]

    def start(self, section):
        """Where a section begins in an encoded block."""
        return self.codec.form(self.exact).starts[section]

    def reseal(self, i):
        """Give the i-th encoded block the checksum that fits it."""
        block = self.block(i)
        digest = xxhash.xxh3_64_intdigest(block[:8].numpy().tobytes() + block[16:].numpy().tobytes())
        block[8:16] = torch.tensor(list(digest.to_bytes(8, "little")), dtype=torch.uint8)

    def snapshot(self):
        """The caches' whole storage, bits only."""
        storages = [cache.untyped_storage() for cache in self.layout.caches]
        return [torch.empty(0, dtype=torch.uint8).set_(storage).numpy().copy() for storage in storages]

    def numbers(self, block):
        """Keys and values of a paged block, [layers, heads, tokens, head_dim] as the numpy codec has them."""
        shape = (LAYERS, HEADS, TOKENS, self.layout.head_dim)
        return [as_numpy(vectors_of(self.layout, kind, block)).reshape(shape) for kind in KINDS]

    def write(self, block, numbers):
        """Make a paged block what `numbers` said."""
        for kind, part in zip(KINDS, numbers, strict=True):
            for place in np.ndindex(LAYERS, HEADS, TOKENS):
                to = vector(self.layout, place[0], kind, block, *place[1:])
                to.copy_(torch.tensor(part[place]).view(to.dtype))


@pytest.fixture(params=[2**22, 2 * TOKENS * HEADS * 64, 1], ids=["all at once", "in parts", "one at a time"])
def at_once(request, monkeypatch):
    """How much of a batch is worked on at a time."""
    monkeypatch.setattr(torch_backend, "NUMBERS_AT_ONCE", request.param)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("name", "head_dim", "exact", "facts"),
    [
        ("lloyd3", 64, 0, NO_FACTS),
        ("k4v3", 80, 1, NO_FACTS),
        ("k4v2", 128, 4, NO_FACTS),
        ("lloyd4", 32, TOKENS, NO_FACTS),
        ("lloyd3-unrotated", 96, 0, NO_FACTS),
        ("k3v3", 256, 2, turns(256)),
        ("k4v2c", 64, 0, turns(64)),
        ("k4v2c", 80, 2, turns(80, interleaved=True)),
        ("k4v2c", 256, 4, turns(256)),
        ("k4v2c", 128, 0, NO_FACTS),
        ("k4v2c", 96, TOKENS, turns(96)),
    ],
)
def test_blocks_are_numpys_byte_for_byte_and_come_back(name, head_dim, exact, facts, layout, dtype):
    world = World(name, head_dim, layout, dtype, exact, facts)
    before = world.snapshot()
    assert world.encode() == [GOOD] * 4
    assert all(map(same_bits, before, world.snapshot()))
    written = torch.zeros(len(world.codes), dtype=torch.bool)
    for place in world.places:
        written[place : place + world.nbytes] = True
    assert (world.codes[~written] == 170).all()
    for i, key in enumerate(world.keys):
        told = {"key": key, "first_token": FIRST_TOKENS[i], "exact": exact}
        assert same_bits(world.block(i).numpy(), world.format.encode(*world.numbers(IDS[i]), **told))

    ids = [1, 4, 6, 2]
    expected = World(name, head_dim, layout, dtype, exact, facts)
    for i, block in enumerate(ids):
        expected.write(block, world.format.decode(world.block(i).numpy(), key=world.keys[i]))
    assert world.decode(ids) == [GOOD] * 4
    assert all(map(same_bits, world.snapshot(), expected.snapshot()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exact", [2, TOKENS])
def test_exact_tokens_may_be_anything(dtype, exact):
    """Not finite, minus zero, denormal: as they are, and nobody's fault."""
    world = World(dtype=dtype, exact=exact)
    shape = (LAYERS, HEADS, TOKENS, 64)
    rng, kept = np.random.default_rng(1), []
    for block in IDS:
        numbers = world.numbers(block)
        for part in numbers:
            part[:, :, :exact] = rng.integers(0, 256, (*shape[:2], exact, 64 * part.itemsize), np.uint8).view(
                part.dtype
            )
        world.write(block, numbers)
        kept.append([part[:, :, :exact].copy() for part in numbers])
    assert world.encode() == [GOOD] * 4
    assert world.decode([1, 4, 6, 2]) == [GOOD] * 4
    for block, parts in zip([1, 4, 6, 2], kept, strict=True):
        for now, then in zip(world.numbers(block), parts, strict=True):
            assert now[:, :, :exact].tobytes() == then.tobytes()


def test_caches_made_in_inference_mode():
    with torch.inference_mode():
        world = World()
    assert world.encode() == [GOOD] * 4
    assert world.decode([1, 4, 6, 2]) == [GOOD] * 4


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("exact", [0, 2, TOKENS])
@pytest.mark.parametrize("name", ["k4v3", "k4v2c"])
def test_the_host_never_waits_for_the_device(name, exact):
    """Meta tensors have no data: whatever asks for it, or for a size that depends on it, raises."""
    world = World(name, exact=exact, facts=turns(64, interleaved=True))
    caches = tuple(cache.to("meta") for cache in world.layout.caches)
    layout = replace(world.layout, caches=caches)
    codec, codes = torch_backend.TorchPagedCodec(layout, world.format), world.codes.to("meta")
    batch = world.batch()
    batch = Batch(exact, *(part.to("meta") for part in batch[1:]))
    codec.encode(batch, codes)
    codec.verify(batch, codes)
    codec.decode(batch, codes)


def test_float16_stays_within_its_range():
    world = World(dtype="fp16")
    for kind in KINDS:
        vector(world.layout, 1, kind, IDS[0], 1, 3).copy_(65504 * torch.randn(64).sign())
    assert world.encode() == [GOOD] * 4
    assert world.decode([1, 4, 6, 2]) == [GOOD] * 4
    assert vectors_of(world.layout, "key", 1).abs().max() == 65504


@pytest.mark.parametrize("exact", [0, 2, TOKENS])
@pytest.mark.parametrize("name", ["k4v3", "k4v2c"])
def test_no_blocks(name, exact):
    world = World(name, exact=exact, facts=turns(64))
    batch, before = world.batch(), world.snapshot()
    batch = Batch(exact, *(part[:0] for part in batch[1:]))
    world.codec.encode(batch, world.codes)
    world.codec.verify(batch, world.codes)
    world.codec.decode(batch, world.codes)
    assert (world.codes == 170).all()
    assert all(map(same_bits, before, world.snapshot()))


DAMAGE = {
    "magic": (0, "magic"),
    "version": (4, "version"),
    "header length": (6, "version"),
    "fingerprint": (16, "fingerprint"),
    "end of the fingerprint": (31, "fingerprint"),
    "length": (32, "size"),
    "first token": (40, "key"),
    "group": (48, "key"),
    "sections": (50, "size"),
    "tokens": (52, "size"),
    "length of the key": (56, "key"),
    "key": (64, "key"),
    "end of the key": (95, "key"),
    "behind the key": (127, "key"),
    "kind": (128, "size"),
    "dtype": (129, "size"),
    "codec": (160, "size"),
    "last entry's end": (-1, "size"),
}


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("exact", [0, 2, TOKENS])
@pytest.mark.parametrize("what", DAMAGE)
def test_a_header_that_is_not_the_expected_one_is_refused(what, exact):
    offset, cause = DAMAGE[what]
    world = World(exact=exact)
    end = world.codec.form(exact).header.nbytes
    offset %= end
    world.encode()
    world.block(2)[offset] ^= 1
    world.block(2)[min(offset + 1, end - 1)] ^= 64  # the first is reported
    world.reseal(2)
    before = vectors_of(world.layout, "key", 6), vectors_of(world.layout, "value", 6)
    status = world.decode([1, 4, 6, 2])
    assert status == [GOOD, GOOD, BAD_HEADER - offset, GOOD]
    assert [status_cause(one) for one in status] == [None, None, cause, None]
    for kind, x in zip(KINDS, before, strict=True):
        assert torch.equal(vectors_of(world.layout, kind, 6), x)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("exact", [0, 2, TOKENS])
@pytest.mark.parametrize("offset", [0, 8, 15, 50, 90, 191, 256, 1000, -1])
def test_a_block_with_a_wrong_checksum_is_refused(offset, exact):
    world = World(exact=exact)
    world.encode()
    world.block(0)[offset] ^= 128
    before = world.snapshot()
    assert world.decode([1, 4, 6, 2]) == [BAD_CHECKSUM, GOOD, GOOD, GOOD]
    assert status_cause(BAD_CHECKSUM) == "checksum"
    clean = World(exact=exact)
    for layer, storage in enumerate(before):  # block 1 as it was, the other three as in a run without damage
        assert same_bits(storage, clean.snapshot()[layer])
    clean.encode()
    kept = [vectors_of(clean.layout, kind, 1) for kind in KINDS]
    clean.decode([1, 4, 6, 2])
    for kind, x in zip(KINDS, kept, strict=True):
        for place, old in zip(np.ndindex(LAYERS, HEADS, TOKENS), x, strict=True):
            vector(clean.layout, place[0], kind, 1, *place[1:]).copy_(old)
    assert all(map(same_bits, world.snapshot(), clean.snapshot()))


def test_two_blocks_swapped_are_refused():
    world = World()
    world.encode()
    first, second = world.block(0).clone(), world.block(1).clone()
    world.block(0).copy_(second)
    world.block(1).copy_(first)
    before = world.snapshot()
    assert [status_cause(one) for one in world.decode(IDS)][:2] == ["key", "key"]
    for kind in KINDS:
        for block in IDS[:2]:
            assert torch.equal(vectors_of(world.layout, kind, block), vectors_of(World().layout, kind, block))
    assert not all(map(same_bits, before, world.snapshot()))


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_first_vector_that_is_not_finite_is_reported(dtype, number):
    world = World(dtype=dtype)
    vector(world.layout, 2, "key", IDS[1], 1, 4)[63] = number  # the last of all
    vector(world.layout, 1, "value", IDS[2], 1, 3)[5] = number
    vector(world.layout, 2, "key", IDS[2], 0, 0)[5] = number
    vector(world.layout, 0, "key", IDS[3], 0, 0)[0] = number
    assert world.encode() == [GOOD, 29, 18, 0]
    assert [status_cause(status) for status in (29, 18, 0)] == ["decode"] * 3
    wire.parse(world.block(0).numpy().tobytes(), key=world.keys[0], fingerprint=FINGERPRINT, group=3)


def test_vectors_are_counted_among_those_that_are_not_exact():
    world = World(exact=2)
    vector(world.layout, 1, "key", IDS[1], 1, 3)[5] = float("nan")
    assert world.encode() == [GOOD, (1 * HEADS + 1) * (TOKENS - 2) + 3 - 2, GOOD, GOOD]


@pytest.mark.usefixtures("at_once")
def test_the_first_scale_that_is_not_finite_is_reported():
    world = World()
    world.encode()
    for i, (section, index) in {1: (0, 17), 2: (1, 3), 3: (0, 29)}.items():
        at = world.start(section) + 2 * index
        world.block(i)[at : at + 2] = torch.tensor([0x80, 0x7F])
        world.reseal(i)
    before = world.layout.caches[0].clone()
    assert world.decode([1, 4, 6, 2]) == [GOOD, 17, 3, 29]
    for block in (4, 6, 2):
        assert torch.equal(world.layout.caches[0][block], before[block])


@pytest.mark.usefixtures("at_once")
def test_keys_too_large_to_be_centred_are_reported():
    """And means that no encoder writes: all vectors of their run are."""
    world = World("k4v2c", facts=turns(64))
    vector(world.layout, 1, "key", IDS[1], 1, 2)[7] = 2.0**100
    vector(world.layout, 1, "value", IDS[1], 0, 2)[7] = 2.0**100
    vector(world.layout, 2, "value", IDS[2], 1, 4)[0] = float("inf")
    assert world.encode() == [GOOD, (1 * HEADS + 1) * TOKENS + 2, 29, GOOD]
    at = world.start(0) + 2 * 3
    for i, step in {0: 0x7FC0, 3: 0x8000}.items():
        world.block(i)[at : at + 2] = torch.tensor([step & 255, step >> 8])
        world.reseal(i)
    assert world.decode([1, 4, 6, 2])[::3] == [3 * TOKENS, 3 * TOKENS]


@pytest.mark.usefixtures("at_once")
def test_a_byte_scale_that_is_not_finite_is_reported():
    world = World("k4v2c", facts=turns(64))
    world.encode()
    at = world.start(1) + 2 * (1 + TOKENS)  # the third run of the values
    world.block(2)[at : at + 1 + TOKENS] = torch.tensor([240, *[100] * (TOKENS - 1), 255])
    world.reseal(2)
    assert world.decode([1, 4, 6, 2]) == [GOOD, GOOD, 3 * TOKENS - 1, GOOD]


def test_blocks_far_away_and_places_that_cannot_be_cost_no_more():
    """A damaged header may say any place: what is reckoned for it is a block's, whatever it is."""
    world = World("k4v2c", facts=turns(64))
    batch = world.batch(first_tokens=[0, 2**40, 2**62, 5])
    assert batch.turns.shape == (4, 2, TOKENS, 16)
    assert bool(batch.turns.isfinite().all())


def test_a_header_of_another_shape_is_refused():
    world = World()
    with pytest.raises(ShapeError):
        torch_backend.TorchPagedCodec(replace(world.layout, heads=1), world.format)
