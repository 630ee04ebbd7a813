"""RoPE of the running model: the configuration, checked against vLLM's modules."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.logger import init_logger

from manthan.codec.rope import Rope
from manthan.vllm_hooks.compat import changed_base, rotary_modules

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.manthan.worker")

CHECKED = tuple(range(0, 64, 7)) + tuple(range(64, 4097, 252))
"""Positions for the comparison of cosines and sines."""
TOLERANCE = 2.0**-6
"""Most difference of a cosine. vLLM's are in the model's dtype: bf16 is off by 2**-9, float32 angles by some 1e-3
at the last position."""


def running_rope(
    vllm_config: "VllmConfig", head_dim: int, tell: bool = True, layers: Sequence[str] = ()
) -> Rope | None:
    """Return the RoPE of some layers, or of all. None if unknown, or if there are several kinds.

    Args:
        head_dim: head dimension of the layers.
        tell: True to log the reason for None.
        layers: names of the layers; empty for all.
    """
    kind = layer_type(vllm_config.model_config.hf_text_config, layers)
    modules = rotary_modules(head_dim)
    found = {_rope_of(vllm_config, module, kind) for module in modules}
    if kind:
        found.discard(None)  # of layers of further kinds
    rope = found.pop() if len(found) == 1 else None
    if rope is None and tell:
        why = "vLLM turns them in another way than the configuration says" if modules else "vLLM has made no RoPE"
        several = f"{len(found)} kinds of RoPE" if len(found) > 1 else why
        logger.warning("Manthan: keys are coded as they are after RoPE, which is less exact: %s.", several)
    return rope


def layer_type(config: Any, layers: Sequence[str]) -> str:
    """Return the kind of these layers in a Transformers configuration, such as sliding_attention.

    Empty for layers of several kinds, or if RoPE does not differ by kind.

    Args:
        layers: vLLM's names, such as model.layers.3.self_attn.attn.
    """
    kinds, parameters = getattr(config, "layer_types", None) or (), getattr(config, "rope_parameters", None) or {}
    numbers = [int(found[1]) for name in layers if (found := re.search(r"\blayers\.(\d+)\.", name))]
    named = {kinds[number] for number in numbers if number < len(kinds)}
    one = named.pop() if len(named) == 1 else ""
    return one if isinstance(parameters.get(one), Mapping) else ""


def _rope_of(vllm_config: "VllmConfig", module: Any, kind: str) -> Rope | None:
    """Return the RoPE of vLLM's module; None if unknown. kind: see `layer_type`."""
    turned, base, table = module.rotary_dim, changed_base(module), module.cos_sin_cache
    if base is None:
        configured = Rope.of_config(vllm_config.model_config.hf_text_config, module.head_size, kind)
    else:
        configured = Rope(tuple(base ** (-np.arange(0, turned, 2, dtype=np.float64) / turned)))
    if configured is None:
        return None
    rope = replace(configured, interleaved=not module.is_neox_style)
    places = np.array([place for place in CHECKED if place < len(table)], np.int64)
    theirs = table[places].float().cpu().numpy()
    ours = np.concatenate(rope.tables(places), axis=1) * np.float32(rope.scale)
    is_same = theirs.shape == ours.shape and np.abs(theirs - ours).max() < TOLERANCE * max(1.0, rope.scale)
    return rope if is_same else None
