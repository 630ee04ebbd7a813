"""Codecs of recurrent states: what they lose is bounded, and what they must not touch they do not."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manthan.codec.base import Dtype
from manthan.codec.block import BlockFormat, BlockShape
from manthan.codec.cpu.state import STATE_CODECS, StateCodec, StateLayout, StatePart
from manthan.codec.errors import NonFiniteError, ShapeError, SizeError, WireError
from manthan.codec.model import ModelFacts

LAYERS, CONV, HEADS, ROWS, ROW, PADDING = 3, 96, 2, 8, 16, 64
STATE = 4 * HEADS * ROWS * ROW
LAYOUT = StateLayout(LAYERS, CONV + STATE + PADDING, (StatePart(CONV), StatePart(STATE, ROW, Dtype.FLOAT32)))
SHAPE = BlockShape(1, LAYERS * LAYOUT.layer_nbytes // 32, 4, 8, Dtype.UINT8)
KEY = b"k" * 32
NOTHING = np.empty(SHAPE.value_numbers, np.uint8)
WIDTHS = {"bf16": 2.0**-8, "int8": 1 / 254}


def form(option: str, layout: StateLayout = LAYOUT, shape: BlockShape = SHAPE) -> BlockFormat:
    return BlockFormat(STATE_CODECS[option], shape, b"f" * 16, facts=ModelFacts(state=layout))


def block(numbers: np.ndarray, layout: StateLayout = LAYOUT, shape: BlockShape = SHAPE) -> np.ndarray:
    """Block of states [layers, heads, rows, row], with noise for all else."""
    found = np.random.default_rng(1).integers(0, 256, (layout.layers, layout.layer_nbytes), np.uint8)
    plain = numbers.reshape(layout.layers, -1).view(np.uint8)
    found[:, CONV : CONV + plain.shape[1]] = plain
    return found.reshape(shape.numbers)


def states(seed: int = 0) -> np.ndarray:
    """Rows of very different sizes."""
    chance = np.random.default_rng(seed)
    sizes = 10.0 ** chance.uniform(-6, 6, (LAYERS, HEADS, ROWS, 1))
    return (chance.standard_normal((LAYERS, HEADS, ROWS, ROW)) * sizes).astype(np.float32)


def back(format: BlockFormat, raw: np.ndarray) -> np.ndarray:
    codes = format.encode(raw, NOTHING, key=KEY, first_token=0, exact=0)
    assert codes.nbytes <= format.max_nbytes(0)
    return format.decode(codes, key=KEY)[0].reshape(LAYERS, LAYOUT.layer_nbytes)


@given(seed=st.integers(0, 1000))
@pytest.mark.parametrize("option", STATE_CODECS)
def test_errors_are_bounded_and_the_convolution_is_exact(option: str, seed: int) -> None:
    raw, numbers = block(states(seed)), states(seed)
    found = back(form(option), raw)
    assert np.array_equal(found[:, :CONV], raw.reshape(LAYERS, -1)[:, :CONV])
    assert not found[:, CONV + STATE :].any()
    decoded = np.ascontiguousarray(found[:, CONV : CONV + STATE]).view(np.float32).reshape(numbers.shape)
    limit = np.abs(numbers) if option == "bf16" else np.abs(numbers).max(axis=-1, keepdims=True)
    assert (np.abs(decoded - numbers) <= 1.001 * WIDTHS[option] * limit).all()
    assert not np.array_equal(decoded, numbers)


@pytest.mark.parametrize(("option", "times"), [("bf16", 2), ("int8", 4 / (1 + 4 / ROW))])
def test_a_state_takes_a_half_or_a_quarter(option: str, times: float) -> None:
    format = form(option)
    codes = format.encode(block(states()), NOTHING, key=KEY, first_token=0, exact=0)
    assert codes.nbytes == format.header(KEY, 0, 0).nbytes + math.ceil(LAYERS * (CONV + STATE / times) / 16) * 16
    exact = BlockFormat("exact", SHAPE, b"f" * 16)
    assert exact.encode(block(states()), NOTHING, key=KEY, first_token=0, exact=0).nbytes > codes.nbytes


@pytest.mark.parametrize("option", STATE_CODECS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_refused(option: str, bad: float) -> None:
    numbers = states()
    numbers[1, 1, 3, 5] = bad
    with pytest.raises(NonFiniteError):
        form(option).encode(block(numbers), NOTHING, key=KEY, first_token=0, exact=0)


@pytest.mark.parametrize(("option", "is_exact"), [("bf16", True), ("int8", False)])
def test_a_state_of_two_bytes_a_number_is_only_made_int8(option: str, is_exact: bool) -> None:
    half = StateLayout(LAYERS, LAYOUT.layer_nbytes, (StatePart(CONV), StatePart(STATE // 2, ROW, Dtype.FLOAT16)))
    raw = block(np.random.default_rng(2).standard_normal((LAYERS, STATE // 2 // 2)).astype(np.float16))
    found = back(form(option, half), raw)[:, : CONV + STATE // 2]
    assert np.array_equal(found, raw.reshape(LAYERS, -1)[:, : CONV + STATE // 2]) == is_exact


def test_blocks_of_another_layout_or_length_are_refused() -> None:
    format = form("int8")
    codes = format.encode(block(states()), NOTHING, key=KEY, first_token=0, exact=0)
    with pytest.raises(WireError):
        form("bf16").decode(codes, key=KEY)
    other = StateLayout(LAYERS, LAYOUT.layer_nbytes, (StatePart(CONV), StatePart(STATE // 2, ROW, Dtype.FLOAT32)))
    with pytest.raises(SizeError):
        form("int8", other).decode(codes, key=KEY)
    longer = StateLayout(LAYERS, LAYOUT.layer_nbytes * 2, LAYOUT.parts)
    with pytest.raises(ShapeError):
        form("int8", longer).max_nbytes(0)
    [section], raw = format.header(KEY, 0, 0).sections, block(states())
    for layout, found in ((longer, section), (LAYOUT, replace(section, dtype=Dtype.FLOAT16))):
        with pytest.raises(ShapeError):
            StateCodec(section.codec, layout).encode(raw, found, np.arange(4), np.empty(raw.nbytes, np.uint8))
