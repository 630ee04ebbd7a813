"""Configuration from flags, environment variables, a YAML file and defaults. Each overrides all that follow.

    config, sources = resolve_config("configs/default.yaml", flags={"--manthan-idle-after": 60})

A mistake raises ConfigError. The message is a sentence with source, key and value, and says what would be right. Names
and options are checked against the registries of policies, codecs and tiers by `check_registered`.
"""

import difflib
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import ByteSize, ValidationError

from manthan.codec import codec_names
from manthan.manager.config.model import FIELDS, FLAGS, GROUPS, REDIS_PASSWORD, ConfigError, ManthanConfig, PolicyConfig
from manthan.manager.config.profiles import AUTO
from manthan.manager.tiers.tier import TIER_KINDS
from manthan.policies import BadPolicyError, EvictionPolicy, PolicyOptions, get_policy, policy_names

__all__ = ["ConfigError", "ManthanConfig"]  # imported here, for other modules

logger = logging.getLogger("vllm.manthan")

FLAG_KEYS = {flag: key for key, (flag, _) in FLAGS.items()}
ENV_PREFIX = "MANTHAN_"
KUBERNETES = re.compile(r"MANTHAN_([A-Z0-9]+_)*(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT(_.+)?)")
"""Variables that Kubernetes sets in every pod of a namespace with a Service named `manthan` or `manthan-NAME`."""
DEFAULT, ARGUMENT = "default", "argument"
RENAMED = {
    "idle_after_s": "idle.after_s",
    "min_tokens": "idle.min_tokens",
    "backend": "codec.backend",
    "cold_store": "tiers",
    "cold_store.encryption": "sealing",
    "disk": "tiers.disk",
    "redis": "tiers.redis",
    "quotas": "tenants",
    "quotas.tenants": "tenants.shares",
    "quotas.pinned_share": "tiers.pinned_share",
}
"""New names of keys and groups, by old name. Old names work, with a warning, until the release after 0.2."""
LONG_UNSAVED_S = 30  # most seconds of idle.after_s without a warning at start-up


class Resolved(NamedTuple):
    """Configuration, and by dotted key the source of each value: the name of a flag, variable or file, or `default`.

    The source is `argument` for a value that `resolve_config` got in `flags` by its dotted key.
    """

    config: ManthanConfig
    sources: dict[str, str]


class _Given(NamedTuple):
    """Value of a key, and its source; see `Resolved`."""

    value: object
    source: str
    old: str = ""  # the key's old name if the source has it


def resolve_config(
    path: str | Path | None = None, *, env: Mapping[str, str] | None = None, flags: Mapping[str, object] | None = None
) -> Resolved:
    """Return the configuration and the source of every value. Log unknown variables that begin with MANTHAN_.

    Args:
        path: YAML file.
        env: Environment variables; None for os.environ. `MANTHAN_TIERS__MAX_BYTES` sets `tiers.max_bytes`.
        flags: Values by flag of `vllm serve`, or by dotted key. A value of None counts as not given.

    Raises: ConfigError for an unreadable file, a wrong value, an unknown key in the file or in `flags`, or a key that
        one source sets both by the old and the new name.
    """
    given = dict[str, _Given]()
    file = [] if path is None else [(str(key), value, str(path)) for key, value in _read_yaml(path).items()]
    variables = [
        (name.removeprefix(ENV_PREFIX).lower().replace("__", "."), value, name)
        for name, value in (os.environ if env is None else env).items()
        if name.startswith(ENV_PREFIX)
    ]
    known = [one for one in variables if _is_known(one[0])]
    options = [
        (FLAG_KEYS.get(name, name), value, name if name in FLAG_KEYS else ARGUMENT)
        for name, value in (flags or {}).items()
        if value is not None
    ]
    for layer in (file, known, options):
        above = dict[str, _Given]()
        for key, one in chain.from_iterable(_leaves(*one) for one in layer):
            if key in above and (old := above[key].old or one.old):
                raise ConfigError(f"{one.source}: {old} is {key} now, and both are set: leave out {old}")
            above[key] = one
        if unknown := [key for key in above if not _is_known(key)]:
            said = "; ".join(f"unknown key '{key}'{nearest(key, (*FIELDS, *GROUPS))}" for key in unknown)
            raise ConfigError(f"{above[unknown[0]].source}: {said}")
        name = above.get("policy.name")
        if name and name.value != given.get("policy.name", name).value:  # another policy has other options
            given = {key: one for key, one in given.items() if not key.startswith("policy.")}
        given |= above
    try:
        config = ManthanConfig.model_validate(_nested(given))
    except ValidationError as error:
        raise ConfigError(_sentence(error, given)) from None
    for key, _, variable in variables:
        if _is_known(key) or variable == REDIS_PASSWORD or KUBERNETES.fullmatch(variable):
            continue
        hint = nearest(variable, [ENV_PREFIX + name.replace(".", "__").upper() for name in (*FIELDS, *GROUPS)])
        _warn_once(f"Manthan: the environment variable {variable} is unknown and ignored{hint}")
    if config.idle.after_s > LONG_UNSAVED_S:
        _warn_once(
            f"Manthan: idle.after_s is {config.idle.after_s:g}: sessions that were idle for less are saved only if "
            "memory is short, and blocks overwritten before are computed again"
        )
    keys = [*FIELDS, *(f"policy.{option}" for option in config.policy.options)]
    return Resolved(config, {key: given[key].source if key in given else DEFAULT for key in keys})


def kind_of_source(source: str) -> str:
    """Return the kind of a source of `Resolved`: "flag", "file", "environment", "argument" or "default"."""
    if source in (DEFAULT, ARGUMENT):
        return source
    return "flag" if source in FLAG_KEYS else "environment" if source.startswith(ENV_PREFIX) else "file"


def _read_yaml(path: str | Path) -> dict[object, object]:
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a wrong date, or many brackets
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", "")
        why = f": {problem} in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{path}: is not valid YAML{why}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must be a mapping of keys to values, not a {type(values).__name__}")
    return values


@cache
def _warn_once(sentence: str) -> None:
    logger.warning("%s", sentence)


def _leaves(key: str, value: object, source: str) -> Iterator[tuple[str, _Given]]:
    """Yield dotted key and value of each field that `key: value` sets. Shorthands and old names are replaced."""
    new = _renamed(key)
    group = GROUPS.get(new)
    if group and isinstance(value, Mapping):
        for inner, inner_value in value.items():
            yield from _leaves(f"{key}.{inner}", inner_value, source)
    elif group and value is None:  # a group with all keys commented out
        return
    elif new != key:
        _warn_once(f"Manthan: {source}: {key} is {new} now")
        yield from ((leaf, one._replace(old=key)) for leaf, one in _leaves(new, value, source))
    elif group is None:  # a field's key, or an unknown one
        yield key, _Given(value, source)
    elif group.shorthand is None:
        keys = " and ".join(group.model_fields)
        raise ConfigError(f"{source}: {key} must be a mapping with {keys}, not {value!r}")
    else:
        yield f"{key}.{group.shorthand}", _Given(value, source)


def _renamed(key: str) -> str:
    """Return the new name of a key or group; `key` itself if that is no old name."""
    old = max((old for old in RENAMED if f"{key}.".startswith(f"{old}.")), key=len, default="")
    return RENAMED[old] + key[len(old) :] if old else key


def _is_known(key: str) -> bool:
    key = _renamed(key)
    return key in FIELDS or key in GROUPS or (key.startswith("policy.") and key != "policy.")


def _nested(given: Mapping[str, _Given]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, (value, *_) in given.items():
        *groups, name = key.split(".") if key in FIELDS else key.split(".", 1)
        inside = nested
        for group in groups:
            inside = inside.setdefault(group, {})
        inside[name] = value
    return nested


def _sentence(error: ValidationError, given: Mapping[str, _Given]) -> str:
    """Return the message for pydantic's first error, and the keys of further ones."""
    wrong = dict.fromkeys(".".join(map(str, one["loc"])) for one in error.errors())
    first, *more = dict.fromkeys(next((key for key in given if f"{each}.".startswith(f"{key}.")), "") for each in wrong)
    also = f" (wrong too: {', '.join(filter(None, more))})" if any(more) else ""
    if not first:  # from a validator of several keys, whose message names the keys
        said = first_mistake(error).said
        return f"{', '.join(dict.fromkeys(given[name].source for name in given if name in said))}: {said}{also}"
    value, source, _ = given[first]
    return f"{source}: {must_be(first, FIELDS[first].description, value)}{also}"


# -- names and options --------------------------------------------------------------------------------------


class ChosenPolicy(NamedTuple):
    """Class of the configured policy, and the options to make it with."""

    policy: type[EvictionPolicy]
    options: PolicyOptions


def check_registered(resolved: Resolved) -> None:
    """Raise ConfigError for an unknown policy, codec or kind of tier, or a policy that cannot be loaded.

    Raise it also for an unknown option of the policy, or a wrong value of one.
    """
    config, sources = resolved
    for key, what, name, valid in (
        ("policy.name", "policy", config.policy.name, policy_names()),
        ("codec.name", "codec", config.codec.name, [*codec_names(), AUTO]),
        ("tiers.kind", "cold store", config.tiers.kind, TIER_KINDS),
    ):
        if name not in valid:
            raise ConfigError(f"{_source(sources, key)}unknown {what} '{name}'{nearest(name, valid)}")
    choose_policy(config.policy, sources)


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
        raise ConfigError(_option_sentence(error, config, policy, sources)) from None


def _option_sentence(
    error: ValidationError, config: PolicyConfig, policy: type[EvictionPolicy], sources: Mapping[str, str]
) -> str:
    fields = policy.Options.model_fields
    if unknown := next((option for option in config.options if option not in fields), None):
        key, hint = f"policy.{unknown}", nearest(unknown, fields)
        return f"{_source(sources, key)}{key} is no option of policy {config.name}{hint}"
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


# -- sentences about mistakes ---------------------------------------------------------------------------------


class Mistake(NamedTuple):
    """First error that pydantic found."""

    key: str  # dotted; empty if the error is from a validator that compares several keys
    value: object
    kind: str  # pydantic's type of the error, such as "missing"
    said: str  # message of pydantic, or of a validator of Manthan

    @property
    def field(self) -> str:
        """First part of the key; of a flat model, the field's name."""
        return self.key.partition(".")[0]


def first_mistake(error: ValidationError) -> Mistake:
    """Return the first error only, because people mend one error after the other."""
    first = error.errors()[0]
    key = ".".join(map(str, first["loc"]))
    return Mistake(key, first["input"], first["type"], first["msg"].removeprefix("Value error, "))


def written(value: object) -> str:
    return "empty" if value is None else repr(value)


def must_be(key: str, right: str | None, value: object, show: Callable[[object], str] = written) -> str:
    """Return the sentence about a wrong value. right: completes "KEY must be". show: returns the value as text."""
    shown = show(value)
    if key == "tiers.redis.url" and re.search("[@?]", str(value)):  # the value may have a password
        shown = "a URL with '@' or '?' in it"
    return f"{key} must be {right}, not {shown}"


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return ` (did you mean 'x'?)` with the valid name nearest to `name`; if none is near, all valid names."""
    valid = sorted(valid)
    if not valid:
        return " (there are none)"
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    return f" (did you mean '{close[0]}'?)" if close else f" (valid: {', '.join(valid)})"


def human_bytes(nbytes: int) -> str:
    """Return a readable size, such as 1.6MiB."""
    return ByteSize(nbytes).human_readable()
