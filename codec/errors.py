"""Errors of the codecs. A message names the refused value, and often a value that would be accepted."""


class CodecError(ValueError):
    """Base class of the errors of `manthan.codec`."""


class UnknownCodecError(CodecError):
    """No codec has the requested name."""


class HeadDimError(CodecError):
    """head_dim is not a multiple of 8 from 32 to 512."""


class ShapeError(CodecError):
    """Numbers do not have the block's shape or dtype, or the codec does not take sections of this kind."""


class NonFiniteError(CodecError):
    """A number to encode is a NaN, an infinity or too far from the profile, or a scale to decode with is not finite."""


class DamagedError(CodecError):
    """The bytes to decode are bytes that no encoder writes."""


class ProfileError(CodecError):
    """A profile is missing, damaged, or made for a different model."""


class HeaderError(CodecError):
    """A header to be written does not fit the format."""


class WireError(CodecError):
    """Unusable compressed block.

    cause: a word for metric labels: truncated or trailing (shorter or longer than the header says), magic (no
    compressed block), version, checksum, codec (a codec that the block's format does not have), key (another block
    hash), fingerprint (another model, dtype, codec or shard) or size (see SizeError).
    """

    def __init__(self, message: str, cause: str) -> None:
        super().__init__(message)
        self.cause = cause


class SizeError(WireError):
    """Shapes and lengths contradict each other, or those of the requested block."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "size")
