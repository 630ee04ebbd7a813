"""Refusals of the codecs. Each is a ValueError with a sentence of the value and the right kind of value."""


class CodecError(ValueError):
    """Base of every refusal of `manthan.codec`."""


class UnknownCodecError(CodecError):
    """No codec has the name."""


class HeadDimError(CodecError):
    """head_dim is not a multiple of 8 from 32 to 512."""


class ShapeError(CodecError):
    """Numbers do not have the block's shape or dtype, or the codec does not take sections of this kind."""


class NonFiniteError(CodecError):
    """Vector to encode, or scale to decode by, with a NaN or infinity."""


class DamagedError(CodecError):
    """No encoder writes these bytes."""


class ProfileError(CodecError):
    """A profile is missing, damaged, or made for a different model."""


class HeaderError(CodecError):
    """A header to be written does not fit the format."""


class WireError(CodecError):
    """Unusable compressed block.

    cause: a word for metric labels: truncated or trailing (shorter or longer than the header says), magic (no
    compressed block), version, checksum, codec (impossible for such a block), key (another block), fingerprint (another
    model, dtype, codec or shard) or size (see SizeError).
    """

    def __init__(self, message: str, cause: str) -> None:
        super().__init__(message)
        self.cause = cause


class SizeError(WireError):
    """Shapes and lengths contradict each other, or the requested block's."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "size")
