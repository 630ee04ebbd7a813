"""Numbers only: KV vectors to codes and back, and the encoded block that carries them."""

from manthan.codec.base import Codec, CodecSpec, Dtype, Kind, Section, SectionCodec, SectionKind, check_head_dim
from manthan.codec.block import BlockFormat, BlockShape
from manthan.codec.errors import (
    CodecError,
    DtypeError,
    HeadDimError,
    KindError,
    NonFiniteError,
    ProfileError,
    ShapeError,
    UnknownBackendError,
    UnknownCodecError,
)
from manthan.codec.profile import Profile
from manthan.codec.registry import DEFAULT, codec_names, get_codec, section_codec, section_codec_names

__all__ = [
    "DEFAULT",
    "BlockFormat",
    "BlockShape",
    "Codec",
    "CodecError",
    "CodecSpec",
    "Dtype",
    "DtypeError",
    "HeadDimError",
    "Kind",
    "KindError",
    "NonFiniteError",
    "Profile",
    "ProfileError",
    "Section",
    "SectionCodec",
    "SectionKind",
    "ShapeError",
    "UnknownBackendError",
    "UnknownCodecError",
    "check_head_dim",
    "codec_names",
    "get_codec",
    "section_codec",
    "section_codec_names",
]
