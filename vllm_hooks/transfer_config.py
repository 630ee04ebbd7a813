"""Manthan's configuration inside vLLM's `kv_transfer_config`: functions that write and read the configuration."""

import dataclasses
import math
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from manthan.manager.config.model import FIELDS, ManthanConfig
from manthan.manager.config.resolve import ARGUMENT, DEFAULT, check_registered, kind_of_source, resolve_config

if TYPE_CHECKING:
    from vllm import EngineArgs
    from vllm.config import KVTransferConfig, VllmConfig

CONNECTOR = "ManthanConnector"
CONNECTOR_MODULE = "manthan.vllm_hooks.connector"
EXTRA_KEY = "manthan"
ABORTS_KEY = "manthan_aborts_at_shutdown"
"""Key of `settings`. Its value is True if Manthan has set shutdown_timeout, and requests must still end at SIGTERM."""
END_S = 5  # seconds that vLLM's engine gets to end, in addition to `tiers.drain_s` for saving sessions
SOURCES_KEY = "manthan_sources"  # key of `settings` for the sources of Manthan's values; see `resolve.Resolved`
SEVERAL = "MultiConnector"
"""vLLM's connector that combines several connectors, whose settings are under the key ENTRIES of its extra config."""
ENTRIES = "connectors"


def kv_transfer_config(
    config_file: str | None = None, *, other_connector: "KVTransferConfig | None" = None, **options: Any
) -> "KVTransferConfig":
    """Return the value of `LLM(kv_transfer_config=…)` that turns Manthan on.

    Args:
        config_file: path of a YAML file.
        other_connector: configuration of another connector to use as well.
        options: keys of the configuration, or flags. They override the environment and the file. Nested keys are
            mappings: `tiers={"max_bytes": "8GiB"}`.

    Raises: ConfigError for a configuration that cannot be used, or an unknown policy, codec or kind of tier.
    """
    from vllm.config import KVTransferConfig

    check_registered(resolved := resolve_config(config_file, flags=options))
    own = KVTransferConfig(
        kv_connector=CONNECTOR,
        kv_connector_module_path=CONNECTOR_MODULE,
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={EXTRA_KEY: resolved.config.model_dump(mode="json"), SOURCES_KEY: resolved.sources},
    )
    return together(other_connector, own)


def together(other: "KVTransferConfig | None", own: "KVTransferConfig") -> "KVTransferConfig":
    """Return `other` with Manthan added, or replaced, as a connector; `own` if `other` is None or Manthan's.

    A request's KV comes from the first connector with some of this KV. Manthan is added last, because other connectors
    mostly get KV from an engine that has computed the whole prompt.
    """
    if other is None or other.kv_connector == CONNECTOR:
        return own
    extra = dict(other.kv_connector_extra_config) if other.kv_connector == SEVERAL else {ENTRIES: [_entry(other)]}
    entries = [_entry(own) if each.get("kv_connector") == CONNECTOR else each for each in extra[ENTRIES]]
    extra[ENTRIES] = entries if _entry(own) in entries else [*entries, _entry(own)]
    return dataclasses.replace(
        other,
        kv_connector=SEVERAL,
        kv_connector_module_path=None,
        kv_role=own.kv_role,
        kv_load_failure_policy=own.kv_load_failure_policy,
        kv_connector_extra_config=extra,
    )


def _entry(transfer: "KVTransferConfig") -> dict[str, Any]:
    """Return a connector's configuration as an entry of ENTRIES, without engine_id, which all entries share."""
    fields = {field.name: getattr(transfer, field.name) for field in dataclasses.fields(transfer)}
    return {name: value for name, value in fields.items() if name != "engine_id" and value is not None}


def entries(transfer: "KVTransferConfig | None") -> list[dict[str, Any]]:
    """Return the configurations of a MultiConnector's connectors; an empty list for any other connector."""
    is_several = transfer is not None and transfer.kv_connector == SEVERAL
    return list(transfer.kv_connector_extra_config.get(ENTRIES, ())) if transfer and is_several else []


def _own(transfer: "KVTransferConfig | None") -> list[dict[str, Any]]:
    return [each for each in entries(transfer) if each.get("kv_connector") == CONNECTOR]


def is_on(config: "VllmConfig | EngineArgs | Namespace") -> bool:
    """True if the configuration turns Manthan on."""
    transfer = config.kv_transfer_config
    return bool(_own(transfer)) or (transfer is not None and transfer.kv_connector == CONNECTOR)


def settings(config: "VllmConfig | Namespace") -> dict[str, Any]:
    """Return Manthan's `kv_connector_extra_config`, which callers may change. Manthan must be on."""
    transfer = config.kv_transfer_config
    assert transfer is not None
    own = _own(transfer)
    found: dict[str, Any] = (
        own[0].setdefault("kv_connector_extra_config", {}) if own else transfer.kv_connector_extra_config
    )
    return found


def complete(config: "VllmConfig | Namespace") -> None:
    """Add defaults to settings of Manthan that a user wrote into `kv_transfer_config`. Raises ConfigError."""
    transfer, extra = config.kv_transfer_config, settings(config)
    assert transfer is not None
    extra[EXTRA_KEY] = resolve_config(env={}, flags=extra.get(EXTRA_KEY, {})).config.model_dump(mode="json")
    for entry in _own(transfer):
        entry["kv_load_failure_policy"] = transfer.kv_load_failure_policy  # vLLM heeds only the MultiConnector's


def from_vllm_config(config: "VllmConfig | Namespace") -> ManthanConfig:
    """Return Manthan's configuration. Manthan must be on."""
    return ManthanConfig.model_validate(settings(config)[EXTRA_KEY])


def settings_of(config: "VllmConfig | Namespace") -> dict[str, dict[str, Any]]:
    """Return by configuration key the `value` and its source, `from`: flag, file, environment, argument or default."""
    extra = settings(config)
    sources, own = extra.get(SOURCES_KEY, {}), from_vllm_config(config)
    found = {}
    for key in (*FIELDS, *(f"policy.{option}" for option in own.policy.options)):
        value: Any = extra[EXTRA_KEY]
        for name in key.split("."):
            value = value[name]
        default = DEFAULT if key in FIELDS and value == FIELDS[key].get_default(call_default_factory=True) else ARGUMENT
        found[key] = {"value": value, "from": kind_of_source(sources.get(key, default))}
    return found


def leave_time_to_drain(vllm_config: "VllmConfig") -> None:
    """Have vLLM's server wait for its engines after SIGTERM, so that they can save sessions to a disk or Redis."""
    tiers = from_vllm_config(vllm_config).tiers
    if tiers.is_lasting and tiers.drain_s and not vllm_config.shutdown_timeout:
        settings(vllm_config)[ABORTS_KEY] = True
        vllm_config.shutdown_timeout = math.ceil(tiers.drain_s) + END_S


def abort_at_shutdown(vllm_config: "VllmConfig") -> None:
    """Undo `leave_time_to_drain` for requests: have this engine abort them at once after SIGTERM."""
    if settings(vllm_config).get(ABORTS_KEY):
        vllm_config.shutdown_timeout = 0


def is_on_gpu(vllm_config: "VllmConfig") -> bool:
    """True if the codec runs on the GPU. For `codec.backend` auto, `settled.settle_codec` has chosen."""
    from vllm.platforms import current_platform

    return current_platform.is_cuda() and from_vllm_config(vllm_config).codec.backend != "numpy"
