"""What a codec may know of the model whose KV it encodes."""

from dataclasses import dataclass

from manthan.codec.cpu.state import StateLayout
from manthan.codec.profile import Profile
from manthan.codec.rope import Rope


@dataclass(frozen=True)
class ModelFacts:
    """rope: how keys are turned by their place; None where they are not, or nobody knows how. profile: what was
    measured of the model, cut to the layers of the KV cache group and to the rank's heads. state: where states lie in
    a block that has them."""

    rope: Rope | None = None
    profile: Profile | None = None
    state: StateLayout | None = None


NO_FACTS = ModelFacts()
