"""Codecs of others, by entry point."""

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from manthan.codec import CodecSpec, codec_names, get_codec, registry, section_codec
from manthan.codec.cpu.numpy_codec import NumpyCodec

OURS = [
    "k3v3",
    "k4v2",
    "lloyd3",
    "k4v3",
    "lloyd4",
    "lloyd3-unrotated",
    "k4v2c",
    "k4v4c",
    "k4v2-tiles",
    "wht-5x",
    "wht-4x",
]


def two_thirds(head_dim, backend):
    """A codec that another package might offer."""
    return NumpyCodec(CodecSpec("two-thirds", 3, 4), head_dim)


@pytest.fixture
def installed(monkeypatch):
    """As if a package declared the entry point `two-thirds` in the group `manthan.codecs`."""
    point = EntryPoint("two-thirds", "a_package:two_thirds", "manthan.codecs")
    monkeypatch.setattr(EntryPoint, "load", lambda self: two_thirds)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == "manthan.codecs" else [])
    registry._others.cache_clear()
    yield
    registry._others.cache_clear()


@pytest.mark.usefixtures("installed")
def test_entry_points_add_codecs():
    assert codec_names() == [*OURS, "two-thirds"]
    codec = get_codec("two-thirds", 64)
    assert (codec.bits("key"), codec.bits("value")) == (3, 4)


def test_what_takes_the_place_of_a_codec_that_is_not_faithful():
    assert registry.finer_codecs("klt-8x") == ["wht-5x", "wht-4x"]
    assert registry.finer_codecs("wht-5x") == registry.finer_codecs("k3v3") == ["wht-4x"]
    assert registry.finer_codecs("wht-4x") == []


def test_ours_alone():
    assert codec_names() == OURS
    assert section_codec(registry.DEFAULT, 64).name == "wht-5x"


def test_importing_the_package_does_not_import_torch():
    code = "import sys, manthan.codec, manthan.codec.block, manthan.codec.gpu.xxh3; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
