"""fp8: the numbers of its bytes, and blocks of them."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from manthan.codec import wire
from manthan.codec.base import Dtype
from manthan.codec.block import BlockFormat, BlockShape
from manthan.codec.cpu.numbers import FORMS, as_floats, as_numbers
from manthan.codec.fidelity import Sample, measure

KINDS = {Dtype.FLOAT8_E4M3: torch.float8_e4m3fn, Dtype.FLOAT8_E5M2: torch.float8_e5m2}
CODES = np.arange(256, dtype=np.uint8)
KEY, PRINT = b"k" * 32, b"f" * 16

kinds = pytest.mark.parametrize("dtype", KINDS)


def as_torch(codes: np.ndarray, dtype: Dtype) -> np.ndarray:
    return torch.from_numpy(codes.copy()).view(KINDS[dtype]).float().numpy()


def block(shape: BlockShape, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values with all exponents that normal numbers have."""
    x = np.random.default_rng(seed).standard_normal((2, *shape.numbers)).astype(np.float32)
    return tuple(as_numbers(x, shape.dtype))


def there_and_back(codec: str, shape: BlockShape, keys: np.ndarray, values: np.ndarray, exact: int = 4) -> tuple:
    """The encoded block, and what it decodes to."""
    format = BlockFormat(codec, shape, PRINT)
    codes = format.encode(keys, values, key=KEY, first_token=64, exact=exact)
    assert len(codes) <= format.max_nbytes(exact)
    return codes, *format.decode(codes, key=KEY)


LATENTS = BlockShape(3, 1, 16, 64, Dtype.FLOAT8_E4M3, latent=512)


def latents(kind: Dtype, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """RoPE's part and latents about a mean, in the layer's scale."""
    rng = np.random.default_rng(seed)
    turned, x = (rng.standard_normal(shape) for shape in (LATENTS.numbers, LATENTS.value_numbers))
    x += 3 * rng.standard_normal((3, 4, 1, 128))
    return tuple(as_numbers((16 * part).astype(np.float32), kind) for part in (turned, x))


@kinds
@pytest.mark.parametrize("exact", [0, 4])
def test_latents_are_coded_and_rope_s_part_is_as_it_was(exact: int, dtype: Dtype) -> None:
    shape = replace(LATENTS, dtype=dtype)
    turned, x = latents(dtype)
    codes, back_turned, back = there_and_back("wht-5x", shape, turned, x, exact)
    assert codecs(codes) == {"exact", "wht-5x"}
    assert codes.size < shape.nbytes / (1.75 if not exact else 1.4)
    assert np.array_equal(turned, back_turned)
    assert np.array_equal(x[:, :, :exact], back[:, :, :exact])
    was, now = as_floats(x, dtype), as_floats(back, dtype)
    noise = np.square(now - was).sum() / np.square(was - was.mean(axis=2, keepdims=True)).sum()
    assert 0 < noise < (0.02 if dtype is Dtype.FLOAT8_E4M3 else 0.03)


def test_latents_with_a_nan_are_kept_as_they_are() -> None:
    turned, x = latents(Dtype.FLOAT8_E4M3)
    x[1, 2, 9, 5] = 0x7F
    codes, back_turned, back = there_and_back("wht-5x", LATENTS, turned, x)
    assert codecs(codes) == {"exact"}
    assert np.array_equal(turned, back_turned)
    assert np.array_equal(x, back)


def codecs(codes: np.ndarray) -> set[str]:
    return {section.codec for section in wire.parse(codes).header.sections}


@kinds
def test_every_byte_is_the_number_that_pytorch_reads(dtype: Dtype) -> None:
    right = as_torch(CODES, dtype)
    assert np.array_equal(as_floats(CODES, dtype), right, equal_nan=True)
    finite = np.isfinite(right)
    assert np.array_equal(as_numbers(right[finite], dtype), CODES[finite])


@kinds
def test_numbers_are_rounded_as_pytorch_rounds_and_kept_within_range(dtype: Dtype) -> None:
    rng, largest = np.random.default_rng(1), np.float32(FORMS[dtype].largest)
    numbers = as_torch(CODES, dtype)
    numbers = np.sort(numbers[np.isfinite(numbers)])
    ties = (numbers[1:] + numbers[:-1]) / 2
    near = [np.nextafter(ties, np.float32(way)) for way in (-np.inf, np.inf)]
    normal = [rng.standard_normal(10_000).astype(np.float32) * np.float32(scale) for scale in (1, 1e-3, 1e-5, 300)]
    x = np.concatenate([ties, *near, *normal, np.array([0, -0.0, 1e30, -1e30, 1e-45], np.float32)])
    right = torch.from_numpy(np.clip(x, -largest, largest)).to(KINDS[dtype]).view(torch.uint8).numpy()
    assert np.array_equal(as_numbers(x, dtype), right)


@kinds
@pytest.mark.parametrize(("codec", "most"), [("k3v3", 0.05), ("wht-4x", 0.03), ("wht-5x", 0.06)])
def test_a_block_comes_back_as_fp8(codec: str, most: float, dtype: Dtype) -> None:
    shape = BlockShape(2, 2, 32, 64, dtype)
    keys, values = block(shape)
    codes, *back = there_and_back(codec, shape, keys, values)
    assert codecs(codes) == {"exact", codec}
    assert len(codes) < 0.65 * 2 * keys.size
    for x, y in zip((keys, values), back, strict=True):
        assert y.dtype == np.uint8
        assert np.array_equal(x[:, :, :4], y[:, :, :4])
        wrong = as_floats(y, dtype) - as_floats(x, dtype)
        assert 0 < np.square(wrong[:, :, 4:]).mean() < most * np.square(as_floats(x, dtype)).mean()


@kinds
@pytest.mark.parametrize(("codec", "tokens", "dim", "bad"), [("wht-5x", 32, 64, True), ("wht-4x", 1, 32, False)])
def test_a_block_that_the_codec_refuses_or_makes_larger_is_kept_as_it_is(
    codec: str, tokens: int, dim: int, bad: bool, dtype: Dtype
) -> None:
    shape = BlockShape(2, 2, tokens, dim, dtype)
    keys, values = block(shape)
    if bad:
        values[1, 1, 20, 3] = 0x7F  # not a number
    codes, *back = there_and_back(codec, shape, keys, values, exact=0)
    assert codecs(codes) == {"exact"}
    assert bad or len(codes) == BlockFormat(codec, shape, PRINT).expected_nbytes(0)  # a mean a token
    assert np.array_equal(np.stack(back), np.stack([keys, values]))


def test_the_guard_sees_numbers_and_not_bytes() -> None:
    shape = BlockShape(2, 2, 32, 64, Dtype.FLOAT8_E4M3)
    keys, values = block(shape)
    assert measure(BlockFormat("wht-5x", shape, PRINT), [Sample((keys, values), 64)], None).is_faithful


@pytest.mark.slow
def test_the_figures_of_exact_fp8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    import fp8_figures

    model, profile = Path(__file__).parents[1] / "data" / "tiny-llama", tmp_path / "profile.safetensors"
    command = [Path(sys.executable).with_name("manthan"), "calibrate", model, "--metric", "none"]
    subprocess.run([*command, "--tokens", "2048", "--out", profile], check=True)
    fp8_figures.main(str(model), str(profile), str(Path(__file__).parents[2] / "docs" / "agents.md"))
    ratios = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines()[-3:]]
    assert all(found > 1.1 for found in ratios)
