"""Exact copies: what is cut into parts is what is put together again, or nothing is."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from manthan.codec import exact, wire

HEADER = wire.BlockHeader("lloyd3", b"k" * 32, b"f" * 16, layers=3, heads=2, tokens=16, head_dim=64)


def copy(itemsize: int = 2) -> tuple[np.ndarray, list[np.ndarray]]:
    """Any numbers, and the parts of their copy."""
    numbers = np.random.default_rng(itemsize).integers(0, 256, exact.exact_nbytes(HEADER, itemsize), np.uint8)
    return numbers, exact.split(HEADER, numbers)


@pytest.mark.parametrize(("itemsize", "parts"), [(2, 5), (4, 10)])
def test_parts_are_as_large_as_encoded_blocks_and_hold_everything(itemsize: int, parts: int) -> None:
    numbers, made = copy(itemsize)
    assert len(made) == exact.exact_parts(HEADER, itemsize) == parts
    assert {part.nbytes for part in made} == {wire.block_nbytes(HEADER)}
    assert np.array_equal(exact.join(HEADER, made, numbers.nbytes), numbers)
    for key, part in zip(exact.part_keys(HEADER.key, parts), made, strict=True):
        assert wire.parse(part, key=key).header == replace(HEADER, key=key)


def test_the_model_in_benchmarks_has_six() -> None:
    large = wire.BlockHeader("lloyd3", b"", b"f" * 16, layers=36, heads=8, tokens=16, head_dim=128)
    assert exact.exact_parts(large, 2) == 6


def changed(parts: list[np.ndarray], at: int, byte: int) -> list[np.ndarray]:
    parts = [part.copy() for part in parts]
    parts[at][byte] ^= 1
    return parts


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (lambda parts: changed(parts, 4, 5), "version"),
        (lambda parts: changed(parts, 2, 1000), "checksum"),
        (lambda parts: changed(parts, 4, -1), "checksum"),
        (lambda parts: [parts[1], parts[0], *parts[2:]], "key"),
        (lambda parts: [*parts[:4], parts[4][:-1]], "truncated"),
    ],
)
def test_parts_that_are_not_as_they_were_are_refused(damage: Any, cause: str) -> None:
    numbers, parts = copy()
    with pytest.raises(wire.WireError) as error:
        exact.join(HEADER, damage(parts), numbers.nbytes)
    assert error.value.cause == cause


def test_parts_of_another_model_or_shape_are_refused() -> None:
    numbers, parts = copy()
    for other, cause in (
        (replace(HEADER, fingerprint=b"g" * 16), "fingerprint"),
        (replace(HEADER, layers=2, heads=3), "size"),
        (replace(HEADER, key=b"l" * 32), "key"),
    ):
        with pytest.raises(wire.WireError) as error:
            exact.join(other, parts, numbers.nbytes)
        assert error.value.cause == cause


def test_codes_are_no_part_and_a_part_is_no_codes() -> None:
    _, parts = copy()
    codes = wire.open_block(HEADER).seal()
    with pytest.raises(wire.KeyMismatchError):
        exact.join(HEADER, [codes, *parts[1:]], 1)
    with pytest.raises(wire.KeyMismatchError):
        wire.parse(parts[0], key=HEADER.key)
