"""What the codec refuses. Every class is a ValueError whose text is one sentence naming the value and what
would be right."""


class CodecError(ValueError):
    """Base of every refusal of `manthan.codec`."""


class UnknownCodecError(CodecError):
    """No codec has this name."""


class HeadDimError(CodecError):
    """head_dim is not a multiple of 8 from 32 to 512."""


class KindError(CodecError):
    """kind is neither "key" nor "value"."""


class DtypeError(CodecError):
    """Neither float32 nor uint16 (bf16 bits), or codes that are not uint8."""


class ShapeError(CodecError):
    """Vectors or codes do not have the shape that n and head_dim ask for."""


class NonFiniteError(CodecError):
    """A vector to encode, or a scale to decode by, is NaN or infinite.

    index: the first such vector's.
    """

    def __init__(self, message: str, index: int) -> None:
        super().__init__(message)
        self.index = index


class DamagedError(CodecError):
    """Codes that no encoder writes."""


class ProfileError(CodecError):
    """A profile is missing, damaged, or not one of this model."""


class HeaderError(CodecError):
    """A header to be written does not fit the format."""


class WireError(CodecError):
    """An encoded block that cannot be used.

    cause: a word for metric labels: truncated or trailing (shorter or longer than its header says), magic (it is no
    encoded block), version, checksum, codec (one that such a block cannot have), key (it is another block), fingerprint
    (made for another model, dtype, codec or shard) or size (see SizeError).
    """

    def __init__(self, message: str, cause: str) -> None:
        super().__init__(message)
        self.cause = cause


class SizeError(WireError):
    """Shapes and lengths contradict each other, or are not those of the block asked for."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "size")
