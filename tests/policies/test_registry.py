"""Policies by name, ours and those of other packages."""

import pytest
from policy_package import another_package

from manthan.policies import BUILTIN, BadPolicyError, EvictionPolicy, UnknownPolicyError, get_policy, policy_names
from manthan.policies.lru import LRU

__all__ = ["another_package"]


@pytest.mark.parametrize("name", BUILTIN)
def test_each_says_what_it_and_its_options_are(name: str) -> None:
    assert BUILTIN[name].__doc__
    assert all(field.description for field in BUILTIN[name].Options.model_fields.values())


@pytest.mark.usefixtures("another_package")
def test_entry_points_add_policies_and_do_not_replace_ours() -> None:
    assert "newest" in policy_names()
    policy = get_policy("newest")
    assert issubclass(policy, EvictionPolicy)
    assert policy.name == "newest"
    assert get_policy("lru") is LRU
    assert policy_names().count("lru") == 1


@pytest.mark.usefixtures("another_package")
def test_an_unknown_name_is_answered_with_all_names_and_the_nearest() -> None:
    with pytest.raises(UnknownPolicyError) as error:
        get_policy("newst")
    names = ", ".join(policy_names())
    assert str(error.value) == f"unknown policy 'newst': choose one of {names}; did you mean 'newest'?"


BAD = {
    "half": "others_policies:Half, must define forget, victims",
    "loose": "others_policies:Loose, must have Options that are a subclass of PolicyOptions, not <class 'dict'>",
    "absent": "others_policies:Absent, cannot be loaded: AttributeError: module 'others_policies' has no attribute "
    "'Absent'",
    "broken": "others_broken:Policy, cannot be loaded: RuntimeError: not today",
    "nowhere": "others_nowhere:Policy, cannot be loaded: ModuleNotFoundError: No module named 'others_nowhere'",
}


@pytest.mark.usefixtures("another_package")
@pytest.mark.parametrize("name", BAD)
def test_what_is_no_policy_is_refused_in_a_sentence(name: str) -> None:
    with pytest.raises(BadPolicyError) as error:
        get_policy(name)
    assert str(error.value) == f"policy '{name}' of the package others-policies, {BAD[name]}"
