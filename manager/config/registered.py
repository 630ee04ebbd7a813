"""Check of a configuration's names and options against the registries of policies, codecs and tiers."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from pydantic import ValidationError

from manthan.codec import codec_names
from manthan.manager.config.model import ConfigError, PolicyConfig
from manthan.manager.config.profiles import AUTO
from manthan.manager.config.resolve import Resolved
from manthan.manager.config.sentences import first_mistake, must_be, nearest
from manthan.manager.tiers.tier import TIER_KINDS
from manthan.policies import BadPolicyError, EvictionPolicy, PolicyOptions, get_policy, policy_names


class ChosenPolicy(NamedTuple):
    """Class of the configured policy, and the options to make it with."""

    policy: type[EvictionPolicy]
    options: PolicyOptions


def check_registered(resolved: Resolved) -> None:
    """Raise ConfigError for an unknown policy, option of a policy, codec or kind of tier.

    Raise it also for a wrong value of an option, and for a policy that cannot be loaded.
    """
    config, sources = resolved
    policy = config.policy
    _check_name("policy.name", "policy", policy.name, policy_names(), sources)
    choose_policy(policy, sources)
    _check_name("codec.name", "codec", config.codec.name, [*codec_names(), AUTO], sources)
    _check_name("tiers.kind", "cold store", config.tiers.kind, TIER_KINDS, sources)


def _check_name(key: str, what: str, name: str, valid: Collection[str], sources: Mapping[str, str]) -> None:
    if name not in valid:
        raise ConfigError(f"{_source(sources, key)}unknown {what} '{name}'{nearest(name, valid)}")


def choose_policy(config: PolicyConfig, sources: Mapping[str, str] | None = None) -> ChosenPolicy:
    """Return a configuration's policy and options. Raises UnknownPolicyError, ConfigError.

    Args:
        sources: Source of each key's value, as in `Resolved`, which the message of a ConfigError names.
    """
    sources = sources or {}
    try:
        policy = get_policy(config.name)
        return ChosenPolicy(policy, policy.Options.model_validate(config.options))
    except BadPolicyError as error:
        raise ConfigError(f"{_source(sources, 'policy.name')}{error}") from error
    except ValidationError as error:
        raise ConfigError(_sentence(error, config, policy, sources)) from None


def _sentence(
    error: ValidationError, config: PolicyConfig, policy: type[EvictionPolicy], sources: Mapping[str, str]
) -> str:
    fields = policy.Options.model_fields
    unknown = [option for option in config.options if option not in fields]
    if unknown:
        source, hint = _source(sources, f"policy.{unknown[0]}"), nearest(unknown[0], fields)
        return f"{source}policy.{unknown[0]} is no option of policy {config.name}{hint}"
    first = first_mistake(error)
    if not first.key:  # from a validator that compares several options
        written = ", ".join(dict.fromkeys(s for key, s in sources.items() if key.startswith("policy.")))
        return f"{f'{written}: ' if written else ''}policy {config.name}: {first.said}"
    option = first.field
    field = fields.get(option)
    right = field.description if field and field.description else f"what {config.name} takes ({first.said})"
    if first.kind == "missing":
        return f"{_source(sources, 'policy.name')}policy {config.name} needs policy.{option}: {right}"
    return _source(sources, f"policy.{option}") + must_be(f"policy.{option}", right, config.options[option])


def _source(sources: Mapping[str, str], key: str) -> str:
    return f"{sources[key]}: " if key in sources else ""
