"""What the codec refuses. Every class is a ValueError whose text is one sentence naming the value and what
would be right."""


class CodecError(ValueError):
    """Base of every refusal of `manthan.codec`."""


class UnknownCodecError(CodecError):
    """No codec has this name."""


class UnknownBackendError(CodecError):
    """No backend has this name, or it cannot run here."""


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


class WireError(CodecError):
    """Base of what `manthan.codec.wire` refuses. cause: a word for metric labels."""

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
    """An encoded block of a version, header length or dtype that this code does not read."""

    cause = "version"


class ChecksumError(WireError):
    """Bytes have changed since the block was sealed."""

    cause = "checksum"


class UnknownBlockCodecError(WireError):
    """Encoded by a codec that is not installed here."""

    cause = "codec"


class SizeError(WireError):
    """Shapes and payload lengths contradict each other."""

    cause = "size"


class KeyMismatchError(WireError):
    """Another block than the one asked for."""

    cause = "key"


class FingerprintMismatchError(WireError):
    """Made for another model, dtype, codec or shard."""

    cause = "fingerprint"
