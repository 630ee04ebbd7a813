"""Facts of the model whose KV a codec encodes."""

from dataclasses import dataclass

from manthan.codec.cpu.state import StateLayout
from manthan.codec.profile import Profile
from manthan.codec.rope import Rope


@dataclass(frozen=True)
class ModelFacts:
    """Facts of a model, for one KV cache group on one tensor-parallel rank."""

    rope: Rope | None = None  # of the keys; None also if unknown
    profile: Profile | None = None  # of the group's layers and the rank's heads, from a calibration
    state: StateLayout | None = None  # of a block with recurrent states


NO_FACTS = ModelFacts()
