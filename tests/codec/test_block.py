"""Formats of blocks: every number in one section, bit for bit where it is exact, and no other block is read."""

from dataclasses import replace

import numpy as np
import profiles
import pytest
from kv import in_cache, packed

from manthan.codec import NonFiniteError, ShapeError, get_codec, wire
from manthan.codec.base import Dtype, SectionKind
from manthan.codec.block import BlockFormat, BlockShape, piece_dim, sections
from manthan.codec.cpu.numbers import as_floats, as_numbers
from manthan.codec.errors import HeadDimError, ProfileError, SizeError, UnknownCodecError, WireError
from manthan.codec.fidelity import Sample, measure
from manthan.codec.model import NO_FACTS, ModelFacts
from manthan.codec.profile import Profile
from manthan.codec.registry import needs_profile

PRINT, KEY = bytes(range(16)), b"k" * 32
SHAPE = BlockShape(layers=3, heads=2, tokens=16, head_dim=64)
LATENTS = BlockShape(layers=3, heads=1, tokens=16, head_dim=64, latent=512)
INDEX = BlockShape(1, 3 * 132, 16, 1, Dtype.UINT8)
SPARSE = replace(LATENTS, opaque=INDEX)
PLACES = {
    SectionKind.KEYS: (0,),
    SectionKind.VALUES: (1,),
    SectionKind.BOTH: (0, 1),
    SectionKind.LATENT: (1,),
    SectionKind.RAW: (2,),
}
SHAPES = {
    "keys and values": SHAPE,
    "latents": LATENTS,
    "latents and opaque bytes": SPARSE,
    "keys, values and opaque bytes": replace(SHAPE, opaque=INDEX),
}
each_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
each_exact = pytest.mark.parametrize("exact", [0, 1, 4, 15, 16])


def numbers(shape, seed=0, bias=0.0, blocks=1):
    """Keys and values, or RoPE's part and latents behind an RMS norm, in the cache's numbers; and opaque bytes."""
    rng, made = np.random.default_rng(seed), []
    for layers, heads, tokens, dim in (shape.numbers, shape.value_numbers):
        x = rng.standard_normal((layers, blocks * tokens, heads * dim))
        if shape.latent and len(made):
            x += bias * rng.standard_normal(shape.latent)
            x /= np.sqrt(np.square(x).mean(axis=2, keepdims=True))
        x = x.reshape(layers, blocks * tokens, heads, dim).swapaxes(1, 2).astype(np.float32)
        made.append(in_cache(x, shape.dtype))
    return made if shape.opaque is None else [*made, rng.integers(0, 256, shape.opaque.numbers, np.uint8)]


def encode(form, both, exact=0, first_token=0, key=KEY):
    return form.encode(*both, key=key, first_token=first_token, exact=exact)


@each_shape
@pytest.mark.parametrize("exact", range(SHAPE.tokens + 1))
def test_every_number_is_in_one_section(shape, exact):
    covered = [np.zeros(array, int) for array, _ in shape.arrays]
    for section in sections("k3v3", shape, exact):
        tokens = slice(section.first_token, section.first_token + section.tokens)
        for place in PLACES[section.kind]:
            covered[place][: section.layers, : section.heads, tokens, : section.head_dim] += 1
        is_kept = section.kind is SectionKind.RAW or (shape.latent and section.kind is SectionKind.KEYS)
        assert section.codec == ("exact" if section.first_token < exact or is_kept else "k3v3")
        assert section.dtype is (Dtype.UINT8 if section.kind is SectionKind.RAW else shape.dtype)
    assert all((count == 1).all() for count in covered)


@pytest.mark.parametrize("exact", [-1, SHAPE.tokens + 1])
def test_more_exact_tokens_than_there_are_cannot_be(exact):
    with pytest.raises(ShapeError, match=f"exact is {exact}, but must be 0 to 16"):
        sections("k3v3", SHAPE, exact)


@each_shape
@each_exact
@pytest.mark.parametrize("dtype", [Dtype.BFLOAT16, Dtype.FLOAT16, Dtype.FLOAT32])
@pytest.mark.parametrize("name", ["k3v3", "wht-5x", "exact"])
def test_a_block_comes_back_as_its_sections_do(name, exact, dtype, shape):
    shape = replace(shape, dtype=dtype)
    form, both = BlockFormat(name, shape, PRINT, group=3), numbers(shape)
    buf = encode(form, both, exact, first_token=160)
    assert len(buf) <= form.max_nbytes(exact)
    assert len(buf) == form.max_nbytes(exact) or form.sizes_vary(exact)
    header = wire.parse(buf, key=KEY, fingerprint=PRINT, group=3).header
    assert header == form.header(KEY, 160, exact)
    assert form.exact_of(header) == (exact or (shape.tokens if name == "exact" and shape.latent else 0))
    back, coded = form.decode(buf.tobytes(), key=KEY), set()
    for section in header.sections:
        if section.codec != "exact":
            codec, places = get_codec(name, section.head_dim), np.arange(160 + exact, 160 + shape.tokens)
            place = PLACES[section.kind][0]
            codes = np.zeros(codec.max_nbytes(section), np.uint8)
            size = codec.encode(np.ascontiguousarray(both[place][:, :, exact:]), section, places, codes)
            assert np.array_equal(back[place][:, :, exact:], codec.decode(codes[:size], section, places))
            coded.add(place)
    for place, (x, y) in enumerate(zip(both, back, strict=True)):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        kept = slice(exact) if place in coded else slice(None)
        assert x[:, :, kept].tobytes() == y[:, :, kept].tobytes()


@each_exact
def test_only_coded_tokens_must_be_finite(exact):
    form, both = BlockFormat("k3v3", SHAPE, PRINT), np.array(numbers(SHAPE))
    both[:, 2, 1, :exact, 5] = 0x7FC1
    both[:, 0, 0, :exact, 63] = 0xFF80
    back = form.decode(encode(form, both, exact), key=KEY)
    assert np.array_equal(np.stack(back)[:, :, :, :exact], both[:, :, :, :exact])
    if exact < SHAPE.tokens:
        both[1, 1, 1, exact, 0] = 0x7F80
        with pytest.raises(NonFiniteError, match="holds a NaN or an infinity"):
            encode(form, both, exact)


def forged(form, exact, change, sizes=None):
    """A block in good order whose header says something else."""
    header = change(form.header(KEY, 0, exact))
    sizes = [*form.max_sizes(exact), 64][: len(header.sections)] if sizes is None else sizes
    return packed(header, [np.zeros(size, np.uint8) for size in sizes])


def with_section(index, **change):
    def changed(header):
        made = list(header.sections)
        made[index] = replace(made[index], **change)
        return replace(header, sections=tuple(made))

    return changed


def with_sections(change):
    return lambda header: replace(header, sections=tuple(change(header.sections)))


FORGED = {
    "none": (SHAPE, 4, with_sections(lambda found: ()), "size", ()),
    "keys twice": (SHAPE, 0, with_sections(lambda found: found[:1] * 2), "size", None),
    "another order": (SHAPE, 0, with_sections(lambda found: found[::-1]), "size", None),
    "exact tokens overlap": (SHAPE, 4, with_section(0, tokens=5), "size", None),
    "too many exact tokens": (SHAPE, 16, with_section(0, tokens=17), "size", None),
    "dtype": (SHAPE, 4, with_section(1, dtype=Dtype.FLOAT16), "size", None),
    "another of our codecs": (SHAPE, 0, with_section(1, codec="wht-5x"), "codec", None),
    "a codec that nobody has": (SHAPE, 0, with_section(1, codec="k9"), "codec", None),
    "payloads traded": (SHAPE, 4, lambda header: header, "size", (3072 - 16, 2976, 2976)),
    "a payload too long": (SHAPE, 0, lambda header: header, "size", (4992, 4992)),
    "no keys": (LATENTS, 4, with_sections(lambda found: found[1:]), "size", None),
    "no opaque bytes": (SPARSE, 4, with_sections(lambda found: found[1:]), "size", None),
    "opaque bytes where there are none": (
        LATENTS,
        4,
        with_sections(lambda found: sections("k3v3", SPARSE, 4)),
        "size",
        None,
    ),
    "values for latents": (LATENTS, 4, with_section(2, kind=SectionKind.VALUES), "size", None),
    "keys and values": (
        LATENTS,
        4,
        with_sections(lambda found: sections("k3v3", replace(LATENTS, latent=0), 4)),
        "size",
        None,
    ),
}


@pytest.mark.parametrize("what", FORGED)
def test_a_block_of_another_form_is_refused(what):
    shape, exact, change, cause, sizes = FORGED[what]
    form = BlockFormat("k3v3", shape, PRINT)
    form.decode(forged(form, exact, lambda header: header), key=KEY)
    with pytest.raises(WireError) as refusal:
        form.decode(forged(form, exact, change, sizes), key=KEY)
    assert refusal.value.cause == cause
    assert isinstance(refusal.value, SizeError) == (cause == "size")


@pytest.mark.invariant(
    1, "codec/wire.py", "if fingerprint is not None and front.fingerprint != fingerprint:", "if False:"
)
@pytest.mark.invariant(1, "codec/wire.py", "if key is not None and found != key:", "if False:")
@pytest.mark.parametrize(
    ("other", "key", "cause"),
    [
        (BlockFormat("k3v3", SHAPE, b"p" * 16), KEY, "fingerprint"),
        (BlockFormat("k3v3", SHAPE, PRINT, group=1), KEY, "key"),
        (BlockFormat("wht-5x", SHAPE, PRINT), KEY, "codec"),
        (BlockFormat("k3v3", replace(SHAPE, layers=2), PRINT), KEY, "size"),
        (BlockFormat("k3v3", replace(SHAPE, tokens=8), PRINT), KEY, "size"),
        (BlockFormat("k3v3", SHAPE, PRINT), b"another", "key"),
    ],
)
def test_a_block_of_another_format_or_key_is_refused(other, key, cause):
    buf = encode(BlockFormat("k3v3", SHAPE, PRINT), numbers(SHAPE))
    with pytest.raises(WireError) as refusal:
        other.decode(buf, key=key)
    assert refusal.value.cause == cause


def test_numbers_of_another_block_are_refused():
    form, (keys, values) = BlockFormat("k3v3", SHAPE, PRINT), numbers(SHAPE)
    turned, latents = numbers(LATENTS)
    for shape, both in (
        (SHAPE, (keys[:2], values[:2])),
        (LATENTS, (turned, turned)),
        (replace(LATENTS, latent=0), (turned, latents)),
    ):
        with pytest.raises(ShapeError, match="are not a block of"):
            encode(BlockFormat("k3v3", shape, PRINT), both)
    with pytest.raises(ShapeError, match="float32"):
        encode(form, (keys.astype(np.float32), values.astype(np.float32)))
    with pytest.raises(UnknownCodecError, match="did you mean 'k3v3'"):
        BlockFormat("k3v4", SHAPE, PRINT)


# ---- opaque bytes


def test_opaque_bytes_are_a_section_of_a_fixed_size_ahead_of_the_others():
    form, arrays = BlockFormat("wht-5x", SPARSE, PRINT), numbers(SPARSE)
    block = wire.parse(encode(form, arrays), key=KEY, fingerprint=PRINT)
    assert [section.kind.name for section in block.header.sections] == ["RAW", "KEYS", "LATENT"]
    assert block.payloads[0].tobytes() == arrays[2].tobytes()
    assert form.shape.nbytes == 3 * 16 * (1152 + 132)
    alone = form.without_bytes()
    assert alone.shape == LATENTS
    without = wire.parse(encode(alone, arrays[:2]), key=KEY, fingerprint=PRINT)
    assert [part.tobytes() for part in block.payloads[1:]] == [part.tobytes() for part in without.payloads]


@pytest.mark.parametrize("part", [0, 1, 2])
def test_damage_in_any_section_is_found(part):
    form = BlockFormat("wht-5x", SPARSE, PRINT)
    buf = encode(form, numbers(SPARSE))
    block = wire.parse(buf, key=KEY, fingerprint=PRINT)
    at = wire.starts(block.header, [len(payload) for payload in block.payloads])[part]
    for byte in (at, at + len(block.payloads[part]) - 1):
        bad = buf.copy()
        bad[byte] ^= 1
        with pytest.raises(WireError) as refusal:
            form.decode(bad, key=KEY)
        assert refusal.value.cause == "checksum"


def test_opaque_bytes_of_another_shape_are_refused():
    form, (turned, latents, index) = BlockFormat("wht-5x", SPARSE, PRINT), numbers(SPARSE)
    for arrays in ((turned, latents), (turned, latents, index[:, 1:])):
        with pytest.raises(ShapeError, match="are not a block of"):
            encode(form, arrays)
    with pytest.raises(ShapeError, match="int8"):
        encode(form, (turned, latents, index.view(np.int8)))
    other = BlockFormat("wht-5x", replace(SPARSE, opaque=replace(INDEX, heads=INDEX.heads + 3)), PRINT)
    with pytest.raises(SizeError):
        other.decode(encode(form, numbers(SPARSE)), key=KEY)


# ---- latents


def test_a_token_of_latents_takes_the_documented_bytes():
    """DeepSeek-V3: 61 layers, 1,152 bytes each in bf16; see docs/codec.md."""
    token = BlockFormat("wht-5x", replace(LATENTS, layers=61), PRINT).expected_nbytes(0) / 16
    assert 61 * 1152 / token == pytest.approx(2.96, abs=0.01)


@pytest.mark.parametrize(("latent", "piece"), [(512, 128), (256, 128), (384, 128), (320, 80), (64, 64), (96, 96)])
def test_pieces_are_as_large_as_they_may_be(latent, piece):
    assert piece_dim(latent) == piece
    assert replace(LATENTS, latent=latent).value_numbers == (3, latent // piece, 16, piece)


def test_latents_that_cannot_be_coded_are_refused():
    with pytest.raises(HeadDimError, match=r"^latents of 500 numbers are not supported"):
        BlockFormat("wht-5x", replace(LATENTS, latent=500), PRINT)
    with pytest.raises(ProfileError, match=r"codec klt-8x needs a profile of the model"):
        BlockFormat("klt-8x", LATENTS, PRINT)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        pytest.param(LATENTS, Dtype.BFLOAT16, marks=pytest.mark.slow),
        (LATENTS, Dtype.FLOAT8_E4M3),
        (SPARSE, Dtype.BFLOAT16),
        pytest.param(SPARSE, Dtype.FLOAT8_E4M3, marks=pytest.mark.slow),
    ],
    ids=["alone", "alone, fp8", "opaque bytes", "opaque bytes, fp8"],
)
def test_a_profile_makes_latents_smaller_and_no_worse(shape, dtype):
    """Their differences lie in few directions. RoPE's part, the first tokens and the opaque bytes are as they were."""
    shape, facts = replace(shape, dtype=dtype), ModelFacts(profile=profiles.built_of_latents())
    arrays = numbers(shape)
    x = profiles.latents(16, seed=5)
    arrays[1] = as_numbers(16 * x, dtype) if dtype.is_fp8 else in_cache(x, dtype)
    if dtype.is_fp8:
        facts = ModelFacts(profile=in_scale(facts.profile, 16))
    noise, sizes = {}, {}
    for codec in ("wht-5x", "klt-5x", "klt-8x"):
        form = BlockFormat(codec, shape, PRINT, facts=facts if needs_profile(codec) else NO_FACTS)
        buf = encode(form, arrays, exact=4, first_token=32)
        sizes[codec] = len(buf)
        assert len(buf) <= form.max_nbytes(4)
        back = form.decode(buf, key=KEY)
        assert {section.codec for section in wire.parse(buf).header.sections} == {"exact", codec}
        for n, (was, now) in enumerate(zip(arrays, back, strict=True)):
            kept = slice(4) if n == 1 else slice(None)
            assert was[:, :, kept].tobytes() == now[:, :, kept].tobytes()
        was, now = (as_floats(each[1], dtype)[:, :, 4:] for each in (arrays, back))
        noise[codec] = np.square(now - was).sum() / np.square(was - was.mean(axis=2, keepdims=True)).sum()
    assert sizes["klt-8x"] < sizes["klt-5x"] < 1.03 * sizes["wht-5x"]
    assert 0 < noise["klt-5x"] < noise["klt-8x"]
    assert noise["klt-5x"] < noise["wht-5x"]


def in_scale(profile, scale):
    """The profile of numbers that are so many times as large."""
    scaled = "mean", "scale", "center", "deviations"
    groups = [replace(g, **{what: getattr(g, what) * np.float32(scale) for what in scaled}) for g in profile.groups]
    return Profile.of(profile.info, [groups])


@pytest.mark.parametrize(
    ("codec", "bias", "faithful"), [("wht-5x", 12.0, True), ("k3v3", 12.0, False), ("k3v3", 0.0, True)]
)
def test_the_guard_tells_codecs_apart_by_a_bias_of_latents(codec, bias, faithful):
    turned, latents = numbers(LATENTS, bias=bias, blocks=8)
    at = [slice(n * 16, n * 16 + 16) for n in range(8)]
    samples = [Sample((turned[:, :, some], latents[:, :, some]), some.start) for some in at]
    assert measure(BlockFormat(codec, LATENTS, PRINT), samples, None).is_faithful == faithful


# -- heads of one rank, and of others


WHOLE = replace(SHAPE, heads=4)


def shards(codec, parts, exact, both):
    """The blocks of this number of ranks."""
    each = WHOLE.heads // parts
    for at in range(0, WHOLE.heads, each):
        form = BlockFormat(codec, replace(WHOLE, heads=each), PRINT, first_head=at)
        yield encode(form, [numbers[:, at : at + each] for numbers in both], exact)


@each_exact
@pytest.mark.parametrize("codec", ["wht-5x", "k3v3"])
@pytest.mark.parametrize("written", [1, 2, 4])
@pytest.mark.parametrize("read", [1, 2, 4])
def test_any_number_of_ranks_reads_what_another_wrote(codec, exact, written, read):
    """Each head is that of the shard in which it was written, bit for bit."""
    both, each = numbers(WHOLE), WHOLE.heads // written
    stored = list(shards(codec, written, exact, both))
    forms = [BlockFormat(codec, replace(WHOLE, heads=each), PRINT, first_head=at) for at in range(0, 4, each)]
    right = [form.decode(buf, key=KEY) for form, buf in zip(forms, stored, strict=True)]
    right = [np.concatenate([part[n] for part in right], axis=1) for n in (0, 1)]
    width = WHOLE.heads // read
    for at in range(0, WHOLE.heads, width):
        form = BlockFormat(codec, replace(WHOLE, heads=width), PRINT, first_head=at)
        needed = stored[at // each : (at + width - 1) // each + 1]
        parts = wire.split(np.concatenate(needed))
        assert [bytes(part) for part in parts] == [bytes(buf) for buf in needed]
        found = form.joined(form.decode_shard(part, key=KEY) for part in parts)
        for numbers_found, wanted in zip(found, right, strict=True):
            assert np.array_equal(numbers_found, wanted[:, at : at + width])


@pytest.mark.parametrize("which", [[0], [1], [0, 0], [0, 2, 3], [0, 1, 2], [0, 1, 1], []], ids=str)
def test_shards_with_missing_or_surplus_heads_are_no_block(which):
    stored = list(shards("wht-5x", 4, 0, numbers(WHOLE)))
    form = BlockFormat("wht-5x", replace(WHOLE, heads=2), PRINT, first_head=0)
    with pytest.raises(SizeError, match="do not make up 2 heads from 0 on"):
        form.joined(form.decode_shard(stored[at], key=KEY) for at in which)


def test_a_shard_is_not_taken_for_another() -> None:
    """Its header says which heads it has."""
    first, second = (
        BlockFormat("wht-5x", replace(WHOLE, heads=2), PRINT, first_head=at).header(KEY, 0, 0) for at in (0, 2)
    )
    assert first != second
    [one, _] = shards("wht-5x", 2, 0, numbers(WHOLE))
    with pytest.raises(SizeError):
        BlockFormat("wht-5x", replace(WHOLE, heads=2), PRINT, first_head=2).decode(one, key=KEY)


@pytest.mark.parametrize("tail", [b"", b"M", b"x" * 40], ids=len)
def test_bytes_that_are_no_shard_stay_with_the_one_before(tail):
    [whole] = shards("k3v3", 1, 0, numbers(WHOLE))
    assert [bytes(part) for part in wire.split(whole.tobytes() + tail)] == [whole.tobytes() + tail]
    for at in (32, 33):
        damaged = whole.copy()
        damaged[at] ^= 1
        assert sum(map(len, wire.split(damaged))) == len(whole)
    damaged[32:40] = 0
    assert len(wire.split(damaged)) == 1
