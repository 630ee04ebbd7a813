"""The references of other codecs: what comes back, and in how many bits a number."""

import numpy as np
import pytest

from manthan.benchmarks.peers.formats import FP8, NVFP4
from manthan.benchmarks.peers.kvarn import KVARN
from manthan.benchmarks.peers.kvtc import Kvtc
from manthan.benchmarks.peers.turboquant import TURBOQUANT
from manthan.codec.base import Section, SectionKind

TOKENS, DIM = 128, 64


def tile(seed: int = 0) -> np.ndarray:
    """A head's vectors, channels and tokens of different sizes."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((TOKENS, DIM)) * np.exp(rng.normal(0, 0.5, (TOKENS, 1)))).astype(np.float32)


def noise(x: np.ndarray, y: np.ndarray) -> float:
    return float(np.square(x - y).sum() / np.square(x).sum())


@pytest.mark.parametrize(
    ("peer", "kind", "bits", "least", "most"),
    [
        (KVARN, "key", 4.5, 0.002, 0.012),
        (KVARN, "value", 2.625, 0.05, 0.14),
        (TURBOQUANT[3], "key", 3.5, 0.1, 0.3),
        (TURBOQUANT[3], "value", 3.25, 0.02, 0.05),
        (TURBOQUANT[4], "value", 4.25, 0.005, 0.015),
        (FP8, "key", 8, 0.0005, 0.002),
        (NVFP4, "value", 4.5, 0.005, 0.015),
    ],
)
def test_what_comes_back_and_its_size(peer, kind, bits, least, most) -> None:
    x = tile()
    codes = peer.encode(x, kind)
    assert peer.bits(x, kind) == pytest.approx(bits, abs=0.01)
    assert least < noise(x, peer.decode(codes, kind, x.shape)) < most
    assert not peer.decode(peer.encode(0 * x, kind), kind, x.shape).any()


def test_keys_of_turboquant_have_unbiased_inner_products() -> None:
    """The residual's signs take away what the quantizer alone leaves out."""
    x, like = tile(1), tile(1) + 0.5 * tile(2)
    y = TURBOQUANT[3].decode(TURBOQUANT[3].encode(x, "key"), "key", x.shape)
    assert (like * y).sum() / (like * x).sum() == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("peer", [KVARN, TURBOQUANT[3]])
def test_a_peer_codes_sections(peer) -> None:
    section = Section(SectionKind.BOTH, peer.name, 2, TOKENS, 3, DIM)
    x = (np.random.default_rng(0).standard_normal(section.shape).astype(np.float32).view(np.uint32) >> 16).astype("u2")
    codec, positions = peer.codec(DIM), np.arange(TOKENS)
    out = np.zeros(codec.max_nbytes(section), np.uint8)
    assert codec.encode(x, section, positions, out) == out.size
    back = codec.decode(out, section, positions)
    floats = [(bits.astype(np.uint32) << 16).view(np.float32) for bits in (x, back)]
    assert (back.shape, back.dtype) == (x.shape, x.dtype)
    assert noise(*floats) < 0.2


def test_kvtc_spends_its_bits_where_they_count() -> None:
    rng = np.random.default_rng(0)
    mix = rng.standard_normal((64, 64)) * 0.8 ** np.arange(64)[:, None]
    rows = ((rng.standard_normal((2000, 64)) @ mix) + 5).astype(np.float32)
    coder = Kvtc.calibrated(rows[:1000], 4.0)
    codes = coder.encode(rows[1000:])
    assert sorted(coder.bits, reverse=True) == list(coder.bits)
    assert 8 * len(codes) / rows[1000:].size < 4.1
    assert noise(rows[1000:] - 5, coder.decode(codes, 1000) - 5) < 0.02
    finer = Kvtc.calibrated(rows[:1000], 8.0)
    assert noise(rows[1000:], finer.decode(finer.encode(rows[1000:]), 1000)) < 0.001
