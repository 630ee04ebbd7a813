"""Rotated, rounded to steps, entropy-coded: the format, both implementations, biases, bounds, refusals."""

from dataclasses import replace

import numpy as np
import plain_wht
import pytest
import xxhash
from kv import ROPES, as_floats, error, in_cache, integers, keys, places_from, rope

from manthan.codec import NonFiniteError, get_codec
from manthan.codec.base import Dtype, Section, SectionKind
from manthan.codec.block import BlockFormat, BlockShape
from manthan.codec.cpu.rans import MOST_DOUBLINGS, Coder, Rows, streams_of
from manthan.codec.errors import CodecError, DamagedError, SizeError
from manthan.codec.model import ModelFacts
from manthan.codec.rope import Rope
from manthan.codec.tables.frequencies import family
from manthan.codec.tables.rotation import weights
from manthan.codec.wht import FINER, NAME, PRESETS, START, TABLES, Parts, WhtCodec, from_bytes, halves

LAYERS, HEADS, TOKENS = 2, 3, 16
DTYPES = [Dtype.BFLOAT16, Dtype.FLOAT16, Dtype.FLOAT32]


class PlainCodec(WhtCodec):
    """The oracle: the transform in numpy."""

    def _kernels(self):
        return plain_wht


def codec_of(head_dim=64, turn=None, plain=False):
    return (PlainCodec if plain else WhtCodec)(PRESETS[NAME], head_dim, turn)


def section_of(head_dim=64, tokens=TOKENS, dtype=Dtype.FLOAT32, kind=SectionKind.BOTH, layers=LAYERS):
    return Section(kind, NAME, layers, tokens, HEADS, head_dim, dtype)


def encoded(codec, x, section, first=0):
    """Return codes, which fit their bound though there is more room."""
    out = np.full(2 * codec.max_nbytes(section), 255, np.uint8)
    nbytes = codec.encode(x, section, places_from(first, section.tokens), out)
    assert nbytes <= codec.max_nbytes(section)
    return out[:nbytes]


def roundtrip(codec, x, section, first=0):
    return codec.decode(encoded(codec, x, section, first), section, places_from(first, section.tokens))


# ---- the format


@pytest.mark.parametrize("turning", ["none", "halves", "partial neighbours"])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_decoding_follows_the_format(head_dim, turning):
    """Against a decoder written from the format's description, in float64, but for the entropy coder."""
    turn, section, first = ROPES[turning](head_dim), section_of(head_dim, tokens=5), 1000
    codec = codec_of(head_dim, turn)
    codes = encoded(codec, keys(section, turn, first, bias=10.0), section, first)
    assert codes[:START].tolist() == [1, 0, 0, 0]
    runs, width = LAYERS * HEADS, head_dim // 8
    at, parts = START, []
    for size in (2 * runs, runs * 5 * width, 2 * LAYERS, runs * 6, 2 * runs):
        parts.append(codes[at : at + size].copy())
        at += size
    assert at == Parts.of(section).end
    numbers = 5 * HEADS * head_dim
    layout = Rows(np.full(2 * LAYERS, numbers // 5), np.repeat(parts[4], head_dim), 5, streams_of(numbers))
    q = Coder(family()).read(codes[at:], layout).reshape(2, runs, head_dim, 5)
    bf16 = lambda bits: float((np.array([bits], np.uint32) << 16).view(np.float32)[0])  # noqa: E731

    hadamard = np.zeros((head_dim, head_dim))
    for start, end in ((0, 64), (64, head_dim)):  # 80 = 64 + 16
        parity = [[(i & j).bit_count() % 2 for j in range(end - start)] for i in range(end - start)]
        hadamard[start:end, start:end] = 1 - 2 * np.array(parity).reshape(end - start, end - start)
    cos, sin = (Rope(()) if turn is None else turn).tables(places_from(first, 5))
    pairs, expected = cos.shape[1], np.zeros((2, runs, 5, head_dim))
    for run in range(runs):
        bits = np.unpackbits(parts[1].reshape(runs, 5, width)[run], axis=1, bitorder="little")
        code = np.array([int("".join(map(str, column)), 2) for column in bits[1:].T])
        mean = (-1.0) ** bits[0] * code * bf16(parts[0].view("<u2")[run])
        octave, *scales = parts[3].reshape(runs, 6)[run].astype(int)
        for t in range(5):
            step = bf16(parts[2].view("<u2")[run // HEADS])
            key = hadamard @ (q[0, run, :, t] + np.rint(mean / step)) * weights(head_dim) * step
            a, b = key[:pairs].copy(), key[pairs : 2 * pairs].copy()
            key[:pairs] = a * cos[t] - b * sin[t]
            key[pairs : 2 * pairs] = b * cos[t] + a * sin[t]
            order = halves(turn, head_dim)
            expected[0, run, t, np.arange(head_dim) if order is None else order] = key
            scale = bf16((16 * octave + scales[t]) << 3)
            expected[1, run, t] = hadamard @ q[1, run, :, t] * weights(head_dim) * scale
    found = codec.decode(codes, section, places_from(first, 5)).reshape(expected.shape)
    assert found == pytest.approx(expected, abs=1e-4)


GOLDEN = {
    64: ["3b49a4f97ada863a", "74b88bef76d358a3"],
    80: ["ce19adfc599becd8", "eb415aff7170c5a3"],
    128: ["bd7aa94c6dccc213", "21554d04ce7f67af"],
    256: ["b2759391a8623f05", "109c4fd3ade57bcf"],
}


@pytest.mark.parametrize("head_dim", GOLDEN)
def test_the_format_has_not_changed(head_dim):
    """Blocks in a store outlive the process that wrote them: a change of these needs a new codec name."""
    section = section_of(head_dim, dtype=Dtype.BFLOAT16)
    codec = codec_of(head_dim, rope(head_dim))
    x = (integers(section.shape).view(np.uint32) >> 16).astype(np.uint16)
    codes = encoded(codec, x, section, 48)
    decoded = codec.decode(codes, section, places_from(48))
    assert [xxhash.xxh3_64_hexdigest(a.tobytes()) for a in (codes, decoded)] == GOLDEN[head_dim]


def test_the_tables_have_not_changed():
    assert xxhash.xxh3_64_hexdigest(family()[TABLES].tobytes()) == "909bfc4ab9e1e6b2"


@pytest.mark.parametrize("tokens", [16, 32, 128])
@pytest.mark.parametrize(("name", "ratio"), [(NAME, 4.8), (FINER, 4.0)])
def test_how_much_smaller_than_bf16_it_is(name, ratio, tokens):
    """Gaussian numbers of a model of 30 layers of different width with 3 heads of 64; header and entries counted in."""
    form = BlockFormat(name, BlockShape(30, 3, tokens, 64), bytes(16), facts=ModelFacts(rope(64)))
    x = np.random.default_rng(0).standard_normal((2, 30, 3, tokens, 64), np.float32)
    x *= 2.0 ** (np.arange(30, dtype=np.float32) / 30)[:, None, None, None]
    keys_, values = (x.view(np.uint32) >> 16).astype(np.uint16)
    block = form.encode(keys_, values, key=bytes(32), first_token=0, exact=0)
    assert block.nbytes < 1.01 * keys_.nbytes * 2 / ratio
    assert block.nbytes == pytest.approx(form.expected_nbytes(0), rel=0.02)
    assert block.nbytes <= form.max_nbytes(0)


# ---- both implementations


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "turning"), [(64, "none"), (64, "halves"), (80, "neighbours"), (128, "halves"), (256, "partial")]
)
def test_fused_and_plain_agree_bit_for_bit(head_dim, turning, dtype, vectors):
    turn = ROPES[turning](head_dim)
    plain, fused = (codec_of(head_dim, turn, plain) for plain in (True, False))
    for tokens, first, bias in ((16, 0, 0.0), (1, 7, 40.0), (13, 4100, 300.0), (64, 2**33, 1e-4)):
        section = section_of(head_dim, tokens, dtype)
        x = in_cache(keys(section, turn, first, bias, seed=tokens), dtype, vectors)
        codes = encoded(plain, x, section, first)
        assert np.array_equal(codes, encoded(fused, x, section, first))
        a, b = (codec.decode(codes, section, places_from(first, tokens)) for codec in (plain, fused))
        assert a.dtype == b.dtype == dtype.numpy
        assert a.tobytes() == b.tobytes()


# ---- what it is for


@pytest.mark.parametrize("first", [0, 100_000])
@pytest.mark.parametrize("tokens", [1, 3, 16, 31, 128])
@pytest.mark.parametrize("head_dim", [40, 64, 80, 96, 128, 256, 504])
def test_a_round_trip_loses_little(head_dim, tokens, first, vectors):
    turn = rope(head_dim)
    codec = codec_of(head_dim, turn)
    for dtype in DTYPES:
        section = section_of(head_dim, tokens, dtype)
        x = in_cache(keys(section, turn, first, bias=2.0), dtype, vectors)
        y = roundtrip(codec, x, section, first)
        assert (y.shape, y.dtype) == (section.shape, dtype.numpy)
        for part, limit in ((0, 0.012), (1, 0.056)):
            assert error(as_floats(x[part], vectors), as_floats(y[part], vectors)) < limit


@pytest.mark.parametrize("turning", ROPES)
@pytest.mark.parametrize("first", [0, 130_000])
def test_a_bias_before_rope_does_little_harm(first, turning):
    turn, section = ROPES[turning](64), section_of(kind=SectionKind.KEYS)
    codec = codec_of(64, turn)
    plain = roundtrip(codec, keys(section, turn, first), section, first) - keys(section, turn, first)
    x = keys(section, turn, first, bias=40.0)
    biased = roundtrip(codec, x, section, first) - x
    assert (biased**2).sum() < 2.5 * (plain**2).sum()
    without = roundtrip(get_codec("k3v3", 64), x, section, first) - x
    assert (without**2).sum() > 20 * (plain**2).sum()


def test_float16_stays_within_its_range():
    section = section_of(dtype=Dtype.FLOAT16)
    x = np.full(section.shape, 65504, np.float16)
    x[..., ::7] = -65504
    back = roundtrip(codec_of(64, rope(64)), x, section)
    assert np.isfinite(back).all()
    assert back.max() == 65504


@pytest.mark.parametrize("doublings", [1, 2, MOST_DOUBLINGS])
def test_a_section_that_does_not_fit_doubles_its_steps(doublings, monkeypatch):
    codec, section = codec_of(64, rope(64)), section_of()
    x, calls = keys(section, rope(64)), []
    right = codec._coder.encode
    monkeypatch.setattr(
        codec._coder,
        "encode",
        lambda *given: calls.append(given) or (right(*given) if len(calls) > doublings else None),
    )
    codes = encoded(codec, x, section)
    assert codes[:START].tolist() == [1, doublings, 0, 0]
    whole, once = (np.asarray(given[0], float) for given in (calls[0], calls[-1]))
    assert np.array_equal(once, np.rint(whole / 2**doublings))
    back = codec.decode(codes, section, places_from(0))
    calls.clear()
    again = roundtrip(codec, back, section)
    monkeypatch.undo()
    finer, coarser = (error(x, each) for each in (roundtrip(codec, x, section), back))
    # a whole number that is rounded again is off by (4**d + 2) / 12 of a squared step, and was by 1 / 12 before
    assert finer < coarser < min(1.1 * (4**doublings + 3) * finer, 1)
    assert error(x, again) < 1.2 * coarser


def test_any_numbers_fit_their_bound_with_their_steps():
    codec, section = codec_of(64, rope(64)), section_of()
    rng = np.random.default_rng(0)
    for seed in range(30):
        lengths = 2.0 ** rng.integers(-20, 20, (*section.shape[:4], 1))
        x = rng.standard_normal(section.shape) ** rng.integers(1, 12) * lengths
        x = np.clip(x, -(2.0**39), 2.0**39).astype(np.float32)
        codes = encoded(codec, x, section, seed)
        assert codes[1] == 0
        assert np.isfinite(codec.decode(codes, section, places_from(seed))).all()


# ---- refusals


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 2.0**40, -(2.0**41)])
@pytest.mark.parametrize("dtype", [Dtype.BFLOAT16, Dtype.FLOAT32])
@pytest.mark.parametrize("part", [0, 1])
def test_numbers_that_are_not_finite_or_too_large_are_refused(part, value, dtype):
    codec, section = codec_of(64, rope(64)), section_of()
    x = keys(section)
    x[part, 1, 2, 3, 5] = value
    cached = (x.view(np.uint32) >> 16).astype(np.uint16) if dtype is Dtype.BFLOAT16 else x
    with pytest.raises(NonFiniteError, match=r"holds a NaN, an infinity or a number of 2\*\*40 and more") as refusal:
        encoded(codec, cached, replace(section, dtype=dtype))
    assert refusal.value.index == part * 2 * HEADS * TOKENS + (1 * HEADS + 2) * TOKENS + 3


def test_codes_that_no_encoder_writes_are_refused():
    codec, section = codec_of(64, rope(64)), section_of()
    codes, parts = encoded(codec, keys(section), section), Parts.of(section)

    def changed(at, *values):
        made = codes.copy()
        made[at : at + len(values)] = values
        return made

    for made, error_class, sentence in (
        (changed(0, 2), DamagedError, "begin with 02000000: 01000000 does"),
        (changed(1, MOST_DOUBLINGS + 1), DamagedError, "begin with 01110000"),
        (changed(2, 1), DamagedError, "begin with 01000100"),
        (changed(parts.tables.start, 200), DamagedError, "a table of frequencies has a number"),
        (changed(parts.row_steps.start, 0x80, 0x7F), NonFiniteError, "step 0 is not finite"),
        (changed(parts.row_steps.start, 0, 0x80), NonFiniteError, "step 0 is not finite"),
        (changed(parts.steps.start, 0x80, 0x7F), NonFiniteError, "the mean of run 0 is not finite"),
        (codes[:-1], SizeError, "words of 2 bytes"),
        (codes[:-2], DamagedError, "do not end where they should"),
        (codes[: parts.end - 1], SizeError, "bytes are not the codes of"),
        (codes[:2], SizeError, "bytes are not the codes of"),
    ):
        with pytest.raises(error_class, match=sentence):
            codec.decode(made, section, places_from(0))


def test_a_scale_that_is_not_finite_is_refused():
    codec, section = codec_of(64, rope(64)), section_of(kind=SectionKind.VALUES)
    codes, parts = encoded(codec, keys(section), section), Parts.of(section)
    codes[parts.scales].reshape(-1, 1 + TOKENS)[2, :2] = 240, 240
    assert from_bytes(codes[parts.scales].reshape(-1, 1 + TOKENS))[2, 0] == 0x7F80
    with pytest.raises(NonFiniteError, match="is not finite, or too large: the codes are damaged"):
        codec.decode(codes, section, places_from(0))


def test_damage_is_an_error_or_other_numbers_and_never_a_crash():
    codec, section = codec_of(64, rope(64)), section_of()
    codes, rng, refused = encoded(codec, keys(section), section), np.random.default_rng(0), 0
    for _ in range(200):
        made = codes.copy()
        made[rng.integers(len(made), size=3)] ^= rng.integers(1, 256, 3).astype(np.uint8)
        try:
            assert codec.decode(made, section, places_from(0)).shape == section.shape
        except CodecError:
            refused += 1
    assert refused > 150
