"""Who goes first: eviction policies, pure decisions over session views."""

from manthan.policies.base import EvictionPolicy, SessionView
from manthan.policies.registry import UnknownPolicyError, get_policy, policy_names

__all__ = ["EvictionPolicy", "SessionView", "UnknownPolicyError", "get_policy", "policy_names"]
