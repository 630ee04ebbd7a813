"""Fidelity of codecs, measured on made-up KV with and without biased keys."""

from dataclasses import replace

import numpy as np
import pytest
from kv import as_floats, to_bf16

from manthan.codec.block import BlockFormat, BlockShape
from manthan.codec.fidelity import (
    LOGIT_NOISE,
    VALUE_NOISE,
    WORST_LOGIT_NOISE,
    Fidelity,
    NothingToMeasureError,
    Sample,
    measure,
)
from manthan.codec.model import ModelFacts
from manthan.codec.rope import Rope

SHAPE = BlockShape(layers=4, heads=2, tokens=32, head_dim=64)
ROPE = Rope(tuple(10000.0 ** (-np.arange(0, 64, 2) / 64)))
SLOW, FAST = (29, 30, 31), (0, 1, 2)


def kv(pairs=(), bias=40.0, blocks=4, layers=range(4), seed=0, shape=SHAPE):
    """Blocks of noise, and of keys with a bias in some pairs of some layers before RoPE."""
    rng = np.random.default_rng(seed)
    numbers = (shape.layers, shape.heads, blocks * shape.tokens, shape.head_dim)
    keys, values = rng.standard_normal((2, *numbers), np.float32)
    for pair in pairs:
        keys[list(layers), :, :, pair] += bias
        keys[list(layers), :, :, pair + 32] -= 0.7 * bias
    keys = ROPE.turn(keys, np.arange(numbers[2]))
    keys, values = to_bf16(keys), to_bf16(values)
    at = [slice(first, first + shape.tokens) for first in range(0, numbers[2], shape.tokens)]
    return [Sample((keys[:, :, some], values[:, :, some]), some.start) for some in at]


def of(codec, samples, rope=ROPE):
    shape = replace(SHAPE, tokens=samples[0].arrays[0].shape[2])
    return measure(BlockFormat(codec, shape, bytes(16), facts=ModelFacts(ROPE)), samples, rope)


# ---- what it says


@pytest.mark.parametrize("codec", ["k3v3", "wht-5x", "wht-4x", "exact"])
def test_without_a_bias_all_codecs_are_faithful(codec):
    found = of(codec, kv())
    assert found.is_faithful
    assert (found.codec, found.tokens) == (codec, 128)


@pytest.mark.parametrize("pairs", [SLOW, FAST])
@pytest.mark.parametrize(("codec", "faithful"), [("k3v3", 0), ("wht-5x", 1), ("wht-4x", 1)])
def test_with_biased_keys_those_that_are_centred_are(codec, faithful, pairs):
    found = of(codec, kv(pairs))
    assert found.is_faithful == bool(faithful)


def test_the_noise_is_what_queries_suffer():
    """A share of 1/100 of the energy of keys' differences is noise of 1/100."""
    rng = np.random.default_rng(1)
    keys, values, noise = rng.standard_normal((3, 2, 3, 512, 64), np.float32)
    found = Fidelity.of("some", keys, values, (keys + noise * 0.1, values + noise * 0.2), np.arange(512), None)
    assert found.logit_noise == pytest.approx(0.01, rel=0.1)
    assert found.value_noise == pytest.approx(0.04, rel=0.1)


def test_one_bad_layer_of_many_is_enough():
    """The worst layer is named, and the average alone would hide it."""
    shape = replace(SHAPE, layers=64)
    samples = kv(SLOW, bias=15.0, layers=[17], shape=shape, blocks=2)
    found = measure(BlockFormat("k3v3", shape, bytes(16)), samples, ROPE)
    assert found.worst_layer == 17
    assert found.logit_noise[17] > WORST_LOGIT_NOISE
    found.logit_noise[:17] = found.logit_noise[18:] = 0
    assert found.logit_noise.mean() < LOGIT_NOISE
    assert not found.is_faithful


def test_bad_values_count_too():
    samples = kv()
    for sample in samples:
        values = as_floats(sample.arrays[1])
        values[..., 5] += 100
        sample.arrays[1][:] = to_bf16(values)
    found = of("k3v3", samples)
    assert found.logit_noise.mean() < LOGIT_NOISE
    assert found.value_noise.max() > VALUE_NOISE
    assert not found.is_faithful


def test_a_number_that_is_none_is_no_small_noise():
    found = of("k3v3", kv())
    assert found.is_faithful
    found.value_noise[1] = np.nan
    assert not found.is_faithful
    assert Fidelity.median([found, of("k3v3", kv())]).is_faithful


# ---- of what it is measured


def test_tokens_that_are_kept_exact_are_not_looked_at():
    samples = kv()
    with_exact = [replace(samples[0], exact=20), *samples[1:]]
    assert of("k3v3", with_exact).tokens == 108
    assert of("k3v3", with_exact).logit_noise.mean() == pytest.approx(of("k3v3", samples).logit_noise.mean(), rel=0.2)
    whole = of("k3v3", [replace(sample, exact=32) for sample in samples])
    assert (whole.tokens, whole.is_faithful) == (128, True)
    assert not whole.logit_noise.any()
    one_whole = of("k3v3", [replace(samples[0], exact=32), *samples[1:]])
    assert one_whole.tokens == 96


def test_nothing_can_be_said_of_tokens_that_are_all_alike():
    [sample] = kv(blocks=1)
    with pytest.raises(NothingToMeasureError, match="only 1 differ from each other"):
        of("k3v3", [Sample((sample.arrays[0] * 0, sample.arrays[1] * 0), 0)])
