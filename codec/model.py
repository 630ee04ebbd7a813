"""Facts of the model whose KV a codec encodes."""

from dataclasses import dataclass

from manthan.codec.cpu.state import StateLayout
from manthan.codec.profile import Profile
from manthan.codec.rope import Rope


@dataclass(frozen=True)
class ModelFacts:
    """Facts of a model.

    rope: RoPE of the keys; None without RoPE, or if unknown.
    profile: calibrated profile of the KV cache group's layers and of the tensor-parallel rank's heads, or None.
    state: layout of a block with recurrent states, or None.
    """

    rope: Rope | None = None
    profile: Profile | None = None
    state: StateLayout | None = None


NO_FACTS = ModelFacts()
