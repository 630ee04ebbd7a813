"""Redis as this engine uses it: its namespace, its sessions, and each rank's blocks."""

import os
import secrets
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from manthan.codec import wire
from manthan.manager.config.resolve import ManthanConfig
from manthan.manager.tiers.redis import AHEAD_THREADS, RedisTier
from manthan.manager.tiers.redis_client import Circuit, RedisUnreachableError, check, connect
from manthan.manager.tiers.redis_schema import Namespace
from manthan.manager.tiers.redis_sessions import RedisSessions
from manthan.manager.tiers.sealed import Sealer, derived, keys_of
from manthan.vllm_hooks.fingerprint import model_identity
from manthan.vllm_hooks.transfer_config import from_vllm_config
from manthan.vllm_hooks.worker.capacity import CPU_ENCODE_THREADS

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from manthan.vllm_hooks.groups import Groups, KvCacheGroup

logger = init_logger("vllm.manthan")

LOAD_THREADS = 2
"""Threads of a worker that read the store: one for requests, one for prefetches."""


def namespace_of(vllm_config: "VllmConfig", config: ManthanConfig, groups: "Groups", weights: str) -> Namespace:
    """Return a namespace that all engines share which can read each other's blocks, whatever else they are told to do.

    Codec and profile are not in it: each block names its own. weights: digest of all that was loaded.
    """
    group = groups.main
    beside: list[object] = [[*_identity(each.group), each.reach] for each in groups.at_points]
    if any(each.group.is_state for each in groups.at_points):
        beside.append(config.codec.state)
    if groups.again and beside:
        beside.append(groups.again)  # resume points are at other depths
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    keys = keys_of(config.sealing)
    return Namespace.of(
        config.tiers.redis.prefix,
        vllm_config.model_config.model,
        {
            "wire": wire.VERSION,
            "model": model_identity(vllm_config, weights),
            "dtype": group.dtype_name,
            "block_tokens": group.tokens,
            **({"context_parallel": group.context} if group.context.ranks > 1 else {}),
            "shape": group.shape,
            "tensor_parallel": parallel.tensor_parallel_size // (groups.replicas if config.tiers.is_shared else 1),
            **({"pipeline_parallel": parallel.pipeline_parallel_size} if parallel.pipeline_parallel_size > 1 else {}),
            "block_hash": [cache.prefix_caching_hash_algo, os.environ.get("PYTHONHASHSEED", "")],
            **({"sealed": derived(keys[-1], "mark of a key", nbytes=8).hex()} if keys else {}),
            **({"group": group.index, "beside": beside} if beside else {}),
        },
    )


def _identity(group: "KvCacheGroup") -> list[object]:
    """Return all that tells a group of windows or states from others."""
    return [group.index, group.dtype_name, group.tokens, group.shape]


def engine_name() -> str:
    """Return host, process and a number that tells this start from others."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"


def make_sessions(
    vllm_config: "VllmConfig",
    config: ManthanConfig,
    namespace: Namespace,
    owner: str,
    ring: Callable[[], None],
    replicas: int = 1,
) -> RedisSessions:
    """Return the books of sessions in Redis.

    Args:
        ring: called on their thread when there is an answer.
        replicas: see `Groups`.
    """
    facts = {"model": vllm_config.model_config.model, "codec": config.codec.name, "engine": owner}
    keys = keys_of(config.sealing)
    return RedisSessions(
        connect(config.tiers.redis),
        Circuit(ring),
        namespace,
        vllm_config.parallel_config.world_size // replicas,
        config.tiers.redis.ttl_s,
        facts,
        ring,
        Sealer(keys, namespace.name) if keys else None,
    )


def check_redis(vllm_config: "VllmConfig") -> None:
    """Log in a sentence if the server does not answer, or would refuse writes when it is full.

    Raises:
        ConfigError: The server refuses us, or is too old.
    """
    config = from_vllm_config(vllm_config)
    if not config.tiers.is_shared:
        return
    try:
        said = check(connect(config.tiers.redis), config.tiers.redis)
    except RedisUnreachableError as error:
        said = str(error)
    if said:
        logger.warning("Manthan: %s", said)


def make_redis(config: ManthanConfig, namespace: Namespace, rank: int, replicas: int = 1) -> RedisTier:
    """Return a rank's blocks in Redis. replicas: see `Groups`. The first of ranks with the same blocks writes them."""
    client = connect(config.tiers.redis, threads=CPU_ENCODE_THREADS + LOAD_THREADS + AHEAD_THREADS)
    return RedisTier(
        client, Circuit(), namespace, rank // replicas, config.tiers.redis.ttl_s, writes=rank % replicas == 0
    )
