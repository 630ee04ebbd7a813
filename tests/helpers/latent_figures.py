"""Sizes of blocks of latents (MLA), and what coding them does to a model's predictions.

Run as a script, it prints a table of the codecs. The model is `latent_model`'s, with latents of few directions: a
profile needs some. A prefix's cache is replaced by what comes back of its blocks, as in `manthan eval quality`.
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from latent_model import INDEX, LATENT, LAYERS, TURNED, VOCAB, make_latent_model
from scaled_latents import V4, V32, quantized
from transformers import AutoModelForCausalLM, DynamicCache

from manthan.codec.base import Dtype
from manthan.codec.block import BlockFormat, BlockShape, Scales, piece_dim
from manthan.codec.calibration import ProfileBuilder
from manthan.codec.cpu.numbers import as_numbers, bf16_bits
from manthan.codec.model import NO_FACTS, ModelFacts
from manthan.codec.profile import Profile
from manthan.codec.registry import needs_profile
from manthan.manager.calibration.model import ModelReader
from manthan.vllm_hooks.memory import packed_shape

BLOCK, SINK = 64, 4
PREFIX, ASKED = 512, 128
HIDDEN, DECAY = 1024, 0.98
"""Numbers of a hidden state, and the ratio of each direction of the latents to the one before: 100 of 512 have 98% of
the energy."""
DEEPSEEK = 61
"""Layers of DeepSeek V3, of which sizes are told."""


class Number(NamedTuple):
    """Kind of numbers in the cache. scales: if tokens have their own."""

    name: str
    dtype: Dtype
    scales: Scales | None = None

    def arrays(self, turned: np.ndarray, pieces: np.ndarray) -> list[np.ndarray]:
        """RoPE's part and latents as blocks have them, of float32 [layers, heads, tokens, numbers]."""
        if self.scales is None:
            return [as_numbers(x.copy(), self.dtype) for x in (turned, pieces)]
        layers, _, tokens, _ = pieces.shape
        latents = pieces.swapaxes(1, 2).reshape(layers, tokens, LATENT)
        (codes, scales), rope = quantized(latents, self.scales.piece), bf16_bits(turned).view(np.uint8)
        codes = codes.reshape(layers, tokens, -1, self.scales.piece).swapaxes(1, 2).copy()
        if self.scales.place:
            exponents = (scales.view(np.uint32) >> 23).astype(np.uint8)
            return [rope, codes, exponents.reshape(self.raw(layers, tokens).numbers)]
        return [np.concatenate([scales.view(np.uint8)[:, None], rope], 3), codes]

    def raw(self, layers: int, tokens: int, index: int = 0) -> BlockShape:
        behind = (self.scales.stride * tokens,) * layers if self.scales and self.scales.place else ()
        return packed_shape(behind + (index * tokens,) * (layers if index else 0), tokens)

    def shape(self, layers: int, tokens: int = BLOCK, index: int = 0) -> BlockShape:
        has_raw = index or (self.scales and self.scales.place)
        dim = TURNED if self.scales is None else self.scales.row - LATENT
        raw = self.raw(layers, tokens, index) if has_raw else None
        return BlockShape(layers, 1, tokens, dim, self.dtype, LATENT, raw, self.scales)


BF16, FP8 = Number("bf16", Dtype.BFLOAT16), Number("fp8", Dtype.FLOAT8_E4M3)
DS_MLA = Number("fp8_ds_mla", Dtype.FLOAT8_E4M3, V32)
STATES = Number("fp8_ds_mla of V4", Dtype.FLOAT8_E4M3, replace(V4, row=LATENT + 2 * TURNED))
"""With scales for 64 numbers, behind all tokens; of latents of this model's size."""


class Arm(NamedTuple):
    """Kind of numbers, codec, and bytes of index keys a token."""

    number: Number
    codec: str
    index: int = 0

    @property
    def name(self) -> str:
        return f"{self.number.name}{' with index' if self.index else ''}, {self.codec}"

    def shape(self, layers: int) -> BlockShape:
        return self.number.shape(layers, index=self.index)


ARMS = [
    *(Arm(BF16, codec) for codec in ("wht-5x", "wht-4x", "klt-5x", "klt-8x", "klt-12x")),
    *(Arm(BF16, codec, INDEX) for codec in ("wht-5x", "klt-8x")),
    Arm(FP8, "wht-5x"),
    Arm(FP8, "wht-5x", INDEX),
    *(Arm(DS_MLA, codec) for codec in ("wht-5x", "wht-4x", "klt-5x", "klt-8x")),
    *(Arm(DS_MLA, codec, INDEX) for codec in ("wht-5x", "klt-8x")),
    *(Arm(STATES, codec) for codec in ("wht-5x", "wht-4x")),
]


class Figure(NamedTuple):
    """Ratio of a block of the model and of one of DeepSeek V3's layers, and KL of the next token in nats.

    same: share of tokens at which the likeliest next one is the same.
    """

    name: str
    ratio: float
    deepseek: float
    kl: float
    same: float


def figures(folder: Path, arms: Sequence[Arm] = ARMS, pieces: int = 4) -> Iterator[Figure]:
    """Measure the arms on a model that is made in this folder. First comes what each kind of fp8 does to bf16."""
    name = make_latent_model(folder, HIDDEN, 1.0, DECAY)
    rng = np.random.default_rng(0)
    often = 1 / np.arange(10, VOCAB)  # as words are, by Zipf
    texts = [rng.choice(np.arange(10, VOCAB), 2048, p=often / often.sum()).tolist() for _ in range(3 + pieces)]
    profile = calibrated(name, texts[:3])
    model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
    found: dict[Arm, list[tuple[float, float, float]]] = {arm: [] for arm in arms}
    numbers = (BF16, FP8, DS_MLA, STATES)
    rounded: dict[Number, list[tuple[float, float]]] = {number: [] for number in numbers[1:]}
    for text in texts[3:]:
        prefix, rest = text[:PREFIX], text[PREFIX : PREFIX + ASKED]
        with torch.no_grad():
            cache = model(torch.tensor([prefix]), use_cache=True, logits_to_keep=1).past_key_values
            kept = in_pieces(cache)
            exact = {
                number: answered(model, rest, number.shape(LAYERS, PREFIX).floats(number.arrays(*kept)))
                for number in numbers
            }
            for number, of_number in rounded.items():
                of_number.append(apart(exact[BF16], exact[number]))
            for arm in arms:
                back, ratio = there_and_back(arm, kept, profile)
                found[arm].append((ratio, *apart(exact[arm.number], answered(model, rest, back))))
    for number, of_number in rounded.items():
        ratio = BF16.shape(1).nbytes / number.shape(1).nbytes
        yield Figure(f"{number.name} instead of bf16", ratio, ratio, *np.mean(of_number, axis=0).tolist())
    for arm, each in found.items():
        ratio, kl, same = np.mean(each, axis=0)
        form = of_arm(arm, DEEPSEEK, None if needs_profile(arm.codec) else profile)
        deepseek = form.shape.nbytes / form.expected_nbytes(0) if form else of_layers(arm, profile)
        yield Figure(arm.name, float(ratio), deepseek, float(kl), float(same))


def calibrated(name: str, texts: Sequence[list[int]]) -> Profile:
    """Profile of the model, which reads these texts."""
    reader = ModelReader(name, "cpu")
    builder = ProfileBuilder(reader.info("fisher", ""))
    reader.read(builder, texts, True, lambda: None)
    return builder.finish()


def of_arm(arm: Arm, layers: int, profile: Profile | None) -> BlockFormat | None:
    """Format of blocks; None without the profile that they need."""
    if needs_profile(arm.codec) and profile is None:
        return None
    facts = ModelFacts(profile=profile) if needs_profile(arm.codec) else NO_FACTS
    return BlockFormat(arm.codec, arm.shape(layers), bytes(16), facts=facts)


def of_layers(arm: Arm, profile: Profile) -> float:
    """Ratio of a block of as many layers as DeepSeek V3 has, each like the average one of the profile's."""
    form = of_arm(arm, LAYERS, profile)
    assert form is not None
    front = form.header(b"", 0, 0).nbytes
    return form.shape.nbytes * DEEPSEEK / LAYERS / (front + (form.expected_nbytes(0) - front) * DEEPSEEK / LAYERS)


def in_pieces(cache: DynamicCache) -> list[np.ndarray]:
    """RoPE's part, and latents in pieces, float32 [layers, heads, tokens, numbers]."""
    latents, turned = (np.stack([getattr(layer, x)[0].numpy() for layer in cache.layers]) for x in ("keys", "values"))
    layers, _, tokens, _ = latents.shape
    return [turned, latents.reshape(layers, tokens, -1, piece_dim(LATENT)).swapaxes(1, 2)]


def answered(model: Any, rest: list[int], kept: Sequence[np.ndarray]) -> torch.Tensor:
    """Log-probabilities of the tokens behind a prefix of which the cache holds these numbers."""
    cache = DynamicCache(config=model.config)
    turned, pieces = kept
    for layer in range(len(turned)):
        latents = pieces[layer].swapaxes(0, 1).reshape(1, 1, PREFIX, LATENT)
        cache.update(torch.from_numpy(latents.copy()), torch.from_numpy(turned[layer][None].copy()), layer)
    found: torch.Tensor = model(torch.tensor([rest]), past_key_values=cache).logits[0].log_softmax(-1)
    return found


def apart(wanted: torch.Tensor, told: torch.Tensor) -> tuple[float, float]:
    """KL of the next token, and share of the same likeliest ones. The first token's scores follow from the prefix."""
    kl = (wanted.exp() * (wanted - told)).sum(-1)[1:].mean()
    return float(kl), float((wanted.argmax(-1) == told.argmax(-1))[1:].float().mean())


def there_and_back(arm: Arm, kept: Sequence[np.ndarray], profile: Profile) -> tuple[Sequence[np.ndarray], float]:
    """Numbers that come back of a prefix's blocks, and the ratio of the blocks behind the first."""
    form = of_arm(arm, len(kept[0]), profile)
    assert form is not None
    made, sizes = [], []
    for at in range(0, PREFIX, BLOCK):
        arrays = arm.number.arrays(*(np.ascontiguousarray(x[:, :, at : at + BLOCK]) for x in kept))
        if arm.index:
            arrays.append(np.zeros(form.shape.opaque.numbers, np.uint8))
        buf = form.encode(*arrays, key=b"", first_token=at, exact=0 if at else SINK)
        sizes.append(len(buf))
        made.append(form.shape.floats(form.decode(buf, key=b"")))
    back = [np.concatenate(parts, axis=2) for parts in zip(*made, strict=True)]
    return back, form.shape.nbytes / float(np.mean(sizes[1:]))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        print("| latents, codec | ratio | ratio of 61 layers | KL | same top 1 |\n|---|---|---|---|---|")
        for each in figures(Path(folder)):
            print(f"| {each.name} | {each.ratio:.2f} | {each.deepseek:.2f} | {each.kl:.4f} | {each.same:.1%} |")


if __name__ == "__main__":
    main()
