"""A block's form: every number in one section, bit for bit where it is exact, and nothing else is read."""

from dataclasses import replace

import numpy as np
import pytest
from kv import packed

from manthan.codec import NonFiniteError, ShapeError, get_codec, wire
from manthan.codec.base import Dtype, Section, SectionKind
from manthan.codec.block import BlockFormat, BlockShape, sections
from manthan.codec.errors import DtypeError, SizeError, UnknownCodecError, WireError

PRINT = bytes(range(16))
KEY = b"k" * 32
SHAPE = BlockShape(layers=3, heads=2, tokens=16, head_dim=64)
EXACTS = [0, 1, 4, 15, 16]


def numbers(shape, vectors, seed=0):
    """Keys and values in the cache's numbers."""
    x = np.random.default_rng(seed).standard_normal((2, *shape.numbers), np.float32)
    return vectors.to_bf16(x) if shape.dtype is Dtype.BFLOAT16 else x.astype(shape.dtype.numpy)


def encode(form, both, exact=0, first_token=0, key=KEY):
    return form.encode(both[0], both[1], key=key, first_token=first_token, exact=exact)


@pytest.mark.parametrize("exact", range(SHAPE.tokens + 1))
def test_every_number_is_in_one_section(exact):
    covered = np.zeros((2, *SHAPE.numbers), int)
    for section in sections("k3v3", SHAPE, exact):
        which = {SectionKind.KEYS: [0], SectionKind.VALUES: [1], SectionKind.BOTH: [0, 1]}[section.kind]
        layers = slice(section.first_layer, section.first_layer + section.layers)
        tokens = slice(section.first_token, section.first_token + section.tokens)
        covered[which, layers, : section.heads, tokens, : section.head_dim] += 1
        assert section.codec == ("exact" if section.first_token < exact else "k3v3")
        assert section.dtype is SHAPE.dtype
    assert (covered == 1).all()


@pytest.mark.parametrize("exact", [-1, SHAPE.tokens + 1])
def test_more_exact_tokens_than_there_are_cannot_be(exact):
    with pytest.raises(ShapeError, match=f"{exact} exact tokens cannot be: the block has 16"):
        sections("k3v3", SHAPE, exact)


@pytest.mark.parametrize("dtype", [Dtype.BFLOAT16, Dtype.FLOAT16, Dtype.FLOAT32])
@pytest.mark.parametrize("exact", EXACTS)
@pytest.mark.parametrize("name", ["k3v3", "wht-5x", "exact"])
def test_a_block_comes_back(name, exact, dtype, vectors):
    shape = replace(SHAPE, dtype=dtype)
    form, both = BlockFormat(name, shape, PRINT, group=3), numbers(shape, vectors)
    buf = encode(form, both, exact, first_token=160)
    assert len(buf) <= form.max_nbytes(exact)
    assert len(buf) == form.max_nbytes(exact) or form.codes_vary(exact)
    found = wire.parse(buf, key=KEY, fingerprint=PRINT, group=3)
    assert found.header == form.header(KEY, 160, exact)
    assert form.exact_of(found.header) == exact
    codec, places = get_codec(name, 64), np.arange(160 + exact, 160 + shape.tokens)
    kinds = (SectionKind.KEYS, SectionKind.VALUES)
    for kind, x, back in zip(kinds, both, form.decode(buf.tobytes(), key=KEY), strict=True):
        assert (back.shape, back.dtype) == (x.shape, x.dtype)
        assert back[:, :, :exact].tobytes() == x[:, :, :exact].tobytes()
        if name == "exact":
            assert np.array_equal(back, x)
        elif exact < shape.tokens:
            section = Section(kind, name, 3, len(places), 2, 64, dtype, 0, exact)
            codes = np.zeros(codec.max_nbytes(section), np.uint8)
            size = codec.encode(np.ascontiguousarray(x[:, :, exact:]), section, places, codes)
            assert np.array_equal(back[:, :, exact:], codec.decode(codes[:size], section, places))


@pytest.mark.parametrize("exact", EXACTS)
def test_only_codes_mind_what_is_not_finite(exact, vectors):
    form, both = BlockFormat("k3v3", SHAPE, PRINT), numbers(SHAPE, vectors)
    both[:, 2, 1, :exact, 5] = 0x7FC1
    both[:, 0, 0, :exact, 63] = 0xFF80
    keys, values = form.decode(encode(form, both, exact), key=KEY)
    assert np.array_equal(keys[:, :, :exact], both[0][:, :, :exact])
    assert np.array_equal(values[:, :, :exact], both[1][:, :, :exact])
    if exact < SHAPE.tokens:
        both[1, 1, 1, exact, 0] = 0x7F80
        with pytest.raises(NonFiniteError, match="holds a NaN or an infinity"):
            encode(form, both, exact)


def forged(form, exact, change, sizes=None):
    """A block in good order whose header says something else."""
    header = change(form.header(KEY, 0, exact))
    sizes = form.max_sizes(exact) if sizes is None else sizes
    return packed(header, [np.zeros(size, np.uint8) for size in sizes])


def with_section(index, **change):
    def changed(header):
        made = list(header.sections)
        made[index] = replace(made[index], **change)
        return replace(header, sections=tuple(made))

    return changed


FORGED = {
    "none": (4, lambda header: replace(header, sections=()), SizeError, ()),
    "keys twice": (0, lambda header: replace(header, sections=header.sections[:1] * 2), SizeError, None),
    "another order": (0, lambda header: replace(header, sections=header.sections[::-1]), SizeError, None),
    "exact tokens overlap": (4, with_section(0, tokens=5), SizeError, None),
    "too many exact tokens": (16, with_section(0, tokens=17), SizeError, None),
    "layers": (0, with_section(0, layers=2), SizeError, None),
    "heads": (4, with_section(2, heads=1), SizeError, None),
    "dtype": (4, with_section(1, dtype=Dtype.FLOAT16), SizeError, None),
    "kind": (4, with_section(1, kind=SectionKind.STATE), SizeError, None),
    "tokens of the block": (4, lambda header: replace(header, tokens=15), SizeError, None),
    "exact where codes should be": (0, with_section(0, codec="exact"), SizeError, None),
    "codes where exact should be": (4, with_section(0, codec="k3v3"), SizeError, None),
    "another of our codecs": (0, with_section(1, codec="wht-5x"), WireError, None),
    "a codec that nobody has": (0, with_section(1, codec="k9"), WireError, None),
    "payloads traded": (4, lambda header: header, SizeError, (3072 - 16, 2976, 2976)),
    "a payload too long": (0, lambda header: header, SizeError, (4992, 4992)),
}


@pytest.mark.parametrize("what", FORGED)
def test_a_block_of_another_form_is_refused(what):
    exact, change, error, sizes = FORGED[what]
    form = BlockFormat("k3v3", SHAPE, PRINT)
    form.decode(forged(form, exact, lambda header: header), key=KEY)
    with pytest.raises(error) as refusal:
        form.decode(forged(form, exact, change, sizes), key=KEY)
    assert refusal.value.cause == ("size" if error is SizeError else "codec")


@pytest.mark.parametrize(
    ("other", "cause"),
    [
        (BlockFormat("k3v3", SHAPE, b"p" * 16), "fingerprint"),
        (BlockFormat("k3v3", SHAPE, PRINT, group=1), "key"),
        (BlockFormat("wht-5x", SHAPE, PRINT), "codec"),
        (BlockFormat("k3v3", replace(SHAPE, layers=2), PRINT), "size"),
        (BlockFormat("k3v3", replace(SHAPE, tokens=8), PRINT), "size"),
    ],
)
def test_a_block_of_another_format_is_refused(other, cause, vectors):
    buf = encode(BlockFormat("k3v3", SHAPE, PRINT), numbers(SHAPE, vectors))
    with pytest.raises(WireError) as refusal:
        other.decode(buf, key=KEY)
    assert refusal.value.cause == cause
    with pytest.raises(WireError) as refusal:
        BlockFormat("k3v3", SHAPE, PRINT).decode(buf, key=b"another")
    assert refusal.value.cause == "key"


def test_numbers_of_another_block_are_refused(vectors):
    form, both = BlockFormat("k3v3", SHAPE, PRINT), numbers(SHAPE, vectors)
    with pytest.raises(ShapeError, match="are not a block of"):
        encode(form, both[:, :2])
    with pytest.raises(DtypeError, match="float32"):
        encode(form, both.astype(np.float32))
    with pytest.raises(UnknownCodecError, match="did you mean 'k3v3'"):
        BlockFormat("k3v4", SHAPE, PRINT)
