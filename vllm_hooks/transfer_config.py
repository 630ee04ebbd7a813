"""Manthan's configuration as vLLM carries it to its processes: a KVTransferConfig and back."""

from argparse import Namespace
from typing import TYPE_CHECKING, Any

from manthan.manager.config.registered import check_registered
from manthan.manager.config.resolve import ManthanConfig, Resolved, resolve_config
from manthan.vllm_hooks.kv_dtype import is_packed, is_plain

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig

CONNECTOR = "ManthanConnector"
CONNECTOR_MODULE = "manthan.vllm_hooks.connector"
EXTRA_KEY = "manthan"


def kv_transfer_config(config_file: str | None = None, **options: Any) -> "KVTransferConfig":
    """What `LLM(kv_transfer_config=…)` takes to turn Manthan on.

    config_file: a YAML file. options: keys of the configuration, which go before the file and the environment,
    nested ones as mappings: `cold_store={"max_bytes": "8GiB"}`. Raises ConfigError.
    """
    return to_transfer_config(resolve_config(config_file, flags=options))


def to_transfer_config(resolved: Resolved) -> "KVTransferConfig":
    """Raises ConfigError for a policy, codec or cold store that is not registered."""
    from vllm.config import KVTransferConfig

    check_registered(resolved)
    return KVTransferConfig(
        kv_connector=CONNECTOR,
        kv_connector_module_path=CONNECTOR_MODULE,
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={EXTRA_KEY: resolved.config.model_dump(mode="json")},
    )


def is_on(config: "VllmConfig | Namespace") -> bool:
    """Whether this engine, or the one that these flags are for, runs with Manthan."""
    transfer = config.kv_transfer_config
    return transfer is not None and transfer.kv_connector == CONNECTOR


def from_vllm_config(config: "VllmConfig | Namespace") -> ManthanConfig:
    """Manthan's configuration, in whatever process of the engine."""
    assert config.kv_transfer_config is not None
    return ManthanConfig.model_validate(config.kv_transfer_config.kv_connector_extra_config[EXTRA_KEY])


def is_on_gpu(vllm_config: "VllmConfig") -> bool:
    """Whether blocks become codes on the GPU, whose tiers are ranges of addresses."""
    from vllm.platforms import current_platform

    return current_platform.is_cuda() and from_vllm_config(vllm_config).backend != "numpy"


def keeps_bytes(vllm_config: "VllmConfig") -> bool:
    """Whether blocks are kept cold as the bytes that they are, whatever codec is asked for: only vLLM can read them;
    or, on a GPU, they are of latents (MLA) in fp8, or beside states, whose pages are padded then."""
    cache, model = vllm_config.cache_config, vllm_config.model_config
    unknown = model.use_mla and (model.is_hybrid or not is_plain(cache))
    return is_packed(cache) or (unknown and is_on_gpu(vllm_config))
