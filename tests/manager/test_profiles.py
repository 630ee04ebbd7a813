"""The codec that a configuration means, and profiles that are missing, damaged or of something else."""

import os
from dataclasses import replace
from pathlib import Path

import profiles
import pytest
from logged import warnings

from manthan.codec.profile import LEVELS, Profile
from manthan.manager.config.model import CodecConfig, ConfigError
from manthan.manager.config.profiles import check_profile, choose_codec, profile_path
from manthan.manager.config.resolve import check_registered, resolve_config

MODEL = "someone/made-up"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Path(MODEL).mkdir(parents=True)
    (Path(MODEL) / "model.safetensors").write_bytes(b"weights")
    return tmp_path / "cache"


def saved(path: Path, **options: object) -> Profile:
    profile: Profile = profiles.built(**options)
    profile.save(path)
    return profile


def test_codecs_that_take_none_have_none() -> None:
    assert choose_codec(CodecConfig(name="k3v3"), MODEL).profile is None
    with pytest.raises(ConfigError, match=r"^codec.profile is a.file, but codec k3v3 takes none: use auto, klt-20x"):
        choose_codec(CodecConfig(name="k3v3", profile="a.file"), MODEL)


@pytest.mark.parametrize("name", LEVELS)
def test_a_profile_is_the_one_that_is_named_or_else_that_of_the_cache(tmp_path: Path, name: str) -> None:
    made = saved(profile_path(MODEL))
    chosen = choose_codec(CodecConfig(name=name), MODEL)
    assert (chosen.name, chosen.path) == (name, profile_path(MODEL))
    assert chosen.profile is not None
    assert chosen.profile.digest == made.digest
    other = saved(tmp_path / "other.safetensors", tokens=512)
    chosen = choose_codec(CodecConfig(name=name, profile=str(tmp_path / "other.safetensors")), MODEL)
    assert chosen.profile is not None
    assert chosen.profile.digest == other.digest != made.digest


def test_without_a_profile_the_start_ends_with_a_sentence_that_says_what_to_do() -> None:
    with pytest.raises(ConfigError) as refused:
        choose_codec(CodecConfig(name="klt-8x"), MODEL, 2)
    assert str(refused.value) == (
        f"codec klt-8x needs a profile of {MODEL}, and there is none at {profile_path(MODEL, 2)}: run `manthan "
        f"calibrate {MODEL} --tensor-parallel-size 2`, or name one that you have with codec.profile"
    )


def test_auto_is_what_there_is_a_profile_for() -> None:
    chosen = choose_codec(CodecConfig(name="auto"), MODEL)
    assert (chosen.name, chosen.profile) == ("wht-5x", None)
    saved(profile_path(MODEL))
    chosen = choose_codec(CodecConfig(name="auto"), MODEL)
    assert chosen.name == "klt-8x"
    assert chosen.profile is not None


@pytest.mark.parametrize(("metric", "is_approved"), [("attention", True), ("fisher", False)])
def test_only_a_profile_from_traffic_is_approved_and_only_for_the_codec_that_a_guard_chose(
    metric: str, is_approved: bool
) -> None:
    path = profile_path(MODEL)
    made = saved(path)
    Profile.of(replace(made.info, metric=metric), made.ranks).save(path)
    assert choose_codec(CodecConfig(name="auto"), MODEL).is_approved is is_approved
    assert not choose_codec(CodecConfig(name="klt-12x"), MODEL).is_approved
    assert not choose_codec(CodecConfig(name="auto", profile=str(path)), MODEL).is_approved


def test_a_profile_that_nobody_named_is_used_for_the_weights_that_it_was_made_of() -> None:
    weights = Path(MODEL) / "model.safetensors"
    saved(profile_path(MODEL))
    assert choose_codec(CodecConfig(name="auto"), MODEL).name == "klt-8x"
    weights.write_bytes(b"Weights")
    os.utime(weights, (1, 1))
    chosen = choose_codec(CodecConfig(name="auto"), MODEL)
    assert (chosen.name, chosen.path, chosen.profile) == ("wht-5x", None, None)
    weights.unlink()  # they are somewhere else, where nobody looks at them
    saved(profile_path(MODEL))
    assert choose_codec(CodecConfig(name="auto"), MODEL).name == "wht-5x"
    with pytest.raises(ConfigError, match=r"^codec klt-8x needs a profile of someone/made-up"):
        choose_codec(CodecConfig(name="klt-8x"), MODEL)


def test_revisions_of_a_model_have_profiles_of_their_own() -> None:
    assert profile_path("some/where", revision="a") != profile_path("some/where", revision="b")


def test_auto_goes_on_without_a_profile_that_cannot_be_used_unless_it_was_named() -> None:
    path = profile_path(MODEL)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"nothing of the kind")
    with warnings() as said:
        chosen = choose_codec(CodecConfig(name="auto"), MODEL)
    assert (chosen.name, chosen.profile) == ("wht-5x", None)
    assert len(said) == 1
    assert f"codec wht-5x is used, for {path} is no profile, or a damaged one" in said[0]
    with pytest.raises(ConfigError, match="is no profile, or a damaged one"):
        choose_codec(CodecConfig(name="auto", profile=str(path)), MODEL)


@pytest.mark.parametrize(
    ("version", "ranks", "sentence"),
    [
        (1, 1, "was made by an older `manthan calibrate`: run it again"),
        (2, 2, "is for 1 tensor-parallel ranks, and there are 2: run `manthan calibrate made-up --tensor"),
    ],
)
def test_profiles_that_do_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, ranks: int, sentence: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("manthan.codec.profile.FORMAT", f"manthan profile {version}")
        saved(tmp_path / "p")
    with pytest.raises(ConfigError) as refused:
        choose_codec(CodecConfig(name="klt-8x", profile=str(tmp_path / "p")), MODEL, ranks)
    assert sentence in str(refused.value)


def test_a_profile_of_another_shape() -> None:
    saved(profile_path(MODEL))
    chosen = choose_codec(CodecConfig(name="klt-8x"), MODEL)
    check_profile(chosen, MODEL, profiles.LAYERS, profiles.HEADS, profiles.HEAD_DIM)
    for shape in ((4, 2, 32), (3, 1, 32), (3, 2, 64)):
        with pytest.raises(ConfigError, match=r"is of 3 layers with 2 KV heads of 32 numbers, but someone/made-up has"):
            check_profile(chosen, MODEL, *shape)


def test_names_are_registered() -> None:
    for name in (*LEVELS, "auto"):
        check_registered(resolve_config(env={}, flags={"codec": name}))
    flags = {"--manthan-codec": "klt-8x", "--manthan-codec-profile": "p.safetensors"}
    resolved = resolve_config(env={"MANTHAN_CODEC__PROFILE": "other"}, flags=flags)
    assert (resolved.config.codec.name, resolved.config.codec.profile) == ("klt-8x", "p.safetensors")
    assert resolve_config(env={"MANTHAN_CODEC__PROFILE": "other"}).config.codec.profile == "other"


def test_cut_for_ranks() -> None:
    saved(profile_path(MODEL, 2), ranks=2)
    chosen = choose_codec(CodecConfig(name="klt-5x"), MODEL, 2)
    assert chosen.profile is not None
    of_rank = chosen.profile.for_rank(1, 2)
    assert len(of_rank.ranks) == 1
    assert of_rank.digest == chosen.profile.digest
