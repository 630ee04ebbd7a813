"""Errors of the codecs. A message names the refused value, and often a value that would be accepted."""


class CodecError(ValueError):
    """Base class of the errors of `manthan.codec`."""


class UnknownCodecError(CodecError):
    """No codec has the requested name."""


class HeadDimError(CodecError):
    """head_dim is not a multiple of 8 from 32 to 512, or a latent has no such divisor up to 128."""


class ShapeError(CodecError):
    """Numbers, a paged cache, a size or a count of exact tokens does not fit its block, or a section its codec."""


class NonFiniteError(CodecError):
    """A number to encode is not finite, too large or too far from the profile, or a stored step or scale is invalid."""


class DamagedError(CodecError):
    """The bytes to decode are bytes that no encoder writes."""


class ProfileError(CodecError):
    """A profile is missing, damaged, made for a different model or rank, or would be made from too few tokens."""


class HeaderError(CodecError):
    """A header to be written does not fit the format, or headers to be written at once differ in length."""


class WireError(CodecError):
    """Unusable compressed block.

    cause: a word for metric labels: truncated or trailing (shorter or longer than the header says), magic (no
    compressed block), version, checksum, codec (a codec that the block's format does not have), key (another block hash
    or KV cache group), fingerprint (another model, dtype, codec or shard) or size (see SizeError).
    """

    def __init__(self, message: str, cause: str) -> None:
        super().__init__(message)
        self.cause = cause


class SizeError(WireError):
    """A shape, a length or another number cannot be, or is not that of the requested block."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "size")
