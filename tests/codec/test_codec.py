"""What the codec promises of numbers: accuracy, sizes, edges. Each test runs in plain numpy and fused."""

import numpy as np
import pytest

from manthan.codec import NonFiniteError, get_codec

HEAD_DIMS = [32, 40, 64, 80, 96, 128, 192, 256, 512]
NAMES = ["k3v3", "k4v2", "lloyd3", "k4v3", "lloyd4", "lloyd3-unrotated"]
LARGEST = float.fromhex("0x1.fep127")


def roundtrip(codec, x, kind="key"):
    return codec.decode(codec.encode(x, kind), len(x), kind, x.dtype)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("name", "value_bits"), [("k4v3", 3), ("k4v2", 2)])
def test_sizes(name, value_bits, head_dim, make):
    codec = make(name, head_dim)
    assert (codec.bits("key"), codec.bits("value")) == (4, value_bits)
    for n in (0, 1, 7, 8, 33):
        scales = -(-2 * n // 16) * 16
        for kind in ("key", "value"):
            assert codec.encoded_nbytes(n, kind) == scales + -(-n * codec.bits(kind) * head_dim // 8 // 16) * 16
            assert codec.encode(np.ones((n, head_dim), np.float32), kind).shape == (codec.encoded_nbytes(n, kind),)


def test_a_vector_of_128_takes_50_bytes():
    codec = get_codec("lloyd3", 128)
    assert codec.encoded_nbytes(1600) == 1600 * 50
    assert codec.ratio == pytest.approx(256 / 50)


def test_four_and_two_bits_take_as_much_as_three_and_three():
    three, mixed = get_codec("lloyd3", 128), get_codec("k4v2", 128)
    assert sum(mixed.encoded_nbytes(1600, kind) for kind in ("key", "value")) == 2 * three.encoded_nbytes(1600)
    assert mixed.ratio == three.ratio


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(
    ("name", "kind", "gaussian"),
    [
        ("lloyd3", "key", 0.03455),
        ("k3v3", "value", 0.03455),
        ("lloyd4", "key", 0.009497),
        ("k4v2", "key", 0.009497),
        ("k4v2", "value", 0.1175),
    ],
)
def test_structured_vectors_fare_as_gaussian_ones_would(name, kind, gaussian, head_dim, make, vectors):
    """The cosine that the quantizer's error on N(0, 1) gives, within 0.001 at 3 and 4 bits for few large outliers."""
    for what, x in vectors.structured(head_dim, 2048).items():
        slack = (0.001 if head_dim >= 64 else 0.004) * (1 if gaussian < 0.1 else 5)
        assert vectors.cosine(x, roundtrip(make(name, head_dim), x, kind)).mean() > np.sqrt(1 - gaussian) - slack, what


def test_three_bits_keep_a_cosine_of_0_983(make, vectors):
    x = np.concatenate(list(vectors.structured(128, 2048).values()))
    assert vectors.cosine(x, roundtrip(make("lloyd3", 128), x)).mean() >= 0.983


def test_without_rotation_outliers_are_lost(make, vectors):
    x = vectors.structured(128)["outlier channels"]
    assert vectors.cosine(x, roundtrip(make("lloyd3-unrotated", 128), x)).mean() < 0.9


@pytest.mark.parametrize("kind", ["key", "value"])
@pytest.mark.parametrize("name", NAMES)
def test_the_scale_is_the_least_squares_or_the_unbiased_one(name, kind, make):
    """No other scale comes closer; or the error is orthogonal to the vector. Within the scale's rounding to bf16."""
    codec = make(name, 96)
    x = np.random.default_rng(0).standard_normal((200, 96)).astype(np.float32)
    y = roundtrip(codec, x, kind).astype(np.float64)
    of = x if codec.spec.unbiased else y
    assert (x * y).sum(1) / (of * of).sum(1) == pytest.approx(np.ones(200), abs=2**-8)


def test_unbiased_inner_products_are_right_on_average(make):
    """With vectors that resemble the stored ones, as the queries of a sharp attention head do."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((20_000, 128)).astype(np.float32)
    like = x + 0.5 * rng.standard_normal(x.shape)
    share = {name: (like * roundtrip(make(name, 128), x, "value")).sum() / (like * x).sum() for name in NAMES}
    assert share["k3v3"] == pytest.approx(1, abs=1e-3)
    assert share["k4v2"] == pytest.approx(1, abs=1e-3)
    assert share["lloyd3"] == pytest.approx(1 - 0.03455, abs=3e-3)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("head_dim", [96, 128])
def test_decoding_follows_the_format(name, head_dim, make):
    """Against a decoder written from the format's description alone, in float64."""
    from manthan.codec.tables.lloyd_max import lloyd_max
    from manthan.codec.tables.rotation import block_sizes, sign

    codec = make(name, head_dim)
    x = np.random.default_rng(0).standard_normal((21, head_dim)).astype(np.float32)
    for kind in ("key", "value"):
        bits = codec.bits(kind)
        buf = codec.encode(x, kind)
        scales = (buf[: 2 * 21].view("<u2").astype(np.uint32) << 16).view(np.float32)
        planes = buf[48 : 48 + 21 * bits * head_dim // 8].reshape(21, bits, head_dim // 8)
        expected = np.zeros((21, head_dim))
        for v in range(21):
            for i in range(head_dim):
                digits = [int(planes[v, p, i // 8]) >> i % 8 & 1 for p in range(bits)]
                index = int("".join(map(str, digits[1:])), 2)
                expected[v, i] = (-1) ** digits[0] * lloyd_max(bits).levels[index]
        if codec.spec.rotated:
            start = 0
            for size in block_sizes(head_dim):
                parity = [[(-1) ** (i & j).bit_count() for j in range(size)] for i in range(size)]
                part = slice(start, start + size)
                expected[:, part] = expected[:, part] @ np.array(parity) / np.sqrt(size)
                start += size
            expected *= [sign(i) for i in range(head_dim)]
        expected *= scales[:, None]
        assert codec.decode(buf, 21, kind) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_bf16_in_and_out(name, make, vectors):
    codec = make(name, 128)
    bits = vectors.to_bf16(np.random.default_rng(0).standard_normal((300, 128)))
    codes = codec.encode(bits)
    assert np.array_equal(codes, codec.encode(vectors.from_bf16(bits)))
    decoded = codec.decode(codes, 300, dtype=np.uint16)
    assert decoded.dtype == np.uint16
    assert np.array_equal(decoded, vectors.to_bf16(codec.decode(codes, 300)))


@pytest.mark.parametrize("kind", ["key", "value"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", NAMES)
def test_edges_stay_finite(name, head_dim, kind, make, vectors):
    x = vectors.edges(head_dim)
    codec = make(name, head_dim)
    for y in (
        roundtrip(codec, x, kind),
        vectors.from_bf16(roundtrip(codec, vectors.to_bf16(np.clip(x, -LARGEST, LARGEST)), kind)),
    ):
        assert np.isfinite(y).all()
        assert np.abs(y).max() <= LARGEST


@pytest.mark.parametrize("kind", ["key", "value"])
@pytest.mark.parametrize("name", NAMES)
def test_zeros_decode_to_exact_zeros(name, kind, make):
    codec = make(name, 64)
    x = np.zeros((5, 64), np.float32)
    x[1] = -0.0
    assert not roundtrip(codec, x, kind).view(np.uint32).any()
    assert not roundtrip(codec, np.zeros((5, 64), np.uint16), kind).any()


@pytest.mark.parametrize("head_dim", [32, 64, 128, 256, 512])
def test_one_hot_vectors_survive(head_dim, make, vectors):
    x = np.eye(head_dim, dtype=np.float32) * -3
    y = roundtrip(make("lloyd3", head_dim), x)
    assert vectors.cosine(x, y).min() > 0.999
    assert np.abs(y - x).max() < 0.02


@pytest.mark.parametrize("exponent", [-125, -60, 0, 60, 100, 120])
def test_accuracy_does_not_depend_on_magnitude(exponent, make, vectors):
    x = np.random.default_rng(0).standard_normal((100, 128)).astype(np.float32)
    codec = make("lloyd3", 128)
    scaled = roundtrip(codec, np.ldexp(x, exponent).astype(np.float32))
    if exponent > -120:
        assert np.array_equal(scaled, np.ldexp(roundtrip(codec, x), exponent))
    assert vectors.cosine(np.ldexp(x, exponent), scaled).min() > 0.97


def test_denormals_survive_to_the_end_of_bf16(make, vectors):
    signs = np.sign(np.random.default_rng(0).standard_normal((100, 128)))
    codec = make("lloyd3", 128)
    decoded = roundtrip(codec, (signs * 2.0**-128).astype(np.float32)).astype(np.float64)
    assert vectors.cosine(signs, decoded * 2.0**128).min() > 0.97
    assert not roundtrip(codec, (signs * 2.0**-145).astype(np.float32)).any()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [(0, 0), (5, 127), (4999, 64)])
def test_encode_refuses_what_is_not_finite(value, at, make, vectors):
    codec = make("lloyd3", 128)
    x = np.ones((5000, 128), np.float32)
    x[at] = value
    x[-1, 0] = np.inf
    for data in (x, vectors.to_bf16(np.where(np.isnan(x), np.inf, x)) | np.isnan(x)):
        with pytest.raises(NonFiniteError, match=f"vector {at[0]} holds a NaN or an infinity") as refusal:
            codec.encode(data)
        assert refusal.value.index == at[0]


@pytest.mark.parametrize("scale", [0x7F80, 0xFF80, 0x7FC1])
@pytest.mark.parametrize("at", [0, 39, 4999])
def test_decode_refuses_a_scale_that_is_not_finite(scale, at, make):
    codec = make("lloyd3", 64)
    codes = codec.encode(np.ones((5000, 64), np.float32))
    codes[:10000].view("<u2")[at] = scale
    with pytest.raises(NonFiniteError, match=f"the scale of vector {at} is not finite") as refusal:
        codec.decode(codes, 5000)
    assert refusal.value.index == at


def test_no_vectors(make):
    codec = make("lloyd3", 64)
    codes = codec.encode(np.empty((0, 64), np.float32))
    assert codes.size == 0
    assert codec.decode(codes, 0, dtype=np.uint16).shape == (0, 64)


def test_memory_order_does_not_matter(make):
    codec = make("lloyd3", 64)
    x = np.random.default_rng(0).standard_normal((50, 64)).astype(np.float32)
    expected = codec.encode(x)
    wide = np.zeros((100, 130), np.float32)
    wide[::2, 1:129:2] = x
    unaligned = np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(np.float32).reshape(x.shape)
    read_only = x.copy()
    read_only.flags.writeable = False
    for same in (wide[::2, 1:129:2], np.asfortranarray(x), x[::-1].copy()[::-1], unaligned, read_only):
        assert np.array_equal(codec.encode(same), expected)


def test_results_go_where_they_are_wanted(make):
    codec = make("lloyd3", 64)
    x = np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32)
    codes, decoded = np.full(codec.encoded_nbytes(5), 255, np.uint8), np.empty((5, 64), np.float32)
    assert codec.encode(x, out=codes) is codes
    assert np.array_equal(codes, codec.encode(x))
    assert codec.decode(codes, 5, out=decoded) is decoded
    assert np.array_equal(decoded, codec.decode(codes, 5))


def test_codes_may_be_read_only_and_unaligned(make):
    codec = make("lloyd3", 64)
    codes = codec.encode(np.random.default_rng(0).standard_normal((9, 64)).astype(np.float32))
    odd = np.frombuffer(b"\0" + codes.tobytes(), np.uint8)[1:]
    assert np.array_equal(codec.decode(odd, 9), codec.decode(codes, 9))
