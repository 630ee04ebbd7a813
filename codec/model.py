"""Facts of the model whose KV a codec encodes."""

from dataclasses import dataclass

from manthan.codec.cpu.state import StateLayout
from manthan.codec.profile import Profile
from manthan.codec.rope import Rope


@dataclass(frozen=True)
class ModelFacts:
    """Facts of a model, for one KV cache group on one tensor-parallel rank.

    rope: RoPE of the keys; None without RoPE, or if unknown.
    profile: result of a calibration, for the group's layers and the rank's heads; None if there is none.
    state: layout of a block with recurrent states; None for a group without states.
    """

    rope: Rope | None = None
    profile: Profile | None = None
    state: StateLayout | None = None


NO_FACTS = ModelFacts()
