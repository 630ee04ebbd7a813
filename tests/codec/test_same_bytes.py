"""Every implementation writes the same bytes and reads the same numbers, today's and tomorrow's."""

import numpy as np
import pytest
import xxhash

from manthan.codec.cpu.numpy_codec import NumpyCodec
from manthan.codec.registry import SPECS

HEAD_DIMS = [32, 40, 64, 80, 96, 128, 192, 256, 512]
NAMES = list(SPECS)


def integers(n, head_dim):
    """[n, head_dim] float32: sums of four bytes of splitmix64, exact and the same in any language."""
    with np.errstate(over="ignore"):
        z = (np.arange(n * head_dim, dtype=np.uint64) + 1) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    four = z.view(np.uint8).reshape(n, head_dim, 8)[:, :, 4:].astype(np.float32)
    return (four.sum(2) - 510) * (1 + np.arange(head_dim) % 16 // 15 * 8).astype(np.float32)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", NAMES)
def test_fused_and_plain_agree_bit_for_bit(name, head_dim, vectors):
    pytest.importorskip("numba")
    plain, fused = (NumpyCodec(SPECS[name], head_dim, fused=fused) for fused in (False, True))
    noise = np.random.default_rng(head_dim).standard_normal((3001, head_dim)).astype(np.float32)
    kinds = {"noise": noise, "edges": vectors.edges(head_dim), "integers": integers(33, head_dim)}
    for what, x in {**kinds, **vectors.structured(head_dim)}.items():
        largest = float.fromhex("0x1.fep127")
        for data in (x, vectors.to_bf16(np.clip(x, -largest, largest))):
            for kind in ("key", "value"):
                codes = plain.encode(data, kind)
                assert np.array_equal(codes, fused.encode(data, kind)), what
                for dtype in (np.float32, np.uint16):
                    a, b = (codec.decode(codes, len(x), kind, dtype) for codec in (plain, fused))
                    assert np.array_equal(a.view(np.uint8), b.view(np.uint8)), what


@pytest.mark.parametrize("n", [1, 2, 31, 32, 33, 255, 256, 257])
def test_a_vectors_codes_do_not_depend_on_its_neighbours(n, make, vectors):
    codec = make("lloyd3", 64)
    x = vectors.structured(64, 300)["heavy tails"]
    planes = codec.encode(x)[608:].reshape(300, 24)
    some = codec.encode(x[:n])
    assert np.array_equal(some[-(-2 * n // 16) * 16 :][: n * 24].reshape(n, 24), planes[:n])


GOLDEN = {
    ("lloyd3", 64): ["c1d30408ac2e4e0d", "606823268abc02ea"],
    ("lloyd3", 80): ["5674398549b42a30", "4e9c22e328f0d74f"],
    ("lloyd3", 128): ["991bc5975f3c0e25", "148de8b03a7f12d1"],
    ("lloyd3", 256): ["e4c508cb233f9bd7", "27fa9bb6a7d67d40"],
    ("lloyd4", 64): ["4d8d948616a16ec0", "62ed13b884044103"],
    ("lloyd4", 80): ["6738c45d4769f795", "6228b9d8d731a50a"],
    ("lloyd4", 128): ["2b2d56c8bad6432a", "51f3b89186fe9768"],
    ("lloyd4", 256): ["503289efcee46fcc", "cfbd6f432ea5cf0e"],
    ("k4v3", 64): ["2ae31745f10eda6b", "bc42626fd52932d0"],
    ("k4v3", 80): ["7de70860c38819e8", "1e54d35cafc17c9f"],
    ("k4v3", 128): ["e63498199522cfa5", "85ab7d9a4caf7112"],
    ("k4v3", 256): ["417faa2748709fd3", "3ddaaeedf07cf5b1"],
    ("k3v3", 64): ["965ba360aaf8387f", "ebc812f46658edac"],
    ("k3v3", 80): ["6f9d4e7b6aedd146", "01f6a7d545cea1cd"],
    ("k3v3", 128): ["5d8f7c01b3e37526", "4d8ad55e145ce018"],
    ("k3v3", 256): ["418a451e78d1e5b5", "fcba471fa61997d1"],
    ("k4v2", 64): ["24e87dbbcf46b0ab", "889fc6f8443f11e9"],
    ("k4v2", 80): ["3486bd1e338063d1", "34a48ec05c630b62"],
    ("k4v2", 128): ["6995eb6f8f0c05e0", "dbaaa9e6237b5a1b"],
    ("k4v2", 256): ["1013e5e4a236309a", "53f75dc8d33d8c22"],
    ("lloyd3-unrotated", 64): ["25f2b870f3cf3698", "7864a41c6ed8e3c1"],
    ("lloyd3-unrotated", 80): ["2f0353dbf2716258", "5e0b3a92820dbee2"],
    ("lloyd3-unrotated", 128): ["71dd02203b77a25d", "9ecc3ff10a55f73c"],
    ("lloyd3-unrotated", 256): ["c66edaef78a28c6c", "c4414a0d780e54a3"],
}


@pytest.mark.parametrize(("name", "head_dim"), GOLDEN)
def test_the_format_has_not_changed(name, head_dim, make):
    """Blocks in a store outlive the process that wrote them: a change of these needs a new codec name."""
    codec, x = make(name, head_dim), integers(100, head_dim)
    codes = [codec.encode(x, kind) for kind in ("key", "value")]
    decoded = [codec.decode(c, 100, k, np.uint16) for c, k in zip(codes, ("key", "value"), strict=True)]
    digest = [xxhash.xxh3_64_hexdigest(b"".join(a.tobytes() for a in arrays)) for arrays in (codes, decoded)]
    assert digest == GOLDEN[name, head_dim]
