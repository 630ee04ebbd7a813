"""Refusals of the codecs. Each is a ValueError whose text is one sentence with the value and what would be right."""


class CodecError(ValueError):
    """Base of every refusal of `manthan.codec`."""


class UnknownCodecError(CodecError):
    """No codec has this name."""


class HeadDimError(CodecError):
    """head_dim is not a multiple of 8 from 32 to 512."""


class ShapeError(CodecError):
    """Numbers do not have the block's shape or dtype, or a section is of a kind that the codec does not code."""


class NonFiniteError(CodecError):
    """A vector to encode, or a scale to decode by, is NaN or infinite. index: of the first such vector."""

    def __init__(self, message: str, index: int) -> None:
        super().__init__(message)
        self.index = index


class DamagedError(CodecError):
    """The codes are not those of any encoder."""


class ProfileError(CodecError):
    """A profile is missing, damaged, or not one of this model."""


class HeaderError(CodecError):
    """A header to be written does not fit the format."""


class WireError(CodecError):
    """A compressed block cannot be used.

    cause: a word for metric labels: truncated or trailing (shorter or longer than its header says), magic (no
    compressed block), version, checksum, codec (one that such a block cannot have), key (another block), fingerprint
    (made for another model, dtype, codec or shard) or size (see SizeError).
    """

    def __init__(self, message: str, cause: str) -> None:
        super().__init__(message)
        self.cause = cause


class SizeError(WireError):
    """Shapes and lengths contradict each other, or are not those of the block asked for."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "size")
