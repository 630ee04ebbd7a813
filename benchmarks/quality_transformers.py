"""Quality without an engine: the KV cache of a prefix is replaced by what the codec gives back, and the model goes on.

Blocks are encoded one by one as the engine does it, vectors in the order [layers, heads, tokens].
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.utils import logging

from manthan.benchmarks.quality_pieces import Piece
from manthan.benchmarks.quality_scores import Figures
from manthan.benchmarks.quality_settings import EXACT, RECOMPUTED, QualityError, Setting, Shape
from manthan.codec import Codec, Kind, get_codec

KV = tuple[NDArray[np.uint16], NDArray[np.uint16]]
"""Keys and values, bf16 as its bits: [layers, heads, tokens, head_dim]."""


class Reader:
    """The model in bf16, on the GPU where there is one."""

    def __init__(self, model: str, shape: Shape, block_size: int) -> None:
        self._name, self._shape, self._block_size = model, shape, block_size
        device = "cuda" if torch.cuda.is_available() else "cpu"
        logging.disable_progress_bar()
        try:
            loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        except (OSError, ValueError) as error:
            raise QualityError(f"{model} cannot be loaded by Transformers: {str(error).splitlines()[0]}") from None
        self._model = loaded.eval().to(device)

    @torch.inference_mode()
    def measure(self, pieces: Sequence[Piece], settings: Sequence[Setting], step: Callable[[], None]) -> dict[str, Any]:
        """{name of the setting: {"pieces": figures of each, "cosines": [K, V] of each}}; step: called after each."""
        found: dict[str, Any] = {name: {"pieces": []} for name in (EXACT, RECOMPUTED)}
        found |= {setting.name: {"pieces": [], "cosines": []} for setting in settings}
        for piece in pieces:
            cache = self._prefix(piece)
            exact = self._go_on(piece, copy.deepcopy(cache))
            found[EXACT]["pieces"].append(self._figures(piece, exact, exact))
            found[RECOMPUTED]["pieces"].append(self._figures(piece, exact, self._in_one_go(piece)))
            for setting, changed, cosines in self._compressed(cache, settings):
                found[setting.name]["pieces"].append(self._figures(piece, exact, self._go_on(piece, changed)))
                found[setting.name]["cosines"].append(cosines)
                step()
        return found

    def _tensor(self, tokens: list[int]) -> torch.Tensor:
        return torch.tensor([tokens], device=self._model.device)

    def _prefix(self, piece: Piece) -> DynamicCache:
        cache = self._model(self._tensor(piece.prefix), use_cache=True, logits_to_keep=1).past_key_values
        layers = getattr(cache, "layers", [])
        shape = (1, self._shape.heads, len(piece.prefix), self._shape.head_dim)
        if len(layers) != self._shape.layers or not all(
            type(layer) is DynamicLayer and layer.keys.shape == layer.values.shape == shape for layer in layers
        ):
            raise QualityError(
                f"{self._name} cannot be measured: its cache in Transformers is not keys and values of all tokens in "
                "all layers."
            )
        return cache

    def _go_on(self, piece: Piece, cache: DynamicCache) -> torch.Tensor:
        """Log-probabilities [scored tokens, vocabulary] after a prefix with this cache, which is used up."""
        logits = self._model(self._tensor(piece.rest[:-1]), past_key_values=cache).logits[0]
        return logits.float().log_softmax(-1)

    def _in_one_go(self, piece: Piece) -> torch.Tensor:
        scored = len(piece.rest) - 1
        logits = self._model(self._tensor(piece.tokens[:-1]), use_cache=False, logits_to_keep=scored).logits[0]
        return logits.float().log_softmax(-1)

    def _figures(self, piece: Piece, exact: torch.Tensor, found: torch.Tensor) -> dict[str, float | None]:
        targets = torch.tensor(piece.rest[1:], device=found.device)
        likeliest = found.argmax(-1)
        return Figures.mean(
            nll=-found.gather(-1, targets[:, None])[:, 0].double().cpu().numpy(),
            kl=(exact.exp() * (exact - found)).sum(-1).double().cpu().numpy(),
            same=(likeliest == exact.argmax(-1)).cpu().numpy(),
            right=(likeliest == targets).cpu().numpy(),
            values=piece.values,
        )._asdict()

    def _compressed(
        self, cache: DynamicCache, settings: Sequence[Setting]
    ) -> Iterator[tuple[Setting, DynamicCache, list[float]]]:
        """Each setting with a cache of its own, and the mean cosine of keys and of values with the exact ones."""
        exact = (_bits(cache, "keys"), _bits(cache, "values"))
        for name in dict.fromkeys(setting.codec for setting in settings):
            decoded = through_codec(get_codec(name, self._shape.head_dim), exact, self._block_size)
            for setting in (setting for setting in settings if setting.codec == name):
                counts = setting.exact_tokens(exact[0].shape[2] // self._block_size, self._block_size)
                is_exact = (np.arange(self._block_size) < counts[:, None]).reshape(-1, 1)
                keys, values = (
                    np.where(is_exact, original, coded) for original, coded in zip(exact, decoded, strict=True)
                )
                cosines = [_cosine(original, kept) for original, kept in zip(exact, (keys, values), strict=True)]
                yield setting, self._with(cache, keys, values), cosines

    def _with(self, cache: DynamicCache, keys: NDArray[np.uint16], values: NDArray[np.uint16]) -> DynamicCache:
        cache = copy.deepcopy(cache)
        for layer, k, v in zip(cache.layers, keys, values, strict=True):
            layer.keys.copy_(_tensor(k)[None])
            layer.values.copy_(_tensor(v)[None])
        return cache


def through_codec(codec: Codec, kv: KV, block_size: int) -> KV:
    """Encoded and decoded, block by block."""
    decoded = tuple(np.empty_like(x) for x in kv)
    kinds: tuple[Kind, ...] = ("key", "value")
    for x, y, kind in zip(kv, decoded, kinds, strict=True):
        for start in range(0, x.shape[2], block_size):
            block = x[:, :, start : start + block_size]
            vectors = np.ascontiguousarray(block).reshape(-1, x.shape[-1])
            codes = codec.encode(vectors, kind)
            y[:, :, start : start + block_size] = codec.decode(codes, len(vectors), kind, np.uint16).reshape(
                block.shape
            )
    return decoded[0], decoded[1]


def _bits(cache: DynamicCache, which: str) -> NDArray[np.uint16]:
    stacked = torch.stack([getattr(layer, which)[0] for layer in cache.layers])
    return stacked.cpu().contiguous().view(torch.uint16).numpy()


def _tensor(bits: NDArray[np.uint16]) -> torch.Tensor:
    return torch.from_numpy(bits).view(torch.bfloat16)


def _cosine(x: NDArray[np.uint16], y: NDArray[np.uint16]) -> float:
    """Mean over all vectors."""
    a, b = _tensor(x).float(), _tensor(np.ascontiguousarray(y)).float()
    return float(torch.nn.functional.cosine_similarity(a, b, dim=-1).mean())
