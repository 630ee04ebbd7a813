"""Eviction policies, which order sessions (conversations) by facts about each (`SessionView`), and do nothing else."""

from manthan.policies.base import EvictionPolicy, PolicyOptions, RankedPolicy, SessionView, in_order
from manthan.policies.registry import BadPolicyError, UnknownPolicyError, get_policy, policy_names

__all__ = [
    "BadPolicyError",
    "EvictionPolicy",
    "PolicyOptions",
    "RankedPolicy",
    "SessionView",
    "UnknownPolicyError",
    "get_policy",
    "in_order",
    "policy_names",
]
