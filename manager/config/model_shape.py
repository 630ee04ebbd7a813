"""What the KV of a model takes, in the cache and as codes: told from its config.json, without vLLM or torch."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from manthan.codec import CodecError
from manthan.codec.base import Dtype
from manthan.codec.block import BlockFormat, BlockShape
from manthan.codec.model import NO_FACTS, ModelFacts
from manthan.codec.wire import FINGERPRINT_LEN
from manthan.manager.config.layers import (
    BOTH,
    FULL,
    STATE,
    WINDOW,
    NotToldError,
    States,
    Windows,
    layer_kinds,
    states_of,
)
from manthan.manager.config.model import ConfigError, ManthanConfig
from manthan.manager.stores.arena import room
from manthan.manager.stores.disk.store import usable

CACHE_DTYPES = {
    "auto": Dtype.BFLOAT16,
    "bfloat16": Dtype.BFLOAT16,
    "float16": Dtype.FLOAT16,
    "float32": Dtype.FLOAT32,
    "fp8": Dtype.FLOAT8_E4M3,
    "fp8_e4m3": Dtype.FLOAT8_E4M3,
    "fp8_e5m2": Dtype.FLOAT8_E5M2,
}
"""What vLLM's --kv-cache-dtype may be, where a token's bytes can be told; auto is bf16, or what the model asks for."""
LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
HEADS = ("num_attention_heads", "n_head")
HIDDEN = ("hidden_size", "n_embd")
STATES_ONLY = ("mamba", "mamba2", "falcon_mamba", "rwkv")


class ModelError(ConfigError):
    """A model whose KV cannot be told, or that Manthan does not serve, in one sentence."""


@dataclass(frozen=True)
class ModelShape:
    """Keys and values of a model's layers with full attention: so many layers, KV heads, and numbers of a head. windows
    and states: what the other layers keep.

    latent: of a model with latents (MLA), how many numbers one has; there is one head then, and head_dim is the part of
    the key that RoPE turns. dtype: of the cache's numbers.
    """

    layers: int
    heads: int
    head_dim: int
    latent: int = 0
    dtype: Dtype = Dtype.BFLOAT16
    windows: Windows | None = None
    states: States | None = None

    @property
    def token_nbytes(self) -> int:
        """Bytes of one token's keys and values, or of its latents, in the layers with full attention."""
        numbers = self.head_dim + self.latent if self.latent else 2 * self.heads * self.head_dim
        return self.dtype.numpy.itemsize * self.layers * numbers

    @property
    def window_shape(self) -> "ModelShape":
        """The layers with windows as if they had full attention."""
        assert self.windows is not None
        return ModelShape(self.windows.layers, self.windows.heads, self.windows.head_dim, 0, self.dtype)

    def window_nbytes(self, tokens: int) -> int:
        """Of a session of so many tokens, in the cache."""
        return min(tokens, self.windows.tokens) * self.window_shape.token_nbytes if self.windows else 0

    def session_nbytes(self, tokens: int) -> int:
        """Of all that a session of so many tokens has in the cache."""
        states = self.states.nbytes if self.states else 0
        return tokens * self.token_nbytes + self.window_nbytes(tokens) + states

    def copies(self, ranks: int) -> int:
        """How often vLLM has a token's KV on so many ranks; heads that are repeated are not counted."""
        return ranks if self.latent else 1

    def block_nbytes(
        self, codec: str, block_tokens: int, ranks: int, exact: int = 0, facts: ModelFacts = NO_FACTS
    ) -> int:
        """About how many bytes one rank's encoded block takes whose first `exact` tokens are kept exact, in a store
        that rounds up to whole granules; just so many, where the codec has a fixed rate.

        facts: what the codec knows. Raises ModelError for what it does not take.
        """
        if self.heads % ranks and ranks % self.heads:
            raise ModelError(f"{self.heads} KV heads cannot be spread over {ranks} ranks: vLLM would refuse that too")
        heads = max(1, self.heads // ranks)  # fewer heads than ranks: vLLM gives several ranks the same one
        shape = BlockShape(self.layers, heads, block_tokens, self.head_dim, self.dtype, self.latent)
        try:
            return room(BlockFormat(codec, shape, bytes(FINGERPRINT_LEN), facts=facts).expected_nbytes(exact))
        except CodecError as error:
            raise ModelError(str(error).rstrip(".")) from None
        except Exception as error:  # whatever another package's codec does when it is imported
            raise ModelError(f"codec {codec} cannot be used: {type(error).__name__}: {error}") from error

    @classmethod
    def of(cls, model: str, cache_dtype: str = "auto") -> "ModelShape":
        """Of a folder with a config.json, such a file, or a name on the Hugging Face Hub. cache_dtype: vLLM's
        --kv-cache-dtype. Raises ModelError."""
        if cache_dtype not in CACHE_DTYPES:
            raise ModelError(
                f"--kv-cache-dtype {cache_dtype}: such KV is kept cold as it is, and only a server knows its bytes, in "
                f"its first line; known here are {', '.join(CACHE_DTYPES)}"
            )
        config = read_model_config(model)
        own = "fp8" if cache_dtype == "auto" and _has_fp8(config) else cache_dtype
        shape = replace(shape_of(config, model), dtype=CACHE_DTYPES[own])
        if shape.latent and shape.dtype.is_fp8:
            raise ModelError(f"{model}: its latents (MLA) would be kept in fp8; Manthan does not serve that")
        return shape


def cold_nbytes(config: ManthanConfig, largest: int, ranks: int = 1) -> int:
    """Usable bytes of the cold store on one rank: where a block lies in one of two tiers, less one of the `largest`."""
    store = config.cold_store
    tiers = [usable(store.max_bytes // ranks) if store.places[-1] == "disk" else store.max_bytes // ranks]
    if store.kind == "device" and store.host_bytes:
        tiers.append(store.host_bytes // ranks)
    return sum(tiers) - (len(tiers) - 1) * largest


def read_model_config(model: str) -> Mapping[str, Any]:
    """What config.json says, from disk or from the Hub. Raises ModelError."""
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    elif not path.exists():
        path = _from_hub(model)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError:
        raise ModelError(f"{path}: is not valid JSON") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path}: must be an object, not a {type(config).__name__}")
    return config


def _from_hub(model: str) -> Path:
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        why = "huggingface_hub, which would fetch it, is not installed"
    else:
        try:
            return Path(hf_hub_download(model, "config.json"))
        except Exception as error:  # whatever the Hub and the network come up with
            why = f"the Hub did not give it ({type(error).__name__})"
    raise ModelError(f"{model}: there is no such folder, and {why}: name a folder that has the model's config.json")


def shape_of(config: Mapping[str, Any], model: str) -> ModelShape:
    """The shape of the KV that a config.json speaks of. Raises ModelError."""
    text: Mapping[str, Any] = config.get("text_config") or config
    both = {**config, **text}
    if unserved := _unserved(both):
        raise ModelError(f"{model}: {unserved}; Manthan does not serve it")
    if text.get("kv_lora_rank"):
        latent, turned = (_number(text, (name,), model) for name in ("kv_lora_rank", "qk_rope_head_dim"))
        return ModelShape(_number(text, LAYERS, model), 1, turned, latent)
    return _of_layers(text, model)


def _of_layers(text: Mapping[str, Any], model: str) -> ModelShape:
    """Of a model with keys and values."""
    layers, heads = _number(text, LAYERS, model), _number(text, HEADS, model)
    head_dim = text.get("head_dim") or _number(text, HIDDEN, model) // heads
    kv_heads = text.get("num_key_value_heads") or heads
    try:
        kinds = layer_kinds(text, layers)
        full, window, state = (sum(kind in some for kind in kinds) for some in ((FULL, BOTH), (WINDOW,), (STATE, BOTH)))
        states = states_of(text, state) if state else None
    except NotToldError as error:
        raise ModelError(f"{model}: {error}; only a server knows what it keeps, in its first line") from None
    if not full and not window:
        raise ModelError(f"{model}: it has no attention layers, but states only; Manthan does not serve it")
    windows = Windows(window, kv_heads, head_dim, _number(text, ("sliding_window",), model)) if window else None
    if text.get("global_head_dim"):  # of the layers with full attention, whose keys may be values too
        own = text.get("num_global_key_value_heads") if text.get("attention_k_eq_v", True) else None
        head_dim, kv_heads = text["global_head_dim"], own or kv_heads
    return ModelShape(full, kv_heads, head_dim, windows=windows, states=states)


def _unserved(config: Mapping[str, Any]) -> str:
    """Why Manthan does not serve such a model, or nothing. vLLM knows more: a server says so at its start."""
    if config.get("index_topk"):
        return "it uses sparse attention, whose index is a cache of its own"
    if str(config.get("model_type")) in STATES_ONLY or config.get("rwkv_version"):
        return f"it has no attention layers, but states only ({config.get('model_type')})"
    if config.get("attention_chunk_size"):
        return f"it uses chunked attention (attention_chunk_size {config['attention_chunk_size']})"
    return "it is an encoder-decoder model" if config.get("is_encoder_decoder") else ""


def _has_fp8(config: Mapping[str, Any]) -> bool:
    """Whether vLLM would keep the KV of this quantized model in fp8 by itself."""
    scheme = config.get("quantization_config") or {}
    return bool(scheme.get("kv_cache_scheme")) or str(scheme.get("kv_cache_quant_algo")).upper() == "FP8"


def _number(config: Mapping[str, Any], names: Sequence[str], model: str) -> int:
    for name in names:
        if isinstance(config.get(name), int) and config[name] > 0:
            return int(config[name])
    raise ModelError(f"{model}: its config.json has no {names[0]}, so that its KV cannot be told")
