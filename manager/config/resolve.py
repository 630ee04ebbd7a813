"""What can be configured, and where a value may come from: flags over environment over YAML over defaults.

    config, sources = resolve_config("configs/default.yaml", flags={"--manthan-idle-after": 60})

Every mistake is a ConfigError of one sentence: the source, the key, the value and what would be right.
"""

import logging
import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import ValidationError

from manthan.manager.config.model import FIELDS, FLAGS, GROUPS, REDIS_PASSWORD, ConfigError, ManthanConfig
from manthan.manager.config.removed import REMOVED
from manthan.manager.config.sentences import first_mistake, must_be, nearest

__all__ = ["FLAG_KEYS", "ConfigError", "ManthanConfig", "Resolved", "resolve_config"]

logger = logging.getLogger("vllm.manthan")

FLAG_KEYS = {flag.name: key for key, flag in FLAGS.items()}
ENV_PREFIX = "MANTHAN_"
KUBERNETES = re.compile(r"MANTHAN_([A-Z0-9]+_)*(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT(_.+)?)")
"""What a Service named `manthan` or `manthan-redis` puts into every pod of its namespace: not meant for us."""
DEFAULT, ARGUMENT = "default", "argument"


class Resolved(NamedTuple):
    """A configuration, and the source of each value: dotted key to flag, variable, file or `default`."""

    config: ManthanConfig
    sources: dict[str, str]


class _Given(NamedTuple):
    value: object
    source: str


def resolve_config(
    path: str | Path | None = None,
    *,
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> Resolved:
    """The configuration and the source of every value.

    `path` is a YAML file. `env` is os.environ unless given; in it, `MANTHAN_COLD_STORE__MAX_BYTES` is
    `cold_store.max_bytes`. `flags` has options of `vllm serve` or dotted keys, None for what was not given.
    """
    given: dict[str, _Given] = {}
    env = os.environ if env is None else env
    for layer in (_from_yaml(path), _from_env(env), _from_flags(flags or {})):
        _override(given, layer)
    try:
        config = ManthanConfig.model_validate(_nested(given))
    except ValidationError as error:
        raise ConfigError(_sentence(error, given)) from None
    for variable in filter(_is_unknown, env):
        _warn_once(variable)
    keys = [*FIELDS, *(f"policy.{option}" for option in config.policy.options)]
    return Resolved(config, {key: given[key].source if key in given else DEFAULT for key in keys})


def kind_of_source(source: str) -> str:
    """What a source is: flag, file, environment, argument or default."""
    if source in (DEFAULT, ARGUMENT):
        return source
    return "flag" if source in FLAG_KEYS else "environment" if source.startswith(ENV_PREFIX) else "file"


def _from_yaml(path: str | Path | None) -> dict[str, _Given]:
    given: dict[str, _Given] = {}
    if path is not None:
        for key, value in _read_yaml(path).items():
            given |= _leaves(str(key), value, str(path))
    return given


def _read_yaml(path: str | Path) -> dict[object, object]:
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{path}: is not valid YAML: {error.problem}{where}") from None
    except (yaml.YAMLError, ValueError, RecursionError):  # no text, an impossible date, brackets without end
        raise ConfigError(f"{path}: is not valid YAML") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must be a mapping of keys to values, not a {type(values).__name__}")
    return values


def _from_env(env: Mapping[str, str]) -> dict[str, _Given]:
    given: dict[str, _Given] = {}
    for variable, value in env.items():
        if variable.startswith(ENV_PREFIX) and _is_known(key := _key_of(variable)):
            given |= _leaves(key, value, variable)
    return given


def _key_of(variable: str) -> str:
    return variable.removeprefix(ENV_PREFIX).lower().replace("__", ".")


def _is_unknown(variable: str) -> bool:
    """Whether somebody may have meant us with it: a mistake, or another program's."""
    if not variable.startswith(ENV_PREFIX) or _is_known(_key_of(variable)):
        return False
    return variable != REDIS_PASSWORD and not KUBERNETES.fullmatch(variable)


@cache
def _warn_once(variable: str) -> None:
    """Once a process: whoever else chose this name cannot be asked to choose another, so nothing is refused."""
    hint = nearest(variable, [ENV_PREFIX + key.replace(".", "__").upper() for key in (*FIELDS, *GROUPS)])
    logger.warning("Manthan: the environment variable %s is unknown and ignored%s", variable, hint)


def _from_flags(flags: Mapping[str, object]) -> dict[str, _Given]:
    given: dict[str, _Given] = {}
    for name, value in flags.items():
        if value is not None:
            is_flag = name in FLAG_KEYS
            given |= _leaves(FLAG_KEYS[name] if is_flag else name, value, name if is_flag else ARGUMENT)
    return given


def _leaves(key: str, value: object, source: str) -> dict[str, _Given]:
    """What `key: value` says about the keys in FIELDS: groups are opened, shorthands spelled out."""
    if key in REMOVED:
        _say_removed(key, source)
        return {}
    if not _is_known(key):
        raise ConfigError(f"{source}: unknown key '{key}'{nearest(key, (*FIELDS, *GROUPS))}")
    group = GROUPS.get(key)
    if group is None:
        return {key: _Given(value, source)}
    if value is None:  # a group whose keys are all commented out
        return {}
    if isinstance(value, Mapping):
        given: dict[str, _Given] = {}
        for inner, inner_value in value.items():
            given |= _leaves(f"{key}.{inner}", inner_value, source)
        return given
    if group.shorthand is None:
        keys = " and ".join(group.model_fields)
        raise ConfigError(f"{source}: {key} must be a mapping with {keys}, not {value!r}")
    return {f"{key}.{group.shorthand}": _Given(value, source)}


@cache
def _say_removed(key: str, source: str) -> None:
    logger.warning("Manthan: %s: %s has no effect any more: %s", source, key, REMOVED[key])


def _is_known(key: str) -> bool:
    return key in REMOVED or key in FIELDS or key in GROUPS or (key.startswith("policy.") and key != "policy.")


def _override(given: dict[str, _Given], layer: dict[str, _Given]) -> None:
    """Lay `layer` over `given`; another policy does not inherit the options of the one it replaces."""
    name = given.get("policy.name")
    if name and "policy.name" in layer and layer["policy.name"].value != name.value:
        for key in [key for key in given if key.startswith("policy.")]:
            del given[key]
    given.update(layer)


def _nested(given: Mapping[str, _Given]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, (value, _) in given.items():
        *groups, name = key.split(".") if key in FIELDS else key.split(".", 1)
        inside = nested
        for group in groups:
            inside = inside.setdefault(group, {})
        inside[name] = value
    return nested


def _sentence(error: ValidationError, given: Mapping[str, _Given]) -> str:
    key, _, _, said = first_mistake(error)
    if not key or key in GROUPS:  # a validator that compares several values: of groups that it names, or of one
        about = [name for name in given if (name.startswith(f"{key}.") if key else name in said)]
        return f"{', '.join(dict.fromkeys(given[name].source for name in about))}: {said}"
    while key not in given:  # inside of a value that is a mapping
        key = key.rpartition(".")[0]
    value, source = given[key]
    return f"{source}: {must_be(key, FIELDS[key].description, value)}"
