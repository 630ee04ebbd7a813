"""What a model computes while it reads a text, for a profile of it: keys and values of its cache, and what they weigh.

Needs torch and Transformers.

What an error in a key or a value costs is measured on the model itself. After a prefix the model goes on, one token is
drawn from each of its predictions, and the gradient g of their log-probability is taken with respect to every key and
value of the prefix: E[g g^T] is the Fisher information, and an error e changes the predictions by e E[g g^T] e^T / 2
nats (Kullback and Leibler), to the second order (Amari, "Natural gradient works efficiently in learning", 1998). In it
is what queries ask of keys, how the output projection weighs values, and how much the layer matters.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.utils import logging

from manthan.codec.calibration import ProfileBuilder
from manthan.codec.errors import ProfileError
from manthan.codec.profile import ProfileInfo
from manthan.codec.rope import Rope

PREFIX, CONTINUATION = 1536, 512
"""Tokens of a piece of text, of which the second part asks and the first is asked."""


class Reader:
    """The model in bf16, or, on a CPU, in float32. Raises ProfileError for one that cannot be calibrated."""

    def __init__(self, model: str, device: str | None = None) -> None:
        self._name = model
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self._device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        dtype = torch.float32 if self._device == "cpu" else torch.bfloat16
        try:
            self._config = AutoConfig.from_pretrained(model).get_text_config(decoder=True)
            self._tokenizer = AutoTokenizer.from_pretrained(model)
            loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        except (OSError, ValueError) as error:
            said = str(error).strip().splitlines()[0]
            raise ProfileError(f"{model} cannot be loaded by Transformers: {said}") from None
        self._model = loaded.eval().to(self._device).requires_grad_(False)

    def info(self, metric: str, text: str) -> ProfileInfo:
        """text: its sha256."""
        config = self._config
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        rope = Rope.of_config(config, head_dim)
        return ProfileInfo(self._name, config.num_hidden_layers, kv_heads, head_dim, rope, metric, text)

    def pieces(self, text: str, tokens: int) -> list[list[int]]:
        """At most so many tokens of it, in pieces of at most PREFIX + CONTINUATION. Raises ProfileError for none."""
        longest = getattr(self._config, "max_position_embeddings", None) or PREFIX + CONTINUATION
        ids = self._tokenizer(text, add_special_tokens=False).input_ids[:tokens]
        begin = self._tokenizer("").input_ids
        length = min(PREFIX + CONTINUATION, longest) - len(begin)
        made = [begin + ids[at : at + length] for at in range(0, len(ids), length)]
        whole = [piece for piece in made if len(piece) >= length // 2]
        if not whole:
            raise ProfileError(f"the text has {len(ids)} tokens, and calibrating takes {length // 2} at least.")
        return whole

    def read(self, builder: ProfileBuilder, pieces: Sequence[list[int]], weigh: bool, step: Callable[[], None]) -> None:
        """Add all pieces' keys and values, and, if so, what they weigh; step: called after each piece."""
        for piece in pieces:
            prefix = len(piece) * PREFIX // (PREFIX + CONTINUATION)
            cache = self._prefix(piece[:prefix])
            for layer, found in enumerate(cache.layers):
                builder.add(layer, _numpy(found.keys[0]), _numpy(found.values[0]), np.arange(prefix))
            if weigh:
                self._weigh(builder, cache, piece[prefix:])
            step()

    @torch.no_grad()
    def _prefix(self, ids: list[int]) -> Any:
        cache = DynamicCache(config=self._config)
        self._model(torch.tensor([ids], device=self._device), past_key_values=cache, logits_to_keep=1)
        if not all(type(layer) is DynamicLayer for layer in cache.layers):
            raise ProfileError(
                f"{self._name} cannot be calibrated: its cache is not keys and values of all tokens in all layers."
            )
        return cache

    def _weigh(self, builder: ProfileBuilder, prefix: Any, ids: list[int]) -> None:
        cache = DynamicCache(config=self._config)
        asked = [
            (layer.keys.detach().requires_grad_(), layer.values.detach().requires_grad_()) for layer in prefix.layers
        ]
        for layer, (keys, values) in enumerate(asked):
            cache.update(keys, values, layer)
        logits = self._model(torch.tensor([ids], device=self._device), past_key_values=cache).logits[0].float()
        drawn = torch.distributions.Categorical(logits=logits.detach()).sample()
        (-torch.nn.functional.cross_entropy(logits, drawn, reduction="sum")).backward()
        for layer, (keys, values) in enumerate(asked):
            builder.weigh(layer, _numpy(keys.grad[0]), _numpy(values.grad[0]), np.arange(keys.shape[2]))


def _numpy(x: Any) -> npt.NDArray[np.float32]:
    made: npt.NDArray[np.float32] = x.detach().float().cpu().numpy()
    return made
