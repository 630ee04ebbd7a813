"""The torch backend's checksums against xxhash, on the CPU."""

import numpy as np
import pytest
import xxhash

torch = pytest.importorskip("torch")

from manthan.codec.gpu import torch_codec as torch_backend  # noqa: E402

SIZES = [
    *range(272, 1024, 16),
    *(n * 1024 + 16 * d for n in (1, 2, 3, 5) for d in range(-6, 7)),
    *(n * 64 + 16 * d for n in (33, 100) for d in (-1, 0, 1)),
    51360,
    2**20 + 160,
]


@pytest.mark.parametrize("nbytes", SIZES)
def test_checksums_are_those_of_xxhash(nbytes):
    rows = np.random.default_rng(nbytes).integers(0, 256, (3, nbytes), np.uint8)
    rows[1], rows[2] = 0, 255
    expected = [xxhash.xxh3_64_intdigest(row[:8].tobytes() + row[16:].tobytes()) for row in rows]
    found = torch_backend.checksums(torch.tensor(rows)).numpy()
    assert found.dtype == np.int64
    assert found.view(np.uint64).tolist() == expected


def test_checksums_of_many_blocks():
    rows = np.random.default_rng(1).integers(0, 256, (500, 1392), np.uint8)
    expected = [xxhash.xxh3_64_intdigest(row[:8].tobytes() + row[16:].tobytes()) for row in rows]
    assert torch_backend.checksums(torch.tensor(rows)).numpy().view(np.uint64).tolist() == expected


@pytest.mark.parametrize("nbytes", [256, 1000])
def test_checksums_refuse_other_sizes(nbytes):
    with pytest.raises(AssertionError):
        torch_backend.checksums(torch.zeros((1, nbytes), dtype=torch.uint8))
