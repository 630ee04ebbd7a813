"""Eviction policies, which order sessions (conversations) by facts about each (`SessionView`), and do nothing else.

A policy is Manthan's own, or a class that another package registers as an entry point in ENTRY_POINT_GROUP.
"""

import difflib
import inspect
from importlib.metadata import EntryPoint, entry_points

from manthan.policies.base import EvictionPolicy, PolicyOptions, RankedPolicy, SessionView, in_order
from manthan.policies.lru import LRU
from manthan.policies.returns import Mixture

__all__ = ["EvictionPolicy", "PolicyOptions", "RankedPolicy", "SessionView", "in_order"]

BUILTIN: dict[str, type[EvictionPolicy]] = {policy.name: policy for policy in (LRU, Mixture)}
ENTRY_POINT_GROUP = "manthan.policies"


class UnknownPolicyError(ValueError):
    """Error: no policy with this name is registered."""


class BadPolicyError(ValueError):
    """Error: another package's policy cannot be loaded, or is not a complete policy."""


def policy_names() -> list[str]:
    """Return all names that `get_policy` knows, sorted. Other packages' policies are not loaded."""
    return sorted({*BUILTIN, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def get_policy(name: str) -> type[EvictionPolicy]:
    """Return the policy class of this name. A policy of another package is imported.

    Raises: UnknownPolicyError, whose message has all names. BadPolicyError if another package's policy is unusable.
    """
    if name in BUILTIN:
        return BUILTIN[name]
    for point in entry_points(group=ENTRY_POINT_GROUP, name=name):
        return _load(point)
    near = difflib.get_close_matches(name, policy_names(), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise UnknownPolicyError(f"unknown policy {name!r}: choose one of {', '.join(policy_names())}{hint}")


def _load(point: EntryPoint) -> type[EvictionPolicy]:
    """Return the policy class of an entry point. Raises BadPolicyError."""
    package = f" of the package {point.dist.name}" if point.dist else ""
    what = f"policy '{point.name}'{package}, {point.value},"
    try:
        policy = point.load()
    except Exception as error:  # a foreign module may raise anything on import
        said = " ".join(str(error).split())
        raise BadPolicyError(f"{what} cannot be loaded: {type(error).__name__}{f': {said}' if said else ''}") from error
    if not (isinstance(policy, type) and issubclass(policy, EvictionPolicy)):
        raise BadPolicyError(f"{what} must be a subclass of manthan.policies.EvictionPolicy, not {policy!r}")
    if inspect.isabstract(policy):
        missing = ", ".join(sorted(policy.__abstractmethods__))
        raise BadPolicyError(f"{what} must define {missing}")
    if not (isinstance(policy.Options, type) and issubclass(policy.Options, PolicyOptions)):
        raise BadPolicyError(f"{what} must have Options that are a subclass of PolicyOptions, not {policy.Options!r}")
    return policy
