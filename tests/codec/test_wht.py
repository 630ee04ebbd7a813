"""Rotated, rounded to steps, entropy-coded: the format, biases, bounds, refusals."""

import numpy as np
import pytest
import xxhash
from kv import ROPES, as_floats, encoded, error, in_cache, keys, places_from, rope

from manthan.codec import NonFiniteError, ShapeError, get_codec
from manthan.codec.base import Dtype, Section, SectionKind
from manthan.codec.block import BlockFormat, BlockShape
from manthan.codec.cpu import numba_kernels
from manthan.codec.cpu.rans import MOST_DOUBLINGS, START
from manthan.codec.errors import DamagedError, SizeError
from manthan.codec.model import ModelFacts
from manthan.codec.tables.frequencies import family
from manthan.codec.wht import FINER, NAME, PRESETS, TABLES, Parts, WhtCodec, from_bytes

LAYERS, HEADS, TOKENS = 2, 3, 16
DTYPES = [Dtype.BFLOAT16, Dtype.FLOAT16, Dtype.FLOAT32]


def codec_of(head_dim=64, turn=None):
    return WhtCodec(PRESETS[NAME], head_dim, turn)


def section_of(head_dim=64, tokens=TOKENS, dtype=Dtype.FLOAT32, kind=SectionKind.KEYS):
    return Section(kind, NAME, LAYERS, tokens, HEADS, head_dim, dtype)


def roundtrip(codec, x, section, first=0):
    places = places_from(first, section.tokens)
    return codec.decode(encoded(codec, x, section, places), section, places)


# ---- the format


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


# ---- what it is for


@pytest.mark.parametrize(("kind", "limit"), [(SectionKind.KEYS, 0.012), (SectionKind.VALUES, 0.056)])
@pytest.mark.parametrize("tokens", [1, 3, 16, 31, 128])
@pytest.mark.parametrize("head_dim", [40, 64, 80, 96, 128, 256, 504])
def test_a_round_trip_loses_little(head_dim, tokens, kind, limit):
    turn = rope(head_dim)
    for dtype, first in zip(DTYPES, (0, 100_000, 0), strict=True):
        section = section_of(head_dim, tokens, dtype, kind)
        x = in_cache(keys(section, turn, first, bias=2.0), dtype)
        y = roundtrip(codec_of(head_dim, turn), x, section, first)
        assert error(as_floats(x), as_floats(y)) < limit


@pytest.mark.parametrize("turning", ROPES)
@pytest.mark.parametrize("first", [0, 130_000])
def test_a_bias_before_rope_does_little_harm(first, turning):
    turn, section = ROPES[turning](64), section_of()
    codec = codec_of(64, turn)
    plain = roundtrip(codec, keys(section, turn, first), section, first) - keys(section, turn, first)
    x = keys(section, turn, first, bias=40.0)
    biased = roundtrip(codec, x, section, first) - x
    assert (biased**2).sum() < 2.5 * (plain**2).sum()
    without = roundtrip(get_codec("k3v3", 64), x, section, first) - x
    assert (without**2).sum() > 20 * (plain**2).sum()


@pytest.mark.parametrize(("kind", "drift"), [(SectionKind.KEYS, 1.6), (SectionKind.VALUES, 1.2)])
@pytest.mark.parametrize("doublings", [1, 2, MOST_DOUBLINGS])
def test_a_section_that_does_not_fit_doubles_its_steps(doublings, kind, drift, monkeypatch):
    codec, section = codec_of(64, rope(64)), section_of(kind=kind)
    x, calls = keys(section, rope(64)), []
    right = numba_kernels.encode
    monkeypatch.setattr(
        numba_kernels,
        "encode",
        lambda *given: calls.append(given) or (right(*given) if len(calls) > doublings else -1),
    )
    codes = encoded(codec, x, section, places_from(0))
    assert codes[:START].tolist() == [1, doublings, 0, 0]
    whole, once = (np.asarray(given[0], float) for given in (calls[0], calls[-1]))
    assert np.array_equal(once, np.rint(whole / 2**doublings))
    back = codec.decode(codes, section, places_from(0))
    calls.clear()
    again = roundtrip(codec, back, section)
    monkeypatch.undo()
    finer, coarser = (error(x, each) for each in (roundtrip(codec, x, section), back))
    # a whole number that is rounded again is off by (4**d + 2) / 12 of a squared step, and was by 1 / 12 before
    assert finer < coarser <= min(1.1 * (4**doublings + 3) * finer, 1)
    assert error(x, again) < drift * coarser


# ---- refusals


@pytest.mark.parametrize("value", [np.nan, -np.inf, 2.0**40, -(2.0**41)])
@pytest.mark.parametrize("dtype", [Dtype.BFLOAT16, Dtype.FLOAT32])
def test_numbers_that_are_not_finite_or_too_large_are_refused(value, dtype):
    codec, section = codec_of(64, rope(64)), section_of(dtype=dtype)
    x = keys(section)
    x[1, 2, 3, 5] = value
    cached = (x.view(np.uint32) >> 16).astype(np.uint16) if dtype is Dtype.BFLOAT16 else x
    said = rf"vector {(1 * HEADS + 2) * TOKENS + 3} holds a NaN, an infinity or a magnitude from 2\*\*40 on"
    with pytest.raises(NonFiniteError, match=said):
        encoded(codec, cached, section, places_from(0))


def test_sections_of_both_kinds_are_not_taken():
    with pytest.raises(ShapeError, match="a section of kind BOTH holds keys and values"):
        codec_of().max_nbytes(section_of(kind=SectionKind.BOTH))


def test_codes_that_no_encoder_writes_are_refused():
    codec, section = codec_of(64, rope(64)), section_of()
    codes, parts = encoded(codec, keys(section), section, places_from(0)), Parts.of(section)

    def changed(at, *values):
        made = codes.copy()
        made[at : at + len(values)] = values
        return made

    for made, error_class, sentence in (
        (changed(0, 2), DamagedError, "begin with 02000000: 01000000 does"),
        (changed(1, MOST_DOUBLINGS + 1), DamagedError, "begin with 01110000"),
        (changed(2, 1), DamagedError, "begin with 01000100"),
        (changed(parts.tables.start, 200), DamagedError, "index of a table is out of range"),
        (changed(parts.row_steps.start, 0x80, 0x7F), NonFiniteError, "step 0 is negative or too large"),
        (changed(parts.row_steps.start, 0, 0x80), NonFiniteError, "step 0 is negative or too large"),
        (changed(parts.steps.start, 0x80, 0x7F), NonFiniteError, "mean step 0 is negative or too large"),
        (codes[:-1], SizeError, "words of 2 bytes"),
        (codes[:-2], DamagedError, "do not end where they should"),
        (codes[: parts.end - 1], SizeError, "bytes do not encode"),
        (codes[:2], SizeError, "bytes do not encode"),
    ):
        with pytest.raises(error_class, match=sentence):
            codec.decode(made, section, places_from(0))


def test_a_scale_that_is_not_finite_is_refused():
    codec, section = codec_of(64, rope(64)), section_of(kind=SectionKind.VALUES)
    codes, parts = encoded(codec, keys(section), section, places_from(0)), Parts.of(section)
    codes[parts.scales].reshape(-1, 1 + TOKENS)[2, :2] = 240, 240
    assert from_bytes(codes[parts.scales].reshape(-1, 1 + TOKENS))[2, 0] == 0x7F80
    with pytest.raises(NonFiniteError, match="is negative or too large: the block is damaged"):
        codec.decode(codes, section, places_from(0))
