"""vLLM's general plugin: registers the connector and adds the flags. Without them it changes nothing.

vLLM gives plugins no hook for flags of their own, so three methods of EngineArgs are wrapped: the one that builds the
parser, the one that reads the parsed flags, and the one that makes the engine's configuration, where models and
settings that Manthan cannot serve are refused, and GPU memory set aside, before any process starts; there too the
checks of request_hints are put in place.
"""

import argparse
import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from manthan.manager.config.resolve import FLAG_KEYS, ConfigError, resolve_config
from manthan.vllm_hooks.http.hints import MIDDLEWARE, check_requests, check_server_requests, tenant_header
from manthan.vllm_hooks.shared_store import check_redis
from manthan.vllm_hooks.support import check_supported
from manthan.vllm_hooks.transfer_config import CONNECTOR, CONNECTOR_MODULE, is_on, to_transfer_config
from manthan.vllm_hooks.worker.capacity import set_gpu_memory_aside

CONFIG_FLAG = "--manthan-config"
HELP = {
    "--manthan-policy": (
        "NAME",
        "Turn Manthan on with this eviction policy, such as lru; `manthan policies` lists them.",
    ),
    CONFIG_FLAG: ("FILE", "Turn Manthan on with this YAML file; the other flags go before it."),
    "--manthan-idle-after": ("SECONDS", "Compress a session after so many seconds without a request."),
    "--manthan-codec": ("NAME", "How KV is encoded, such as k3v3."),
    "--manthan-cold-store": ("KIND", "Where codes are kept: host, device, redis or tiered."),
    "--manthan-cold-bytes": ("SIZE", "The most memory that codes may take, such as 8GiB."),
    "--manthan-redis-url": ("URL", "The server of cold store redis or tiered, such as redis://127.0.0.1:6379/0."),
}


def register() -> None:
    """The entry point that vLLM calls in each of its processes."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.engine.arg_utils import EngineArgs

    if CONNECTOR in KVConnectorFactory._registry:
        return
    KVConnectorFactory.register_connector(CONNECTOR, CONNECTOR_MODULE, CONNECTOR)
    add_cli_args, from_cli_args = EngineArgs.add_cli_args, EngineArgs.from_cli_args.__func__
    create_engine_config = EngineArgs.create_engine_config

    @functools.wraps(add_cli_args)
    def with_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return add_flags(add_cli_args(parser))

    @functools.wraps(from_cli_args)
    def with_manthan(cls: type[EngineArgs], args: argparse.Namespace) -> EngineArgs:
        apply_flags(args)
        engine_args = from_cli_args(cls, args)
        engine_args.manthan_from_command_line = True
        keep_headers(args)
        return engine_args

    @functools.wraps(create_engine_config)
    def with_check(self: EngineArgs, *args: Any, **kwargs: Any) -> Any:
        vllm_config = create_engine_config(self, *args, **kwargs)
        if is_on(vllm_config):
            from_command_line = hasattr(self, "manthan_from_command_line")
            with one_sentence() if from_command_line else nullcontext():
                check_supported(vllm_config)
                check_redis(vllm_config)
                set_gpu_memory_aside(vllm_config)
            check_requests()
            if from_command_line:
                check_server_requests()
        return vllm_config

    EngineArgs.add_cli_args = staticmethod(with_flags)
    EngineArgs.from_cli_args = classmethod(with_manthan)
    EngineArgs.create_engine_config = with_check


def keep_headers(args: argparse.Namespace) -> None:
    """Have the server that these flags are for keep the header that names tenants, if there is one."""
    middleware = getattr(args, "middleware", None)  # other commands than `vllm serve` have no server
    if middleware is not None and MIDDLEWARE not in middleware and is_on(args) and tenant_header(args):
        args.middleware = [*middleware, MIDDLEWARE]


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the group `Manthan` to vLLM's parser."""
    group = parser.add_argument_group("Manthan", "Session memory manager: any of these flags turns it on.")
    for flag, (metavar, text) in HELP.items():
        group.add_argument(flag, metavar=metavar, default=None, help=text)
    return parser


@contextmanager
def one_sentence() -> Iterator[None]:
    """End the program as argparse does: what is wrong, and no traceback."""
    try:
        yield
    except ConfigError as error:
        raise SystemExit(f"vllm: error: {error}") from None


def apply_flags(args: argparse.Namespace) -> None:
    """Turn parsed `--manthan-*` flags into `args.kv_transfer_config`; ends the program if they cannot be used."""
    given = {flag: getattr(args, flag[2:].replace("-", "_"), None) for flag in HELP}
    given = {flag: value for flag, value in given.items() if value is not None}
    if not given:
        return
    with one_sentence():
        other = getattr(args, "kv_transfer_config", None)
        if other is not None and getattr(other, "kv_connector", None) != CONNECTOR:  # vLLM may call this twice
            raise ConfigError(
                f"--kv-transfer-config cannot be given together with {next(iter(given))}: Manthan is the KV connector "
                "then; leave out one of the two."
            )
        flags = {flag: value for flag, value in given.items() if flag in FLAG_KEYS}
        args.kv_transfer_config = to_transfer_config(resolve_config(given.get(CONFIG_FLAG), flags=flags))
