"""Codecs: encode the numbers of a KV block into a compressed block, and decode them."""

from manthan.codec.base import Codec, Dtype, Kind, Section, SectionKind, check_head_dim
from manthan.codec.block import BlockFormat, BlockShape
from manthan.codec.errors import CodecError, HeadDimError, NonFiniteError, ProfileError, ShapeError, UnknownCodecError
from manthan.codec.profile import Profile
from manthan.codec.registry import DEFAULT, codec_names, get_codec

__all__ = [
    "DEFAULT",
    "BlockFormat",
    "BlockShape",
    "Codec",
    "CodecError",
    "Dtype",
    "HeadDimError",
    "Kind",
    "NonFiniteError",
    "Profile",
    "ProfileError",
    "Section",
    "SectionKind",
    "ShapeError",
    "UnknownCodecError",
    "check_head_dim",
    "codec_names",
    "get_codec",
]
