"""What codecs do to latents of multi-head latent attention (MLA): bits and noise, on made-up latents of several kinds.

    python benchmarks/experiments/codec_latents.py

No trained model: latents are made, with one length and weights by dimension as behind an RMS norm. A latent is cut
into pieces of 128 numbers, or is one vector of 512. Noise of logits is that of `manthan.codec.fidelity`, of a layer's
latents alone; of latents, the energy of the error over that of what they differ in from their mean.
"""

import numpy as np

from manthan.codec.base import Section, SectionKind
from manthan.codec.cpu.numbers import as_floats
from manthan.codec.fidelity import Fidelity
from manthan.codec.registry import section_codec

LAYERS, TOKENS, LATENT = 4, 16, 512
BLOCKS = 16
CODECS = ("wht-5x", "k4v4c", "lloyd4", "k4v2-tiles")


def kinds(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Latents [layers, tokens, LATENT] before the norm."""
    shape = (LAYERS, BLOCKS * TOKENS, LATENT)
    normal = rng.standard_normal(shape)
    return {
        "Gaussian": normal,
        "with much in common": normal + 3 * rng.standard_normal((LAYERS, 1, LATENT)),
        "few dimensions are large": normal * np.arange(1, LATENT + 1) ** -0.5,
        "heavy tails": rng.standard_t(3, shape),
    }


def coded(x: np.ndarray, codec: str, piece: int) -> tuple[float, np.ndarray]:
    """Bits a number, and what comes back of bf16 latents, block by block."""
    made, nbytes = section_codec(codec, piece), 0
    section = Section(SectionKind.LATENT, codec, LAYERS, TOKENS, LATENT // piece, piece)
    back = np.empty_like(x)
    for first in range(0, x.shape[1], TOKENS):
        some = slice(first, first + TOKENS)
        pieces = x[:, some].reshape(LAYERS, TOKENS, -1, piece).swapaxes(1, 2)
        codes, places = np.empty(made.max_nbytes(section), np.uint8), np.arange(TOKENS) + first
        size = made.encode(np.ascontiguousarray(pieces), section, places, codes)
        nbytes += size
        back[:, some] = made.decode(codes[:size], section, places).swapaxes(1, 2).reshape(LAYERS, TOKENS, LATENT)
    return 8 * nbytes / x.size, back


def main() -> None:
    rng = np.random.default_rng(0)
    weights = np.exp(0.5 * rng.standard_normal(LATENT))
    print(f"{'latents':26}{'codec':12}{'piece':>6}{'bits':>7}{'of logits':>11}{'of latents':>12}")
    for name, latents in kinds(rng).items():
        normed = latents / np.sqrt(np.square(latents).mean(axis=2, keepdims=True)) * weights
        words = normed.astype(np.float32).view(np.uint32)
        x = ((words + 0x7FFF + ((words >> 16) & 1)) >> 16).astype(np.uint16)
        for codec in CODECS:
            for piece in (128, 512):
                bits, back = coded(x, codec, piece)
                was, now = (as_floats(each)[:, None] for each in (x, back))
                found = Fidelity.of(codec, was, was, (now, now), np.arange(x.shape[1]), None)
                noises = f"{found.logit_noise.mean():11.4f}{found.value_noise.mean():12.4f}"
                print(f"{name:26}{codec:12}{piece:6}{bits:7.2f}{noises}")


if __name__ == "__main__":
    main()
