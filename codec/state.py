"""Recurrent states of Mamba and linear attention layers: where they lie among a block's bytes, and what may be done to
them.

A layer's state is what it knows of all tokens so far: a matrix for each head, which is a tenth of a session's bytes or
more where the cache has it in float32, and a short convolution's last inputs, which are few and kept exact.
"""

from dataclasses import dataclass

from manthan.codec.base import Dtype

STATE_CODECS = {"bf16": "state-bf16", "int8": "state-int8"}
"""Codecs of states, by what the configuration calls them."""


@dataclass(frozen=True)
class StatePart:
    """One of a layer's states, of so many bytes. row: how many numbers a row of its matrices has, the last dimension; 0
    where it is kept exact, whatever it is. dtype: of its numbers."""

    nbytes: int
    row: int = 0
    dtype: Dtype = Dtype.UINT8


@dataclass(frozen=True)
class StateLayout:
    """A block's bytes are those of its layers, each of so many; a layer's begin with its parts, one behind the other,
    and what follows is padding."""

    layers: int
    layer_nbytes: int
    parts: tuple[StatePart, ...]
