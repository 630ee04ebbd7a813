"""RoPE of the running model: from the model's configuration, checked against vLLM's tables of cosines and sines."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.logger import init_logger

from manthan.codec.rope import Rope
from manthan.vllm_hooks.compat import changed_base, rotary_modules

logger = init_logger("vllm.manthan.worker")

CHECKED = tuple(range(0, 64, 7)) + tuple(range(64, 4097, 252))  # positions at which the tables are compared
TOLERANCE = 2.0**-6
"""Largest accepted difference of a cosine or sine. vLLM's table is in the model's dtype: bf16 rounds by up to 2**-9.
Rounding angles to float32 changes a cosine by about 1e-3 at the last position of CHECKED."""


def running_rope(vllm_config: VllmConfig, head_dim: int, tell: bool = True, layers: Sequence[str] = ()) -> Rope | None:
    """Return the RoPE of some layers; None if they have no or several RoPEs, or if vLLM's tables are not as configured.

    tell: True to log a warning with the reason for None. layers: vLLM's names of the layers; empty for all.
    """
    kind = layer_type(vllm_config.model_config.hf_text_config, layers)
    modules = rotary_modules(head_dim)
    found = {_rope_of(vllm_config, module, kind) for module in modules}
    if kind:
        found.discard(None)  # modules for further kinds of layers do not match this kind's parameters
    rope = found.pop() if len(found) == 1 else None
    if rope is None and tell:
        why = "vLLM's RoPE differs from the model's configuration" if modules else "vLLM has made no RoPE"
        why = f"these layers have {len(found)} kinds of RoPE" if len(found) > 1 else why
        logger.warning("Manthan: keys are coded as they are after RoPE, which is less exact: %s.", why)
    return rope


def layer_type(config: Any, layers: Sequence[str]) -> str:
    """Return the kind of these layers in `layer_types` of a Transformers configuration, such as sliding_attention.

    Empty if these layers have several kinds or none, or if the configuration has no RoPE parameters for their kind.
    """
    kinds, parameters = getattr(config, "layer_types", None) or (), getattr(config, "rope_parameters", None) or {}
    numbers = [int(found[1]) for name in layers if (found := re.search(r"\blayers\.(\d+)\.", name))]
    named = {kinds[number] for number in numbers if number < len(kinds)}
    one = named.pop() if len(named) == 1 else ""
    return one if isinstance(parameters.get(one), Mapping) else ""


def _rope_of(vllm_config: VllmConfig, module: Any, kind: str) -> Rope | None:
    """Return the RoPE of vLLM's module; None unless its table is as the configuration says. kind: see `layer_type`."""
    rotary_dim, base, table = module.rotary_dim, changed_base(module), module.cos_sin_cache
    if base is None:
        configured = Rope.of_config(vllm_config.model_config.hf_text_config, module.head_size, kind)
    else:
        configured = Rope(tuple(base ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)))
    if configured is None:
        return None
    rope = replace(configured, interleaved=not module.is_neox_style)
    positions = np.array([position for position in CHECKED if position < len(table)], np.int64)
    theirs = table[positions].float().cpu().numpy()
    ours = np.concatenate(rope.tables(positions), axis=1) * np.float32(rope.scale)
    is_same = theirs.shape == ours.shape and np.abs(theirs - ours).max() < TOLERANCE * max(1.0, rope.scale)
    return rope if is_same else None
