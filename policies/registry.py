"""Policies by name: ours, and those that other packages register under the entry point `manthan.policies`."""

import difflib
from importlib.metadata import entry_points

from manthan.policies.base import EvictionPolicy
from manthan.policies.lru import LRU
from manthan.policies.returns import Returns

BUILTIN: dict[str, type[EvictionPolicy]] = {LRU.name: LRU, Returns.name: Returns}
ENTRY_POINT_GROUP = "manthan.policies"


class UnknownPolicyError(ValueError):
    """No policy of that name is registered."""


def policy_names() -> list[str]:
    """Names that `get_policy` takes, sorted."""
    return sorted({*BUILTIN, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def get_policy(name: str) -> type[EvictionPolicy]:
    """The policy class of that name; raises UnknownPolicyError, which lists the names there are."""
    if name in BUILTIN:
        return BUILTIN[name]
    for point in entry_points(group=ENTRY_POINT_GROUP, name=name):
        policy: type[EvictionPolicy] = point.load()
        return policy
    near = difflib.get_close_matches(name, policy_names(), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise UnknownPolicyError(f"unknown policy {name!r}: choose one of {', '.join(policy_names())}{hint}")
