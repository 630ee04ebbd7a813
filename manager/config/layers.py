"""What the layers of a model keep of a conversation, told from its config.json: all keys and values, a window's, or a
state."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Config = Mapping[str, Any]

FULL, WINDOW, STATE, BOTH = "full_attention", "sliding_attention", "linear_attention", "attention_and_state"
NAMES = {FULL: FULL, "attention": FULL, WINDOW: WINDOW, STATE: STATE, "mamba": STATE, "hybrid": BOTH}
"""What configurations call kinds of layers."""
LETTERS = {"*": FULL, "M": STATE}
"""The same in Nemotron-H's patterns, whose other layers keep nothing."""
PATTERNS = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4}
"""One layer of so many has full attention, where a configuration does not say it."""
GATED, MAMBA2 = "linear_num_value_heads", ("mamba_n_heads", "mamba_num_heads")
SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Windows:
    """So many layers that look back so many tokens."""

    layers: int
    heads: int
    head_dim: int
    tokens: int


@dataclass(frozen=True)
class States:
    """So many layers that keep a state. Bytes of a layer's: recurrent, of the matrices, whose numbers take `itemsize`
    each, in rows of `row`; convolution, of its last inputs."""

    layers: int
    recurrent: int
    convolution: int
    row: int
    itemsize: int = 2

    @property
    def nbytes(self) -> int:
        """Of all layers."""
        return self.layers * (self.recurrent + self.convolution)

    def cold_nbytes(self, codec: str) -> int:
        """About what they take where `codec.state` is exact, bf16 or int8."""
        numbers = self.recurrent // self.itemsize
        coded = {"bf16": min(self.recurrent, 2 * numbers), "int8": numbers + 4 * numbers // self.row}
        return self.layers * (coded.get(codec, self.recurrent) + self.convolution)


class NotToldError(ValueError):
    """What the layers keep cannot be told, for this reason."""


def layer_kinds(config: Config, layers: int) -> list[str]:
    """Of each layer that has a cache of its own: FULL, WINDOW, STATE or BOTH. config: of the text part. Raises
    NotToldError."""
    named = config.get("layer_types") or config.get("layers_block_type")
    if isinstance(config.get("hybrid_override_pattern"), str):
        return [LETTERS[letter] for letter in config["hybrid_override_pattern"] if letter in LETTERS]
    if named:
        if unknown := sorted({str(kind) for kind in named if kind not in NAMES}):
            raise NotToldError(f"it has layers of kind {', '.join(unknown)}")
        kinds = [NAMES[kind] for kind in named]
    else:
        kinds = [_unnamed(config, layers)(layer) for layer in range(layers)]
    own = layers - (config.get("num_kv_shared_layers") or 0)  # the last ones use the caches of others
    return kinds[:own]


def _unnamed(config: Config, layers: int) -> Callable[[int], str]:
    """A layer's kind by its number, where the configuration has no list of them."""
    kind, window = str(config.get("model_type", "")), config.get("sliding_window")
    if kind == "falcon_h1":
        return lambda layer: BOTH
    if GATED in config:
        every = config.get("full_attention_interval") or 4
        return lambda layer: STATE if (layer + 1) % every else FULL
    if "attn_layer_indices" in config:
        return lambda layer: FULL if layer in config["attn_layer_indices"] else STATE
    if not window or not config.get("use_sliding_window", True):
        return lambda layer: FULL
    if pattern := config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or PATTERNS.get(kind):
        return lambda layer: WINDOW if (layer + 1) % pattern else FULL
    first = config.get("max_window_layers", 0) if "use_sliding_window" in config else 0
    return lambda layer: WINDOW if layer >= first else FULL


def states_of(config: Config, layers: int) -> States:
    """Of so many layers. Raises NotToldError."""
    if GATED in config:
        return _gated(config, layers)
    if any(key in config for key in MAMBA2):
        return _mamba2(config, layers)
    raise NotToldError("it has layers with states of a kind whose size its config.json does not tell")


def _gated(config: Config, layers: int) -> States:
    """Gated DeltaNet."""
    key_dim = _number(config, "linear_key_head_dim")
    values = _number(config, GATED) * _number(config, "linear_value_head_dim")
    inputs = 2 * _number(config, "linear_num_key_heads") * key_dim + values
    size = SIZES.get(str(config.get("mamba_ssm_dtype")), 2)
    convolution = 2 * (_number(config, "linear_conv_kernel_dim") - 1) * inputs
    return States(layers, size * values * key_dim, convolution, key_dim, size)


def _mamba2(config: Config, layers: int) -> States:
    heads, head_dim = _number(config, *MAMBA2), _number(config, "mamba_d_head", "mamba_head_dim")
    state, groups = _number(config, "mamba_d_state", "ssm_state_size"), _number(config, "mamba_n_groups", "n_groups")
    inputs = heads * head_dim + 2 * groups * state
    asked = config.get("mamba_ssm_cache_dtype") or ("float32" if config.get("model_type") == "nemotron_h" else "")
    size = SIZES.get(str(asked), 2)
    convolution = 2 * (_number(config, "mamba_d_conv", "conv_kernel") - 1) * inputs
    return States(layers, size * heads * head_dim * state, convolution, state, size)


def _number(config: Config, *names: str) -> int:
    """The first of these that there is. Raises NotToldError."""
    return next((int(config[name]) for name in names if _is_size(config.get(name))), 0) or _missing(names)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and value > 0


def _missing(names: Sequence[str]) -> int:
    raise NotToldError(f"its config.json has no {names[0]}, so that its states cannot be told")
