"""General plugin of vLLM: registers the connector and adds flags.

The flags become `kv_transfer_config`. If that does not name Manthan, vLLM serves as without the plugin.
Unsupported models and settings are refused when vLLM makes the engine's configuration.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from manthan.manager.config.model import FIELDS, FLAGS
from manthan.manager.config.resolve import FLAG_KEYS, ConfigError
from manthan.manager.tiers.sealed import keys_of
from manthan.vllm_hooks.compat import before_engine, extend_engine_args, watch_models
from manthan.vllm_hooks.http.hints import checked
from manthan.vllm_hooks.lasting import check_disk, check_redis
from manthan.vllm_hooks.settled import settle_codec
from manthan.vllm_hooks.support import UnsupportedError, check_supported
from manthan.vllm_hooks.transfer_config import (
    CONNECTOR,
    CONNECTOR_MODULE,
    complete,
    from_vllm_config,
    is_on,
    kv_transfer_config,
    leave_time_to_drain,
)
from manthan.vllm_hooks.worker.capacity import set_gpu_memory_aside, share_memory

if TYPE_CHECKING:
    from torch.nn import Module
    from vllm import EngineArgs
    from vllm.config import ModelConfig, VllmConfig
    from vllm.utils.argparse_utils import FlexibleArgumentParser

CONFIG_FLAG = "--manthan-config"
MIDDLEWARE = "manthan.vllm_hooks.http.middleware.Middleware"


def register() -> None:
    """Register the connector, and wrap vLLM's functions for flags and models. vLLM calls this in every process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with suppress(ValueError):  # registered before
        KVConnectorFactory.register_connector(CONNECTOR, CONNECTOR_MODULE, CONNECTOR)
    extend_engine_args(add_flags, read_flags, configure)
    watch_models(watch)


def watch(vllm_config: "VllmConfig", model_config: "ModelConfig", model: "Module") -> None:
    """Watch the weights that are loaded into a model, if its engine has Manthan. Called before the load."""
    if is_on(vllm_config):
        from manthan.vllm_hooks.worker.weights import watch_model  # no other process needs torch

        watch_model(vllm_config, model_config, model)


def read_flags(args: argparse.Namespace) -> None:
    """Turn `--manthan-*` flags into vLLM's `kv_transfer_config` and `middleware`. A bad flag ends the program.

    args: vLLM's parsed flags, changed here.
    """
    given = {flag: getattr(args, flag[2:].replace("-", "_"), None) for flag in (CONFIG_FLAG, *FLAG_KEYS)}
    flags = {flag: value for flag, value in given.items() if value is not None}
    with one_sentence(from_command_line=True):
        if flags:
            before = getattr(args, "kv_transfer_config", None)
            args.kv_transfer_config = kv_transfer_config(flags.pop(CONFIG_FLAG, None), other_connector=before, **flags)
        if not is_on(args):
            return
        complete(args)
    middleware = getattr(args, "middleware", None)  # commands other than `vllm serve` have no server
    if middleware is not None and MIDDLEWARE not in middleware:
        args.middleware = [*middleware, MIDDLEWARE]


def configure(arguments: "EngineArgs", make: "Callable[[], VllmConfig]", from_command_line: bool) -> "VllmConfig":
    """Return an engine's configuration, as vLLM's `make` returns it, with codec and memory settled for Manthan.

    Unsupported models and settings are refused before vLLM starts processes: with ConfigError, or, from a command line,
    by ending the program with one sentence.
    """
    with one_sentence(from_command_line):
        if (size := arguments.kv_offloading_size) is not None and is_on(arguments):
            raise UnsupportedError(
                f"Manthan cannot be used here: --kv-offloading-size is {size:g}, which replaces Manthan by vLLM's "
                "offloading; remove it, or name OffloadingConnector in --kv-transfer-config."
            )
        vllm_config = make()
        if not is_on(vllm_config):
            return vllm_config
        complete(vllm_config)
        check_supported(vllm_config)
        settle_codec(vllm_config)
        keys_of(from_vllm_config(vllm_config).sealing)
        check_disk(vllm_config)
        check_redis(vllm_config)
        share_memory(vllm_config)
        set_gpu_memory_aside(vllm_config)
        leave_time_to_drain(vllm_config)
    before_engine(checked)
    return vllm_config


def add_flags(parser: "FlexibleArgumentParser") -> "FlexibleArgumentParser":
    """Add the group `Manthan` to vLLM's parser, and return the parser."""
    group = parser.add_argument_group("Manthan", "Session memory manager: any of these flags turns it on.")
    group.add_argument(CONFIG_FLAG, metavar="FILE", help="A YAML file of keys. The other flags override it.")
    for key, (flag, metavar) in FLAGS.items():
        group.add_argument(flag, metavar=metavar, help=f"{key}: {FIELDS[key].description}.")
    return parser


@contextmanager
def one_sentence(from_command_line: bool) -> Iterator[None]:
    """Turn a ConfigError of a command line into SystemExit: vLLM ends with one sentence and no traceback."""
    try:
        yield
    except ConfigError as error:
        if not from_command_line:
            raise
        raise SystemExit(f"vllm: error: {error}") from None
