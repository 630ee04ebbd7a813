"""Keys less their block's mean before RoPE: the format, both implementations, biases, refusals."""

import importlib.util
from dataclasses import replace

import numpy as np
import pytest
import xxhash

from manthan.codec import NonFiniteError, UnknownCodecError, codec_names, get_codec, section_codec
from manthan.codec.base import Dtype, Section, SectionKind
from manthan.codec.block import BlockFormat, BlockShape
from manthan.codec.centred import Mean, Places, from_bytes, halves, to_bytes
from manthan.codec.cpu.centred import CentredSections
from manthan.codec.errors import SizeError
from manthan.codec.model import ModelFacts
from manthan.codec.registry import CENTRED
from manthan.codec.rope import Rope
from manthan.codec.tables.constants import tables
from manthan.codec.tables.lloyd_max import lloyd_max
from tests.helpers.kv import ROPES, as_floats, error, in_cache, integers, keys, places_from, rope

HEAD_DIMS = [32, 64, 80, 128, 256, 512]
NAMES = list(CENTRED)
LAYERS, HEADS, TOKENS = 2, 3, 16
DTYPES = [Dtype.BFLOAT16, Dtype.FLOAT16, Dtype.FLOAT32]
needs_numba = pytest.mark.skipif(not importlib.util.find_spec("numba"), reason="needs numba")


@pytest.fixture(params=[False, pytest.param(True, marks=needs_numba)], ids=["plain", "fused"])
def fused(request):
    return request.param


def keys_section(head_dim=64, tokens=TOKENS, dtype=Dtype.FLOAT32, name=NAMES[0], kind=SectionKind.KEYS):
    return Section(kind, name, LAYERS, tokens, HEADS, head_dim, dtype)


def encoded(codec, x, section, first=0):
    out = np.full(codec.max_nbytes(section), 255, np.uint8)
    assert codec.encode(x, section, places_from(first, section.tokens), out) == out.size
    return out


def roundtrip(codec, x, section, first=0):
    return codec.decode(encoded(codec, x, section, first), section, places_from(first, section.tokens))


# ---- the format


@pytest.mark.parametrize("turning", ["none", "halves", "partial neighbours"])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_decoding_follows_the_format(head_dim, turning, fused):
    """Against a decoder written from the format's description alone, in float64."""
    turn, section, first = ROPES[turning](head_dim), keys_section(head_dim, tokens=5), 1000
    spec = CENTRED[section.codec]
    codec = CentredSections(spec, head_dim, turn, fused=fused)
    codes = encoded(codec, keys(section, turn, first, bias=10.0), section, first)
    runs, width, levels = LAYERS * HEADS, head_dim // 8, lloyd_max(spec.key_bits).levels
    at, parts = 0, []
    for size in (2 * runs, runs * spec.mean_bits * width, runs * 6, runs * 5 * spec.key_bits * width):
        parts.append(codes[at : at + size])
        at += -(-size // 16) * 16
    assert at == codes.size
    steps = (parts[0].view("<u2").astype(np.uint32) << 16).view(np.float32)
    expected = np.zeros((runs, 5, head_dim))

    def digits(planes, count):
        bits = np.unpackbits(planes.reshape(count, width), axis=1, bitorder="little")
        return (-1.0) ** bits[0], np.array([int("".join(map(str, column)), 2) for column in bits[1:].T])

    hadamard = np.zeros((head_dim, head_dim))
    for start, end in ((0, 64), (64, head_dim)):  # 80 = 64 + 16
        parity = [[(i & j).bit_count() % 2 for j in range(end - start)] for i in range(end - start)]
        hadamard[start:end, start:end] = 1 - 2 * np.array(parity).reshape(end - start, end - start)
    cos, sin = (Rope(()) if turn is None else turn).tables(places_from(first, 5))
    pairs = cos.shape[1]
    for run in range(runs):
        sign, code = digits(parts[1].reshape(runs, -1)[run], spec.mean_bits)
        mean = sign * code * steps[run]
        octave, *scales = parts[2].reshape(runs, 6)[run].astype(int)
        for t in range(5):
            sign, code = digits(parts[3].reshape(runs, 5, -1)[run, t], spec.key_bits)
            bits = np.array([(16 * octave + scales[t]) << 19], np.uint32)
            scale = float(bits.view(np.float32)[0]) if scales[t] else 0.0
            vector = hadamard @ (sign * np.array(levels)[code]) * tables(head_dim, 4, True).weights * scale
            first_half, second_half = mean[:pairs], mean[pairs : 2 * pairs]
            vector[:pairs] += first_half * cos[t] - second_half * sin[t]
            vector[pairs : 2 * pairs] += second_half * cos[t] + first_half * sin[t]
            vector[2 * pairs :] += mean[2 * pairs :]
            order = halves(turn, head_dim)
            expected[run, t, np.arange(head_dim) if order is None else order] = vector
    found = codec.decode(codes, section, places_from(first, 5)).reshape(expected.shape)
    assert found == pytest.approx(expected, abs=1e-4)


GOLDEN = {
    ("k4v2c", 64): ["ae3072e2a630ed6a", "baf9cfdd68d320a7"],
    ("k4v2c", 80): ["231d59d129d62c46", "66a518dc07a1a778"],
    ("k4v2c", 128): ["645f1701093f2152", "3fbc97688903f7fc"],
    ("k4v2c", 256): ["7449cd2faeca6ea3", "bdd1db9aeca6909d"],
    ("k4v4c", 64): ["f74ba25d678c4529", "6b87a29433b2a932"],
    ("k4v4c", 80): ["97264f796decc505", "5d83d2dacc634452"],
    ("k4v4c", 128): ["7cc9f5bac47fe14b", "aae42da1dffd82b5"],
    ("k4v4c", 256): ["b246108f985b654e", "da4466a3e41e95b9"],
}


@pytest.mark.parametrize(("name", "head_dim"), GOLDEN)
def test_the_format_has_not_changed(name, head_dim, fused):
    """Blocks in a store outlive the process that wrote them: a change of these needs a new codec name."""
    section = replace(keys_section(head_dim, name=name), kind=SectionKind.BOTH, dtype=Dtype.BFLOAT16)
    codec = CentredSections(CENTRED[name], head_dim, rope(head_dim), fused=fused)
    x = (integers(section.shape).view(np.uint32) >> 16).astype(np.uint16)
    codes = encoded(codec, x, section, 48)
    decoded = codec.decode(codes, section, places_from(48))
    assert [xxhash.xxh3_64_hexdigest(a.tobytes()) for a in (codes, decoded)] == GOLDEN[name, head_dim]


@pytest.mark.parametrize("tokens", [1, 12, 16, 32])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_sizes(head_dim, tokens):
    """Bits a number: those of the codes, a byte a vector and one a run, and of keys the mean and its step."""
    spec = CENTRED["k4v2c"]
    runs = 1000
    nbytes = [Places.of(spec, kind, runs, tokens, head_dim).nbytes for kind in ("key", "value")]
    numbers = runs * tokens * head_dim
    each = (8 * (tokens + 1)) / (tokens * head_dim)
    key = spec.key_bits + each + spec.mean_bits / tokens + 16 / (tokens * head_dim)
    wanted = [key, spec.value_bits + each]
    assert [8 * n / numbers for n in nbytes] == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("tokens", [16, 32])
def test_it_is_4_8_times_smaller_than_bf16(tokens):
    """Of a model of 30 layers with 3 heads of 64, header and entries counted in."""
    form = BlockFormat("k4v2c", BlockShape(30, 3, tokens, 64), bytes(16))
    assert 2 * 2 * 30 * 3 * tokens * 64 / form.max_nbytes(0) >= 4.8


# ---- both implementations


@needs_numba
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("turning", ROPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", NAMES)
def test_fused_and_plain_agree_bit_for_bit(name, head_dim, turning, dtype, vectors):
    turn = ROPES[turning](head_dim)
    plain, fused = (CentredSections(CENTRED[name], head_dim, turn, fused=fused) for fused in (False, True))
    for tokens, first, bias in ((16, 0, 0.0), (1, 7, 40.0), (13, 4100, 300.0), (64, 2**33, 1e-4)):
        section = keys_section(head_dim, tokens, dtype, name, SectionKind.BOTH)
        x = in_cache(keys(section, turn, first, bias, seed=tokens), dtype, vectors)
        codes = encoded(plain, x, section, first)
        assert np.array_equal(codes, encoded(fused, x, section, first))
        a, b = (codec.decode(codes, section, places_from(first, tokens)) for codec in (plain, fused))
        assert a.dtype == b.dtype == dtype.numpy
        assert a.tobytes() == b.tobytes()


@needs_numba
@pytest.mark.parametrize("turning", ["none", "halves"])
def test_fused_and_plain_agree_on_the_edges(turning, vectors):
    """Zeros, one-hot, denormal, mixed magnitudes, and any codes, also those that no encoder makes."""
    turn = ROPES[turning](64)
    plain, fused = (CentredSections(CENTRED["k4v2c"], 64, turn, fused=fused) for fused in (False, True))
    x = vectors.edges(64)
    x = x[np.abs(x).max(axis=1) < 2.0**100]
    for tokens in (1, 4, len(x)):
        section = Section(SectionKind.KEYS, "k4v2c", len(x) // tokens, tokens, 1, 64, Dtype.FLOAT32)
        part = x[: len(x) // tokens * tokens].reshape(section.shape)
        codes = encoded(plain, part, section)
        assert np.array_equal(codes, encoded(fused, part, section))
        assert np.isfinite(plain.decode(codes, section, places_from(0, tokens))).all()
    section, rng = keys_section(), np.random.default_rng(0)
    places = Places.of(CENTRED["k4v2c"], "key", LAYERS * HEADS, TOKENS, 64)
    for seed in range(50):
        codes = rng.integers(0, 256, plain.max_nbytes(section), np.uint8)
        codes[places.steps].view("<u2")[:] = rng.integers(0, (127 + 102) << 7, LAYERS * HEADS)
        octaves = codes[places.scales].reshape(LAYERS * HEADS, 1 + TOKENS)
        octaves[:, 0] = rng.integers(0, 239, LAYERS * HEADS)
        a, b = (codec.decode(codes, section, places_from(seed)) for codec in (plain, fused))
        assert a.tobytes() == b.tobytes()
        assert np.isfinite(a).all()


def test_a_section_of_both_kinds_is_keys_and_values(fused):
    codec = CentredSections(CENTRED["k4v2c"], 64, rope(64), fused=fused)
    both = keys_section(kind=SectionKind.BOTH)
    x = keys(both)
    parts = [
        encoded(codec, part, replace(both, kind=kind))
        for part, kind in zip(x, (SectionKind.KEYS, SectionKind.VALUES), strict=True)
    ]
    assert np.array_equal(encoded(codec, x, both), np.concatenate(parts))


def test_a_runs_codes_do_not_depend_on_others(fused):
    codec = CentredSections(CENTRED["k4v2c"], 64, rope(64), fused=fused)
    section = keys_section()
    one = replace(section, layers=1, heads=1)
    x = keys(section, bias=5.0)
    together = codec.decode(encoded(codec, x, section, 32), section, places_from(32))
    alone = codec.decode(encoded(codec, x[1:, 2:], one, 32), one, places_from(32))
    assert np.array_equal(together[1:, 2:], alone)


def test_values_are_those_of_the_codec_without_means(fused):
    """But for the scale, whose rounding is all that differs."""
    section = keys_section(kind=SectionKind.VALUES)
    x = keys(section)
    mine = roundtrip(CentredSections(CENTRED["k4v2c"], 64, rope(64), fused=fused), x, section)
    theirs = roundtrip(section_codec("k4v2", 64), x, section)
    assert mine == pytest.approx(theirs, rel=2**-4, abs=1e-6)


# ---- what it is for


@pytest.mark.parametrize("first", [0, 100_000])
@pytest.mark.parametrize("tokens", [1, 3, 16, 31, 64])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_a_round_trip_loses_little(head_dim, tokens, first, fused, vectors):
    turn = rope(head_dim)
    codec = CentredSections(CENTRED["k4v2c"], head_dim, turn, fused=fused)
    for dtype in DTYPES:
        section = keys_section(head_dim, tokens, dtype)
        x = in_cache(keys(section, turn, first, bias=2.0), dtype, vectors)
        y = roundtrip(codec, x, section, first)
        assert (y.shape, y.dtype) == (section.shape, dtype.numpy)
        assert error(as_floats(x, vectors), as_floats(y, vectors)) < 0.013


@pytest.mark.parametrize("turning", ROPES)
@pytest.mark.parametrize("first", [0, 4096, 130_000])
def test_a_bias_before_rope_does_little_harm(first, turning, fused):
    """Forty times what tokens differ by; codes of the keys as they are lose dozens of times more by it."""
    turn = ROPES[turning](64)
    codec, section = CentredSections(CENTRED["k4v2c"], 64, turn, fused=fused), keys_section()
    plain = roundtrip(codec, keys(section, turn, first), section, first) - keys(section, turn, first)
    x = keys(section, turn, first, bias=40.0)
    biased = roundtrip(codec, x, section, first) - x
    assert (biased**2).sum() < 1.5 * (plain**2).sum()
    without = roundtrip(section_codec("k4v2", 64), x, section, first) - x
    assert (without**2).sum() > 30 * (plain**2).sum()


def test_the_mean_is_the_one_before_rope():
    """Pairs that turn fast have none after it, or with another model's RoPE."""
    section, turn = keys_section(), rope(64)
    x = keys(section)
    x[..., 3] += 40
    x = turn.turn(x, places_from(5000))
    right, *others = (
        error(x, roundtrip(CentredSections(CENTRED["k4v2c"], 64, known), x, section, 5000))
        for known in (turn, None, rope(64, interleaved=True))
    )
    assert min(others) > 10 * right


@pytest.mark.parametrize("kind", [SectionKind.KEYS, SectionKind.VALUES])
def test_vectors_of_a_run_may_be_of_any_length(kind, fused):
    """Down to 2**-15 of the longest; what is shorter still comes back as zeros."""
    codec = CentredSections(CENTRED["k4v2c"], 64, rope(64), fused=fused)
    section = keys_section(kind=kind, tokens=12)
    lengths = 2.0 ** -np.arange(0, 24, 2)
    x = (keys(section) * lengths[:, None]).astype(np.float32)
    y = roundtrip(codec, x, section)
    assert np.isfinite(y).all()
    if kind is SectionKind.VALUES:
        for t, length in enumerate(lengths):
            assert error(x[:, :, t], y[:, :, t]) < 0.16 if length >= 2.0**-14 else not y[:, :, t].any()


def test_zeros_decode_to_exact_zeros(fused):
    codec, section = CentredSections(CENTRED["k4v2c"], 64, rope(64), fused=fused), keys_section(kind=SectionKind.BOTH)
    for x in (np.zeros(section.shape, np.float32), -np.zeros(section.shape, np.float32)):
        assert not roundtrip(codec, x, section).view(np.uint32).any()


def test_float16_stays_within_its_range(fused):
    codec = CentredSections(CENTRED["k4v2c"], 64, rope(64), fused=fused)
    section = keys_section(dtype=Dtype.FLOAT16, kind=SectionKind.BOTH)
    x = np.full(section.shape, 65504, np.float16)
    x[..., ::7] = -65504
    back = roundtrip(codec, x, section)
    assert np.isfinite(back).all()
    assert back.max() == 65504


def test_scales_as_bytes():
    exact = np.array([[0x3F80, 0x3F88, 0x4000, 0x0000], [0x7F7F, 0x0001, 0x3F84, 0x7F00]], np.uint16)
    codes = to_bytes(exact)
    assert codes[:, 0].tolist() == [128 - 15, 254 - 15]
    assert from_bytes(codes).tolist() == [[0x3F80, 0x3F88, 0x4000, 0], [0x7F78, 0, 0, 0x7F00]]
    every = np.arange(0x0800, 0x7F78, dtype=np.uint16)[:, None]
    back = from_bytes(to_bytes(every))
    floats, near = ((x.astype(np.uint32) << 16).view(np.float32) for x in (every, back))
    assert (np.abs(near / floats - 1)).max() <= 2**-5


def test_mean_codes_reach_their_ends():
    mean = Mean.of(5)
    assert (mean.top, mean.inverse) == (15, np.float32(1 / 15))


# ---- refusals


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 2.0**100, -(2.0**101)])
@pytest.mark.parametrize("dtype", [Dtype.BFLOAT16, Dtype.FLOAT32])
def test_keys_that_are_not_finite_or_too_large_are_refused(value, dtype, fused, vectors):
    codec, section = CentredSections(CENTRED["k4v2c"], 64, rope(64), fused=fused), keys_section(dtype=dtype)
    x = in_cache(keys(section), dtype, vectors)
    x[1, 2, 3, 5] = in_cache(np.array([value], np.float32), dtype, vectors)[0] if np.isfinite(value) else 0
    if not np.isfinite(value):
        x[1, 2, 3, 5] = np.array([value], np.float32).view(np.uint32)[0] >> 16 if dtype is Dtype.BFLOAT16 else value
    with pytest.raises(NonFiniteError, match="vector 83 holds a NaN, an infinity or a number of 2") as refusal:
        encoded(codec, x, section)
    assert refusal.value.index == (1 * HEADS + 2) * TOKENS + 3


def test_values_that_are_not_finite_are_refused_and_may_be_large(fused):
    codec = CentredSections(CENTRED["k4v2c"], 64, rope(64), fused=fused)
    section = keys_section(kind=SectionKind.VALUES)
    x = keys(section) * np.float32(2.0**120)
    assert error(x / 2.0**120, roundtrip(codec, x, section) / 2.0**120) < 0.16
    x[0, 1, 2, 3] = np.nan
    with pytest.raises(NonFiniteError, match="vector 18 holds"):
        encoded(codec, x, section)


@pytest.mark.parametrize("step", [0x7F80, 0x7FC0, 0xFF80, 0x8000, 0xC000, (127 + 102) << 7])
def test_a_step_that_no_encoder_writes_is_refused(step, fused):
    codec, section = CentredSections(CENTRED["k4v2c"], 64, rope(64), fused=fused), keys_section()
    codes = encoded(codec, keys(section), section)
    codes[: 2 * LAYERS * HEADS].view("<u2")[4] = step
    with pytest.raises(NonFiniteError, match="the mean of run 4 is not finite, or too large") as refusal:
        codec.decode(codes, section, places_from(0))
    assert refusal.value.index == 4


@pytest.mark.parametrize("kind", [SectionKind.KEYS, SectionKind.VALUES])
def test_a_scale_that_is_not_finite_is_refused(kind, fused):
    codec, section = CentredSections(CENTRED["k4v2c"], 64, rope(64), fused=fused), keys_section(kind=kind)
    codes = encoded(codec, keys(section), section)
    places = Places.of(CENTRED["k4v2c"], section.vector_kinds[0], LAYERS * HEADS, TOKENS, 64)
    run = codes[places.scales].reshape(LAYERS * HEADS, 1 + TOKENS)[2]
    run[0], run[1 + 7] = 240, 240
    run[1:8] = np.minimum(run[1:8], 239)
    with pytest.raises(NonFiniteError, match="the scale of vector 39 is not finite"):
        codec.decode(codes, section, places_from(0))


@pytest.mark.parametrize("change", [-16, -1, 1, 16])
def test_codes_of_another_length_are_refused(change, fused):
    codec, section = CentredSections(CENTRED["k4v2c"], 64, rope(64), fused=fused), keys_section()
    codes = np.zeros(codec.max_nbytes(section) + change, np.uint8)
    with pytest.raises(SizeError, match=f"{codes.size} bytes are not"):
        codec.decode(codes, section, places_from(0))


def test_it_is_a_codec_of_sections_alone():
    assert set(NAMES) < set(codec_names())
    with pytest.raises(UnknownCodecError, match="'k4v2c' is not one of single vectors: section_codec makes it"):
        get_codec("k4v2c", 64)


@pytest.mark.parametrize("exact", [0, 4, 16])
def test_whole_blocks_know_where_they_stand(exact, vectors):
    """Places count from the chain's beginning, also behind exact tokens: a bias survives anywhere."""
    form = BlockFormat("k4v2c", BlockShape(LAYERS, HEADS, TOKENS, 64), bytes(16), facts=ModelFacts(rope(64)))
    section = keys_section()
    x = vectors.to_bf16(keys(section, rope(64), 4800, bias=40.0))
    values = vectors.to_bf16(keys(section, seed=1))
    codes = form.encode(x, values, key=b"k", first_token=4800, exact=exact)
    back, _ = form.decode(codes, key=b"k")
    assert np.array_equal(back[:, :, :exact], x[:, :, :exact])
    assert error(vectors.from_bf16(x), vectors.from_bf16(back)) < 1e-3
