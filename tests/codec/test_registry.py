"""Presets by name, ours and those of others, and what is refused."""

from dataclasses import dataclass
from importlib.metadata import EntryPoint

import pytest

from manthan.codec import CodecError, HeadDimError, UnknownCodecError, codec_names, get_codec, registry
from manthan.codec.k3v3 import K3v3Codec

CALIBRATED = ["klt-20x", "klt-12x", "klt-8x", "klt-5x", "klt-exact"]
OURS = ["wht-5x", "wht-4x", *CALIBRATED, "k3v3"]


@dataclass(frozen=True)
class TwoThirds:
    """A preset that another package might offer."""

    name: str = "two-thirds"

    def codec(self, head_dim, facts):
        return K3v3Codec(self.name, head_dim)


def test_entry_points_add_codecs(monkeypatch):
    point = EntryPoint("two-thirds", "a_package:TWO_THIRDS", "manthan.codecs")
    monkeypatch.setattr(EntryPoint, "load", lambda self: TwoThirds())
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == "manthan.codecs" else [])
    registry._others.cache_clear()
    try:
        assert codec_names() == [*OURS, "two-thirds"]
        assert get_codec("two-thirds", 64).name == "two-thirds"
    finally:
        registry._others.cache_clear()


def test_what_takes_the_place_of_a_codec_that_is_not_faithful():
    assert registry.finer_codecs("klt-8x") == ["wht-5x", "wht-4x"]
    assert registry.finer_codecs("wht-5x") == registry.finer_codecs("k3v3") == ["wht-4x"]
    assert registry.finer_codecs("wht-4x") == []


def test_ours_alone():
    assert codec_names() == OURS
    assert get_codec(registry.DEFAULT, 64).name == "wht-5x"


@pytest.mark.parametrize(
    ("name", "head_dim", "error", "text"),
    [
        ("k3v4", 64, UnknownCodecError, "'k3v4'.*did you mean 'k3v3'.*wht-5x"),
        ("", 64, UnknownCodecError, "codec '' is unknown"),
        ("k3v3", 100, HeadDimError, "head_dim 100 .*multiple of 8 from 32 to 512"),
        ("wht-5x", 24, HeadDimError, "head_dim 24 "),
        ("k3v3", 520, HeadDimError, "head_dim 520 "),
        ("k3v3", 64.0, HeadDimError, "head_dim 64.0 "),
    ],
)
def test_refused_with_a_clear_sentence(name, head_dim, error, text):
    with pytest.raises(error, match=text) as refusal:
        get_codec(name, head_dim)
    assert isinstance(refusal.value, CodecError)
    assert "\n" not in str(refusal.value)
    assert str(refusal.value).endswith((".", "?"))
