"""A profile of made-up keys and values, in a blink."""

import numpy as np

from manthan.codec.calibration import SINKS, ProfileBuilder
from manthan.codec.profile import ProfileInfo
from manthan.codec.rope import Rope

HEADS, HEAD_DIM, LAYERS = 2, 32, 3
ROPE = Rope(tuple(10000.0 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)))
SIZE = HEADS * HEAD_DIM


def kv(tokens, seed=0, first=0, rope=ROPE):
    """Keys and values [layers, heads, tokens, head_dim] float32, correlated and with a mean, and their positions."""
    fixed, rng = np.random.default_rng(7), np.random.default_rng(seed)
    positions = np.arange(first, first + tokens)
    made = []
    for kind in range(2):
        mix = fixed.standard_normal((LAYERS, SIZE, SIZE)) * 0.9 ** np.arange(SIZE)[:, None]
        mean = 10 * fixed.standard_normal((LAYERS, 1, SIZE))
        x = rng.laplace(size=(LAYERS, tokens, SIZE)) @ mix + mean
        x = x.reshape(LAYERS, tokens, HEADS, HEAD_DIM).transpose(0, 2, 1, 3).astype(np.float32)
        made.append(rope.turn(x, positions) if rope and kind == 0 else x)
    return made[0], made[1], positions


def built(tokens=1024, *, rope=ROPE, metric=False, ranks=1, model="made-up"):
    info = ProfileInfo(model, LAYERS, HEADS, HEAD_DIM, rope, "fisher" if metric else "none")
    builder = ProfileBuilder(info, ranks)
    for start in range(0, tokens, 128):
        keys, values, positions = kv(128, seed=start, first=start, rope=rope)
        for layer in range(LAYERS):
            builder.add(layer, positions, keys[layer], values[layer])
        if metric:
            builder.weigh_tokens(
                [np.exp(values[layer, 0, SINKS if start == 0 else 0 :, 0] / 9) for layer in range(LAYERS)]
            )
    if metric:
        for layer in range(LAYERS):
            builder.weigh(layer, np.diag(np.geomspace(1, 100, SIZE)), np.eye(SIZE))
    return builder.finish()


LATENT = 512


def latents(tokens, seed=0):
    """Latents behind an RMS norm, [layers, pieces, tokens, numbers of a piece] float32: few directions, and a mean."""
    fixed, rng = np.random.default_rng(8), np.random.default_rng(seed)
    mix = fixed.standard_normal((LAYERS, LATENT, LATENT)) * 0.98 ** np.arange(LATENT)[:, None]
    x = rng.standard_normal((LAYERS, tokens, LATENT)) @ mix + 10 * fixed.standard_normal((LAYERS, 1, LATENT))
    x /= np.sqrt(np.square(x).mean(2, keepdims=True))
    return x.reshape(LAYERS, tokens, -1, LATENT // 4).swapaxes(1, 2).astype(np.float32)


def built_of_latents(tokens=2048, ranks=1):
    builder = ProfileBuilder(ProfileInfo("made-up", LAYERS, 4, LATENT // 4, None, "none", latent=LATENT), ranks)
    x = latents(tokens)
    for layer in range(LAYERS):
        builder.add(layer, np.arange(tokens), x[layer])
    return builder.finish()
