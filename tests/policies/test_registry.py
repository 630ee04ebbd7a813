"""Policies by name, ours and those of other packages."""

from pathlib import Path

import pytest

from manthan.policies import EvictionPolicy, UnknownPolicyError, get_policy, policy_names
from manthan.policies.lru import LRU
from manthan.policies.registry import BUILTIN

OTHERS = """
from manthan.policies.lru import LRU


class Newest(LRU):
    name = "newest"

    def victims(self):
        return reversed(list(super().victims()))
"""


@pytest.fixture
def another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed distribution that registers the policy `newest`, and one that tries to be `lru`."""
    (tmp_path / "others_policies.py").write_text(OTHERS)
    info = tmp_path / "others_policies-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: others-policies\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[manthan.policies]\nnewest = others_policies:Newest\nlru = others_policies:Newest\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


def test_lru_is_there() -> None:
    assert get_policy("lru") is LRU
    assert "lru" in policy_names()


@pytest.mark.parametrize("name", BUILTIN)
def test_each_is_registered_under_its_own_name(name: str) -> None:
    assert BUILTIN[name].name == name
    assert issubclass(BUILTIN[name], EvictionPolicy)


@pytest.mark.usefixtures("another_package")
def test_entry_points_add_policies() -> None:
    assert {"lru", "newest"} <= set(policy_names())
    policy = get_policy("newest")
    assert issubclass(policy, EvictionPolicy)
    assert policy.name == "newest"


@pytest.mark.usefixtures("another_package")
def test_entry_points_do_not_replace_ours() -> None:
    assert get_policy("lru") is LRU
    assert policy_names().count("lru") == 1


@pytest.mark.usefixtures("another_package")
def test_an_unknown_name_is_answered_with_all_names_and_the_nearest() -> None:
    with pytest.raises(UnknownPolicyError) as error:
        get_policy("newst")
    assert str(error.value) == ("unknown policy 'newst': choose one of lru, newest; did you mean 'newest'?")


def test_a_name_like_no_other_gets_no_suggestion() -> None:
    with pytest.raises(UnknownPolicyError) as error:
        get_policy("qqqq")
    assert str(error.value) == f"unknown policy 'qqqq': choose one of {', '.join(policy_names())}"
