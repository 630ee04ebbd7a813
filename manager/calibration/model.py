"""Measurement of a model that reads a text, to make a calibrated codec's profile: statistics of KV, and metrics.

The cache has keys and values, or latents (MLA) and RoPE's part of keys. A metric says how much errors in the cache
matter: half of a metric is Fisher's information (Amari, 1998), and half is made without a gradient;
docs/calibration.md says why. The profile is then tried on text that it was not made from, to measure what each lossy
level (a precision of encoded blocks) costs. This module needs torch and Transformers.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.utils import logging

from manthan.codec.base import Numbers, Positions
from manthan.codec.block import piece_dim
from manthan.codec.calibration import SINKS, Doubles, ProfileBuilder, decoded
from manthan.codec.cpu.numbers import as_floats, bf16_bits
from manthan.codec.errors import HeadDimError, ProfileError
from manthan.codec.profile import Profile, ProfileInfo
from manthan.codec.rope import Floats, Rope

PIECE = 2048  # most tokens of a piece of the text. The model reads each piece without the others
ASKED = 4  # gradients are taken of what the model predicts at the tokens of the last 1 / ASKED of a piece
DRAWS = 2  # number of gradients of a piece, each for tokens drawn anew from the model's predictions
MANY = 5  # least number of pieces of which one is held out, if the text has no more
NAME = "manthan_calibration"
OUTPUTS = ("o_proj", "out_proj", "dense")
"""Names of the output projection of attention, [hidden, query heads * head_dim]."""
FROM_LATENTS = "kv_b_proj"  # name of the projection from latents to keys and values, [numbers of all heads, latent]


class ModelReader:
    """Model that reads texts, in bf16 on a GPU and float32 on a CPU. Raises ProfileError if it cannot be loaded."""

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
        """Return facts for the profile. text: sha256 of the text. Raises ProfileError for latents of an unfit size."""
        config = self._config
        if latent := getattr(config, "kv_lora_rank", None):
            try:
                piece = piece_dim(latent)
            except HeadDimError as error:
                raise ProfileError(f"{self._name} cannot be calibrated: {error}") from None
            shape = (config.num_hidden_layers, latent // piece, piece)
            return ProfileInfo(self._name, *shape, None, metric, text, latent=latent)
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        rope = Rope.of_config(config, head_dim)
        return ProfileInfo(self._name, config.num_hidden_layers, kv_heads, head_dim, rope, metric, text)

    def pieces(self, text: str, tokens: int) -> tuple[list[list[int]], list[list[int]]]:
        """Return a text's first `tokens` tokens in pieces, but no short last piece. Raises ProfileError for too few.

        Also return at most one piece to hold out: the next tokens; without these, the last piece of MANY or more.
        """
        longest = getattr(self._config, "max_position_embeddings", None) or PIECE
        try:
            tokenizer = AutoTokenizer.from_pretrained(self._name)
        except (OSError, ValueError) as error:
            said = str(error).strip().splitlines()[0]
            raise ProfileError(f"{self._name} has no tokenizer that Transformers can load: {said}") from None
        ids, begin = tokenizer(text, add_special_tokens=False).input_ids, tokenizer("").input_ids
        length = min(PIECE, longest) - len(begin)

        def cut(run: list[int]) -> list[list[int]]:
            made = [begin + run[at : at + length] for at in range(0, len(run), length)]
            return [piece for piece in made if len(piece) >= length // 2]

        whole, rest = cut(ids[:tokens]), cut(ids[tokens : tokens + length])
        if not whole:
            read = min(tokens, len(ids))
            raise ProfileError(f"the text has {read} tokens, and calibrating takes {length // 2} at least.")
        return (whole[:-1], whole[-1:]) if not rest and len(whole) >= MANY else (whole, rest)

    def read(self, builder: ProfileBuilder, pieces: Sequence[list[int]], weigh: bool, step: Callable[[], None]) -> None:
        """Have the model read pieces. Add caches to the builder; if `weigh`, metrics, too. Call `step` after each."""
        info = self.info("", "")
        weights = [_Weights(info) for _ in range(info.layers)]
        with _seen(self._model) as seen:
            for number, piece in enumerate(pieces):
                layers = self._cache(piece, info)
                for layer, found in enumerate(layers):
                    parts = [_numpy(x[0]) for x in (found.keys, found.values)[: len(info.kinds)]]
                    builder.add(layer, np.arange(len(piece)), *(_heads(x, info) for x in parts))
                if weigh:
                    gradients = self._feel(weights, piece, layers, number)
                    metrics = [each.with_directions(*_directions(*seen[n], info)) for n, each in enumerate(weights)]
                    builder.weigh_tokens(list(map(_energies, gradients, metrics)))
                step()
        if weigh:
            for layer, (module, energy) in seen.items():
                builder.weigh(layer, *weights[layer].with_directions(*_directions(module, energy, info)))

    @torch.no_grad()
    def divergences(self, profile: Profile, ids: list[int]) -> tuple[float, ...]:
        """Return `ProfileInfo.divergences`, measured on a piece of a text. Raises NonFiniteError; OutOfMemoryError.

        The model predicts the tokens of the last 1 / ASKED after decoded KV of the other tokens. From here on the model
        is in float32, unless its weights are quantized: in bf16, any change of the KV also changes roundings.
        """
        if not getattr(self._model, "is_quantized", False):
            self._model.float()
        info, cut = profile.info, len(ids) - len(ids) // ASKED
        layers, kinds = self._cache(ids[:cut], info), len(info.kinds)
        rows = [[_heads(_numpy(x[0]), info) for x in (each.keys, each.values)[:kinds]] for each in layers]
        exact = bf16_bits(np.array(rows).swapaxes(0, 1))

        def predict(bits: Numbers) -> Any:
            prefix = []
            for each, parts in zip(layers, as_floats(bits).swapaxes(0, 1), strict=True):
                own = [torch.from_numpy(_unpieced(x, info))[None].to(each.keys) for x in parts]
                prefix.append([*own, *(each.keys, each.values)[kinds:]])
            return self._predictions(ids[cut:], prefix)

        wanted = predict(exact)
        lossy = decoded(profile, exact[..., SINKS:, :], np.arange(SINKS, cut))
        found = (predict(np.concatenate([exact[..., :SINKS, :], bits], -2)) for bits in lossy)
        return tuple(float((wanted.exp() * (wanted - each)).sum(-1).mean()) for each in found)

    def _predictions(self, ids: list[int], prefix: Sequence[Sequence[Any]]) -> Any:
        """Return log-probabilities [tokens, vocabulary] after a prefix. prefix: the two tensors of each cache layer."""
        cache: Any = DynamicCache(config=self._config)
        for number, parts in enumerate(prefix):
            cache.update(*parts, number)
        logits = self._model(torch.tensor([ids], device=self._device), past_key_values=cache).logits[0]
        return logits.float().log_softmax(-1)

    @torch.no_grad()
    def _cache(self, ids: list[int], info: ProfileInfo) -> list[Any]:
        """Return the layers of the cache of a piece. Transformers stores latents as keys, and RoPE's part as values."""
        cache: Any = DynamicCache(config=self._config)
        self._model(torch.tensor([ids], device=self._device), past_key_values=cache, logits_to_keep=1)
        if not all(type(layer) is DynamicLayer for layer in cache.layers):
            raise ProfileError(
                f"{self._name} cannot be calibrated: its cache is not keys and values of all tokens in all layers."
            )
        if info.latent and any(layer.keys.shape[1::2] != (1, info.latent) for layer in cache.layers):
            raise ProfileError(f"{self._name} cannot be calibrated: Transformers does not cache its latents.")
        return list(cache.layers)

    def _feel(
        self, weights: Sequence["_Weights"], ids: list[int], layers: Sequence[Any], seed: int
    ) -> list[list[list[Floats]]]:
        """Add to `weights` gradients of drawn tokens' log-probabilities with respect to the cache of earlier tokens.

        Return the gradients by layer, draw and kind (keys, values), [tokens, C]. The first SINKS tokens are left out,
        because they outweigh all others, and are kept exact.
        """
        cut, kinds = len(ids) - len(ids) // ASKED, weights[0].kinds
        prefix = [[x[:, :, :cut].detach() for x in (layer.keys, layer.values)] for layer in layers]
        leaves = [x.requires_grad_() for parts in prefix for x in parts[:kinds]]
        told = self._predictions(ids[cut:], prefix)
        drawing = torch.Generator(self._device).manual_seed(seed)
        rows: list[list[list[Floats]]] = [[] for _ in weights]
        for draw in range(DRAWS):
            tokens = torch.multinomial(told.detach().exp(), 1, generator=drawing)
            said = told.gather(-1, tokens).sum()
            found = torch.autograd.grad(said, leaves, retain_graph=draw < DRAWS - 1)
            for number, weight in enumerate(weights):
                parts = [_numpy(x[0, :, SINKS:]) for x in found[number * kinds : (number + 1) * kinds]]
                rows[number].append(weight.add(parts, np.arange(SINKS, cut)))
        return rows


class _Weights:
    """Fisher's information on a layer's keys (before RoPE) and values, or on its latents: a matrix [C, C] of each."""

    def __init__(self, info: ProfileInfo) -> None:
        size = info.heads * info.head_dim
        self._rope = replace(info.rope, scale=1 / info.rope.scale) if info.rope else None
        self.kinds = len(info.kinds)
        self._totals = [np.zeros((size, size)) for _ in range(self.kinds)]

    def add(self, parts: Sequence[Floats], positions: Positions) -> list[Floats]:
        """Add gradients [heads, tokens, head_dim] of each kind, for tokens at `positions`. Returns [tokens, C]."""
        first, *others = parts
        turned_back = first if self._rope is None else self._rope.turn_back(first, positions)
        made = [x.transpose(1, 0, 2).reshape(x.shape[1], -1) for x in (turned_back, *others)]
        for total, rows in zip(self._totals, made, strict=True):
            total += rows.T.astype(np.float64) @ rows.astype(np.float64)
        return made

    def with_directions(self, *known: Doubles) -> list[Doubles]:
        """Return for each kind the mean of Fisher's information and of `known` scaled to the same trace."""
        return [
            (fisher + each * (np.trace(fisher) / np.trace(each))) / 2
            for fisher, each in zip(self._totals, known, strict=True)
        ]


def _directions(module: Any, energy: Any, info: ProfileInfo) -> list[Doubles]:
    """Return metrics of a layer, [C, C], made without a gradient, in the order of `ProfileInfo.kinds`.

    Keys: diagonal, the energy of the queries of each KV head. Values: zero between heads. The metric of values, and of
    latents, is the identity if the attention has no known projection.

    Args:
        module: Attention of the layer.
        energy: Sum over all runs so far of squares of the queries, which RoPE has rotated, [query heads, head_dim].
    """
    if info.latent:
        projection = getattr(module, FROM_LATENTS, None)
        if projection is None or projection.weight.shape[1] != info.latent:
            return [np.eye(info.latent)]
        weight = projection.weight.double()
        return [(weight.T @ weight).cpu().numpy()]
    asked = energy.double().cpu().numpy().reshape(info.heads, -1, info.head_dim).sum(1)
    if info.rope is not None:
        info.rope.average(asked)
    keys, size = np.diag(asked.ravel()), info.heads * info.head_dim
    weight = next((getattr(module, name).weight for name in OUTPUTS if hasattr(module, name)), None)
    if weight is None or weight.shape[1] % size:
        return [keys, np.eye(size)]
    heads = weight.double().reshape(len(weight), info.heads, -1, info.head_dim)
    return [keys, torch.block_diag(*torch.einsum("ohgd,ohge->hde", heads, heads)).cpu().numpy()]


@contextmanager
def _seen(model: Any) -> Iterator[dict[int, tuple[Any, Any]]]:
    """Yield, by layer, `module` and `energy` of `_directions`, while the model runs."""
    seen: dict[int, tuple[Any, Any]] = {}

    def attend(module: Any, query: Any, key: Any, value: Any, *rest: Any, **named: Any) -> Any:
        known = seen[module.layer_idx][1] if module.layer_idx in seen else 0.0
        seen[module.layer_idx] = module, known + query[0].detach().float().square().sum(1)
        return sdpa_attention_forward(module, query, key, value, *rest, **named)

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        yield seen
    finally:
        model.set_attn_implementation(before)


def _energies(draws: Sequence[Sequence[Floats]], metrics: Sequence[Doubles]) -> Doubles:
    """Return for each token the sum over draws and kinds of g M^-1 g, with gradients g [tokens, C] and metrics M."""
    made: Doubles = np.zeros(len(draws[0][0]))
    for kind, metric in enumerate(metrics):
        even = metric + 1e-3 * np.trace(metric) / len(metric) * np.eye(len(metric))
        undone = np.linalg.inv(np.linalg.cholesky(even)).T.astype(np.float32)
        for draw in draws:
            made += np.square(draw[kind] @ undone).sum(1)
    return made


def _heads(x: Floats, info: ProfileInfo) -> Floats:
    """Return latents [1, tokens, numbers] cut into pieces, [heads, tokens, head_dim]; keys and values as they are."""
    return x[0].reshape(len(x[0]), info.heads, info.head_dim).swapaxes(0, 1) if info.latent else x


def _unpieced(x: Floats, info: ProfileInfo) -> Floats:
    """Undo `_heads`."""
    return x.swapaxes(0, 1).reshape(1, x.shape[1], -1) if info.latent else x


def _numpy(x: Any) -> Any:
    return x.detach().float().cpu().numpy()
