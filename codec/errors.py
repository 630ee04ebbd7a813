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


class WireError(CodecError):
    """Base of what makes an encoded block unusable. cause: a word for metric labels."""

    cause: str = "invalid"


class HeaderError(WireError):
    """A header to be written does not fit the format."""

    cause = "header"


class TruncatedError(WireError):
    """Shorter than its header says, or than a header."""

    cause = "truncated"


class TrailingBytesError(WireError):
    """Longer than its header says."""

    cause = "trailing"


class MagicError(WireError):
    """Not an encoded block."""

    cause = "magic"


class VersionError(WireError):
    """An encoded block of a version that this code does not read."""

    cause = "version"


class ChecksumError(WireError):
    """Bytes have changed since the block was sealed."""

    cause = "checksum"


class UnknownBlockCodecError(WireError):
    """A section is in a codec that such a block cannot have."""

    cause = "codec"


class SizeError(WireError):
    """Shapes and lengths contradict each other, or are not those of the block asked for."""

    cause = "size"


class KeyMismatchError(WireError):
    """Another block than the one asked for."""

    cause = "key"


class FingerprintMismatchError(WireError):
    """Made for another model, dtype, codec or shard."""

    cause = "fingerprint"
