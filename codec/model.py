"""What a codec may know of the model whose KV it encodes."""

from dataclasses import dataclass

from manthan.codec.rope import Rope


@dataclass(frozen=True)
class ModelFacts:
    """rope: how keys are turned by their place; None where they are not, or nobody knows how. profile: what was
    measured of the model, for codecs that want it."""

    rope: Rope | None = None
    profile: object | None = None


NO_FACTS = ModelFacts()
