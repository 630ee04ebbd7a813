"""Measure quality with Transformers, not vLLM: decoded (decompressed) KV replaces a prefix's KV, and the model goes on.

The KV is encoded and decoded in full blocks, as in Manthan's cold store. A prefix is computed once for all settings.
"""

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.utils import logging

from manthan.benchmarks.quality_blocks import KV, CodedPrefix
from manthan.benchmarks.quality_pieces import Chat, Piece
from manthan.benchmarks.quality_scores import Figures
from manthan.benchmarks.quality_settings import EXACT, LAST_BIT, RECOMPUTED, QualityError, Setting, Shape
from manthan.codec import BlockFormat, BlockShape, wire
from manthan.codec.model import ModelFacts

if TYPE_CHECKING:
    from manthan.benchmarks.peers.kvtc import KvtcPreset


class Reader:
    """Model in a dtype, "bfloat16" or "float32", on the GPU if there is one. The KV is rounded to bf16."""

    def __init__(self, model: str, shape: Shape, block_size: int, facts: ModelFacts, dtype: str) -> None:
        self._name, self._shape, self._block_size, self._facts = model, shape, block_size, facts
        self._threads = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
        device = "cuda" if torch.cuda.is_available() else "cpu"
        logging.disable_progress_bar()
        try:
            loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        except (OSError, ValueError) as error:
            raise QualityError(f"{model} cannot be loaded by Transformers: {str(error).splitlines()[0]}") from None
        self._model = loaded.eval().to(device)

    @torch.inference_mode()
    def calibrate(self, presets: Sequence["KvtcPreset"], text: Sequence[list[int]]) -> None:
        """Calibrate the presets on the model's KV of a text. text: token ids of each piece."""
        found = [_bits(self._prefix(tokens)) for tokens in text]
        keys, values = (np.concatenate(parts, 2) for parts in zip(*found, strict=True))
        positions = np.concatenate([np.arange(len(tokens)) for tokens in text])
        for preset in presets:
            preset.calibrate(keys, values, positions, self._shape.rope)

    @torch.inference_mode()
    def measure(self, pieces: Sequence[Piece], settings: Sequence[Setting], step: Callable[[], None]) -> dict[str, Any]:
        """Return results by arm: {"pieces": figures of each piece, "cosines": mean cosine of keys and of values of each
        piece, "stored": for each piece, bytes of the prefix and of a session of LONG tokens}.

        Arms EXACT, RECOMPUTED and LAST_BIT have only "pieces"; RECOMPUTED lacks tasks. step: called for each piece and
        setting.
        """
        found: dict[str, Any] = {name: {"pieces": []} for name in (EXACT, RECOMPUTED, LAST_BIT)}
        found |= {setting.name: {"pieces": [], "cosines": [], "stored": []} for setting in settings}
        for piece in pieces:
            kv = _bits(self._prefix(piece.prefix))
            exact = self._go_on(piece, self._cache(kv))
            found[EXACT]["pieces"].append(self._figures(piece, exact, exact))
            if not piece.task:
                found[RECOMPUTED]["pieces"].append(self._figures(piece, exact, self._in_one_go(piece)))
            after = self._go_on(piece, self._cache(_last_bits_changed(kv)))
            found[LAST_BIT]["pieces"].append(self._figures(piece, exact, after))
            for setting, coded in self._coded(kv, settings):
                arm, changed = found[setting.name], coded.kv(setting)
                after = self._go_on(piece, self._cache(changed))
                arm["pieces"].append(self._figures(piece, exact, after))
                arm["cosines"].append([_cosine(x, y) for x, y in zip(kv, changed, strict=True)])
                arm["stored"].append([coded.nbytes(setting), coded.long_nbytes(setting)])
                step()
        return found

    @torch.inference_mode()
    def answer(
        self, chats: Sequence[Chat], settings: Sequence[Setting], tokens: int, step: Callable[[], None]
    ) -> dict[str, Any]:
        """Return results by arm: {"answers": [{"hot": token ids, "later": token ids} of each chat]}.

        hot: greedy answer after the computed prompt, at most `tokens` tokens. later: greedy answer after decoded KV of
        the prompt's full blocks, up to and with the first token that differs from `hot`. Arm EXACT has exact KV. step:
        called for each chat.
        """
        found: dict[str, Any] = {name: {"answers": []} for name in (EXACT, *(setting.name for setting in settings))}
        for chat in chats:
            prefix = chat.prefix(self._block_size)
            keys, values = _bits(self._prefix(chat.prompt[:-1]))
            kv = (keys[:, :, :prefix], values[:, :, :prefix])
            hot = chat.answer(self._generate(chat.prompt[-1:], self._cache((keys, values)), tokens))
            returned = (coded.kv(setting) for setting, coded in self._coded(kv, settings))
            for arm, changed in zip(found.values(), itertools.chain([kv], returned), strict=True):
                later = self._generate(chat.prompt[prefix:], self._cache(changed), len(hot), hot)
                arm["answers"].append({"hot": hot, "later": later})
            step()
        return found

    def _tensor(self, tokens: list[int]) -> torch.Tensor:
        return torch.tensor([tokens], device=self._model.device)

    def _prefix(self, tokens: list[int]) -> DynamicCache:
        cache = self._model(self._tensor(tokens), use_cache=True, logits_to_keep=1).past_key_values
        layers = getattr(cache, "layers", [])
        shape = (1, self._shape.heads, len(tokens), self._shape.head_dim)
        if len(layers) != self._shape.layers or not all(
            type(layer) is DynamicLayer and layer.keys.shape == layer.values.shape == shape for layer in layers
        ):
            raise QualityError(
                f"{self._name} cannot be measured: its cache in Transformers is not keys and values of all tokens in "
                "all layers."
            )
        return cache

    def _go_on(self, piece: Piece, cache: DynamicCache) -> torch.Tensor:
        """Return log-probabilities [scored tokens, vocabulary] after a prefix with this cache. The cache grows."""
        logits = self._model(self._tensor(piece.rest[:-1]), past_key_values=cache).logits[0]
        return logits.float().log_softmax(-1)

    def _in_one_go(self, piece: Piece) -> torch.Tensor:
        scored = len(piece.rest) - 1
        logits = self._model(self._tensor(piece.tokens[:-1]), use_cache=False, logits_to_keep=scored).logits[0]
        return logits.float().log_softmax(-1)

    def _figures(self, piece: Piece, exact: torch.Tensor, found: torch.Tensor) -> dict[str, Any]:
        targets = torch.tensor(piece.rest[1:], device=found.device)
        likeliest = found.argmax(-1)
        return Figures.mean(
            nll=-found.gather(-1, targets[:, None])[:, 0].double().cpu().numpy(),
            kl=(exact.exp() * (exact - found)).sum(-1).double().cpu().numpy(),
            same=(likeliest == exact.argmax(-1)).cpu().numpy(),
            right=(likeliest == targets).cpu().numpy(),
            piece=piece,
        )._asdict()

    def _coded(self, kv: KV, settings: Sequence[Setting]) -> Iterator[tuple[Setting, CodedPrefix]]:
        """Yield each setting with the prefix's encoded blocks, which consecutive settings of a codec share."""
        shape = self._shape
        block = BlockShape(shape.layers, shape.heads, self._block_size, shape.head_dim)
        for codec, group in itertools.groupby(settings, lambda setting: setting.codec):
            form = BlockFormat(codec, block, bytes(wire.FINGERPRINT_LEN), facts=self._facts)
            blocks = CodedPrefix(form, kv, self._threads)
            for setting in group:
                yield setting, blocks

    def _cache(self, kv: KV) -> DynamicCache:
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(zip(*kv, strict=True)):
            cache.update(*(_tensor(x)[None].to(self._model.device, self._model.dtype) for x in (keys, values)), layer)
        return cache

    def _generate(
        self, prompt: list[int], cache: DynamicCache, tokens: int, like: Sequence[int] | None = None
    ) -> list[int]:
        """Return the greedy continuation of a prompt, up to its first difference from `like`. The cache grows."""
        found: list[int] = []
        while len(found) < tokens and (like is None or found == like[: len(found)]):
            logits = self._model(self._tensor(found[-1:] or prompt), past_key_values=cache, logits_to_keep=1).logits
            found.append(int(logits[0, -1].argmax()))
        return found


def _bits(cache: DynamicCache) -> KV:
    """Return the KV of the cache's only sequence, as bits of bf16."""

    def stacked(which: str) -> NDArray[np.uint16]:
        numbers = torch.stack([getattr(layer, which)[0] for layer in cache.layers])
        return numbers.to(torch.bfloat16).cpu().contiguous().view(torch.uint16).numpy()

    return stacked("keys"), stacked("values")


def _last_bits_changed(kv: KV) -> KV:
    """Return the KV with half of all last bits flipped, at random: the least change to a cache."""
    rng = np.random.default_rng(0)
    keys, values = (x ^ rng.integers(0, 2, x.shape, np.uint16) for x in kv)
    return keys, values


def _tensor(bits: NDArray[np.uint16]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(bits)).view(torch.bfloat16)


def _cosine(x: NDArray[np.uint16], y: NDArray[np.uint16]) -> float:
    """Return the mean cosine between vectors of x and y, [..., head_dim] with the bits of bf16."""
    a, b = _tensor(x).float(), _tensor(y).float()
    return float(torch.nn.functional.cosine_similarity(a, b, dim=-1).mean())
