"""Measurement of a model while it reads a text, for its profile: keys and values of its cache, and their metrics.

Needs torch and Transformers.

A metric tells what errors do to the next tokens' probabilities. For small errors that is Fisher's information: the
mean of g g^T over tokens, where g is the gradient of the log-probability of the model's own prediction in the keys and
values of a prefix (Amari, 1998). It tells layers, keys and values apart well, and single directions with noise. It is
therefore mixed, half and half and of the same size in each layer, with facts that need no gradient:

- for keys, the queries: RoPE turns pairs of numbers by the distance of query and key, so that over all distances both
  numbers of a pair weigh the queries' mean energy in it;
- for values, the output projection: W^T W of the part of its matrix W that takes a head.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.utils import logging

from manthan.codec.base import Positions
from manthan.codec.calibration import SINKS, ProfileBuilder
from manthan.codec.errors import ProfileError
from manthan.codec.profile import ProfileInfo
from manthan.codec.rope import Rope

PIECE = 2048
"""Tokens of a piece of text."""
ASKED = 4
"""The last quarter of a piece asks its prefix: gradients are of its tokens' log-probabilities."""
DRAWS = 2
"""Tokens drawn at each place, for a gradient each."""
NAME = "manthan_calibration"
OUTPUTS = ("o_proj", "out_proj", "dense")
"""Names of the output projection of attention, [hidden, query heads * head_dim]."""

Doubles = npt.NDArray[np.float64]


class ModelReader:
    """Model in bf16, or on a CPU in float32. Raises ProfileError if it cannot be calibrated."""

    def __init__(self, model: str, device: str | None = None) -> None:
        self._name = model
        logging.disable_progress_bar()
        self._device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        dtype = torch.float32 if self._device == "cpu" else torch.bfloat16
        try:
            self._config = AutoConfig.from_pretrained(model).get_text_config(decoder=True)
            loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        except (OSError, ValueError) as error:
            said = str(error).strip().splitlines()[0]
            raise ProfileError(f"{model} cannot be loaded by Transformers: {said}") from None
        self._model = loaded.eval().to(self._device).requires_grad_(False)

    def info(self, metric: str, text: str) -> ProfileInfo:
        """Facts of the profile. text: sha256 of the text."""
        config = self._config
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        rope = Rope.of_config(config, head_dim)
        return ProfileInfo(self._name, config.num_hidden_layers, kv_heads, head_dim, rope, metric, text)

    def pieces(self, text: str, tokens: int) -> list[list[int]]:
        """Cut the first `tokens` tokens of a text into pieces of PIECE at most. Raises ProfileError for none."""
        longest = getattr(self._config, "max_position_embeddings", None) or PIECE
        try:
            tokenizer = AutoTokenizer.from_pretrained(self._name)
        except (OSError, ValueError) as error:
            said = str(error).strip().splitlines()[0]
            raise ProfileError(f"{self._name} has no tokenizer that Transformers can load: {said}") from None
        ids = tokenizer(text, add_special_tokens=False).input_ids[:tokens]
        begin = tokenizer("").input_ids
        length = min(PIECE, longest) - len(begin)
        made = [begin + ids[at : at + length] for at in range(0, len(ids), length)]
        whole = [piece for piece in made if len(piece) >= length // 2]
        if not whole:
            raise ProfileError(f"the text has {len(ids)} tokens, and calibrating takes {length // 2} at least.")
        return whole

    def read(self, builder: ProfileBuilder, pieces: Sequence[list[int]], weigh: bool, step: Callable[[], None]) -> None:
        """Add the keys and values of all pieces, and their metrics if `weigh`. Call `step` after each piece."""
        info = self.info("", "")
        weights = [_Weights(info) for _ in range(info.layers)]
        with _seen(self._model, info) as seen:
            for number, piece in enumerate(pieces):
                layers = self._read(builder, piece)
                if weigh:
                    self._feel(weights, piece, layers, number)
                step()
        if weigh:
            for layer, attention in seen.items():
                builder.weigh(layer, *weights[layer].with_directions(attention.keys(), attention.values()))

    @torch.no_grad()
    def _read(self, builder: ProfileBuilder, ids: list[int]) -> list[Any]:
        """Add the keys and values of a piece. Returns the layers of the cache."""
        cache: Any = DynamicCache(config=self._config)
        self._model(torch.tensor([ids], device=self._device), past_key_values=cache, logits_to_keep=1)
        if not all(type(layer) is DynamicLayer for layer in cache.layers):
            raise ProfileError(
                f"{self._name} cannot be calibrated: its cache is not keys and values of all tokens in all layers."
            )
        for layer, found in enumerate(cache.layers):
            builder.add(layer, _numpy(found.keys[0]), _numpy(found.values[0]), np.arange(len(ids)))
        return list(cache.layers)

    def _feel(self, weights: Sequence["_Weights"], ids: list[int], layers: Sequence[Any], seed: int) -> None:
        """Add the gradients of the last tokens' probabilities in the keys and values of the others.

        The first tokens are left out: they weigh more than all others together, and are exact.
        """
        cut, cache, leaves = len(ids) - len(ids) // ASKED, DynamicCache(config=self._config), []
        for number, layer in enumerate(layers):
            prefix = [x[:, :, :cut].detach().requires_grad_() for x in (layer.keys, layer.values)]
            leaves += prefix
            cache.update(prefix[0], prefix[1], number)
        logits = self._model(torch.tensor([ids[cut:]], device=self._device), past_key_values=cache).logits[0]
        told = logits.float().log_softmax(-1)
        drawing = torch.Generator(self._device).manual_seed(seed)
        for draw in range(DRAWS):
            tokens = torch.multinomial(told.detach().exp(), 1, generator=drawing)
            said = told.gather(-1, tokens).sum()
            found = torch.autograd.grad(said, leaves, retain_graph=draw < DRAWS - 1)
            for weight, keys, values in zip(weights, found[::2], found[1::2], strict=True):
                weight.add(_numpy(keys[0, :, SINKS:]), _numpy(values[0, :, SINKS:]), np.arange(SINKS, cut))


class _Weights:
    """Fisher's information in a layer's keys, before RoPE, and values, [C, C] each."""

    def __init__(self, info: ProfileInfo) -> None:
        size = info.heads * info.head_dim
        self._rope = replace(info.rope, scale=1 / info.rope.scale) if info.rope else None
        self._keys, self._values = np.zeros((size, size)), np.zeros((size, size))

    def add(self, keys: npt.NDArray[np.float32], values: npt.NDArray[np.float32], positions: Positions) -> None:
        """Add gradients, [heads, tokens, head_dim], in the cache's numbers at these places."""
        if self._rope is not None:
            keys = self._rope.turn_back(keys, positions)
        for total, x in ((self._keys, keys), (self._values, values)):
            rows = x.transpose(1, 0, 2).reshape(x.shape[1], -1).astype(np.float64)
            total += rows.T @ rows

    def with_directions(self, keys: Doubles, values: Doubles) -> tuple[Doubles, Doubles]:
        """Mix half of it with half of these, scaled to the same size."""
        mixed = [
            (fisher + known * (np.trace(fisher) / np.trace(known))) / 2
            for fisher, known in ((self._keys, keys), (self._values, values))
        ]
        return mixed[0], mixed[1]


class _Attention:
    """Attention of a layer. energy: of its queries, [query heads, head_dim]."""

    def __init__(self, module: Any, info: ProfileInfo) -> None:
        self._module, self._info = module, info
        self.energy: Any = 0.0

    def see(self, queries: Any) -> None:
        """Add queries, [1, query heads, tokens, head_dim], behind RoPE."""
        self.energy = self.energy + queries[0].detach().float().square().sum(1)

    def keys(self) -> Doubles:
        """Metric of keys, [C, C], diagonal."""
        info = self._info
        energy = self.energy.double().cpu().numpy().reshape(info.heads, -1, info.head_dim).sum(1)
        if info.rope is not None:
            first, second = info.rope.pairs
            energy[first] = energy[second] = (energy[first] + energy[second]) / 2
        return np.diag(energy.ravel())

    def values(self) -> Doubles:
        """Metric of values, [C, C], of each head by itself; the identity for an unknown output projection."""
        info = self._info
        size = info.heads * info.head_dim
        weight = next((getattr(self._module, name).weight for name in OUTPUTS if hasattr(self._module, name)), None)
        if weight is None or weight.shape[1] % size:
            return np.eye(size)
        heads = weight.double().cpu().numpy().reshape(len(weight), info.heads, -1, info.head_dim)
        made = np.zeros((info.heads, info.head_dim, info.heads, info.head_dim))
        for head in range(info.heads):
            made[head, :, head] = np.einsum("ogd,oge->de", heads[:, head], heads[:, head])
        return made.reshape(size, size)


@contextmanager
def _seen(model: Any, info: ProfileInfo) -> Iterator[dict[int, _Attention]]:
    """Watch the model's attention, by layer."""
    seen: dict[int, _Attention] = {}

    def attend(module: Any, query: Any, key: Any, value: Any, *rest: Any, **named: Any) -> Any:
        seen.setdefault(module.layer_idx, _Attention(module, info)).see(query)
        return sdpa_attention_forward(module, query, key, value, *rest, **named)

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        yield seen
    finally:
        model.set_attn_implementation(before)


def _numpy(x: Any) -> npt.NDArray[np.float32]:
    made: npt.NDArray[np.float32] = x.detach().float().cpu().numpy()
    return made
