"""Numbers only: KV vectors to codes and back, and the encoded block that carries them."""

from manthan.codec.base import Codec, CodecSpec, Kind, check_head_dim
from manthan.codec.errors import (
    CodecError,
    DtypeError,
    HeadDimError,
    KindError,
    NonFiniteError,
    ShapeError,
    UnknownBackendError,
    UnknownCodecError,
)
from manthan.codec.registry import DEFAULT, codec_names, get_codec

__all__ = [
    "DEFAULT",
    "Codec",
    "CodecError",
    "CodecSpec",
    "DtypeError",
    "HeadDimError",
    "Kind",
    "KindError",
    "NonFiniteError",
    "ShapeError",
    "UnknownBackendError",
    "UnknownCodecError",
    "check_head_dim",
    "codec_names",
    "get_codec",
]
