"""Redis of an engine: the namespace, the sessions, and each rank's blocks."""

import os
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
from manthan.vllm_hooks.shards import Sharding, reads_others
from manthan.vllm_hooks.transfer_config import from_vllm_config
from manthan.vllm_hooks.worker.capacity import CPU_ENCODE_THREADS

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from manthan.vllm_hooks.groups import Groups, KvCacheGroup

logger = init_logger("vllm.manthan")

LOAD_THREADS = 2
"""Threads of a worker that read Redis: one for requests, and one for prefetches."""


def namespace_of(vllm_config: "VllmConfig", config: ManthanConfig, groups: "Groups", weights: str) -> Namespace:
    """Return the namespace of lasting blocks. Engines that can read each other's blocks have the same.

    It does not depend on the codec, which each block names. weights: digest of all loaded weights.
    """
    group = groups.main
    sharding = Sharding.of(vllm_config, groups)
    further: list[object] = [[*_identity(each.group, sharding), each.reach] for each in groups.at_points]
    if any(each.group.is_state for each in groups.at_points):
        further.append(config.codec.state)
    if groups.again and further:
        further.append(groups.again)  # resume points are at different depths
    cache, keys = vllm_config.cache_config, keys_of(config.sealing)
    return Namespace.of(
        config.tiers.redis.prefix,
        vllm_config.model_config.model,
        {
            "wire": wire.VERSION,
            "model": model_identity(vllm_config, weights),
            "main": _identity(group, sharding),
            **({"context_parallel": group.context} if group.context.ranks > 1 else {}),
            **({} if sharding.heads else {"tensor_parallel": sharding.ranks}),
            **({"pipeline_parallel": sharding.stages} if sharding.stages > 1 else {}),
            "block_hash": [cache.prefix_caching_hash_algo, os.environ.get("PYTHONHASHSEED", "")],
            **({"sealed": derived(keys[-1], "mark of a key", nbytes=8).hex()} if keys else {}),
            **({"beside": further} if further else {}),
        },
    )


def _identity(group: "KvCacheGroup", sharding: Sharding) -> list[object]:
    """Return facts about a group's blocks that are the same for each number of pipeline stages."""
    shape = group.shape if group.is_packed else [sharding.heads or group.shape[1], *group.shape[2:]]
    return [group.index, group.dtype_name, group.tokens, shape]


def make_sessions(
    vllm_config: "VllmConfig",
    config: ManthanConfig,
    namespace: Namespace,
    owner: str,
    ring: Callable[[], None],
    sharding: Sharding,
) -> RedisSessions:
    """Return the engine's sessions in Redis. owner: name of the engine. ring: called, on any thread, to wake it."""
    others = sharding.others() if reads_others(vllm_config, sharding) else []
    facts = {"model": vllm_config.model_config.model, "engine": owner}
    keys = keys_of(config.sealing)
    return RedisSessions(
        connect(config.tiers.redis),
        Circuit(ring),
        namespace,
        [each.stages * each.parts for each in (sharding, *others)],
        config.tiers.redis.ttl_s,
        facts,
        ring,
        Sealer(keys, namespace.name) if keys else None,
    )


def check_redis(vllm_config: "VllmConfig") -> None:
    """Log a warning if Redis does not answer, or would refuse writes when full.

    Raises ConfigError if Redis refuses the user or password, or is too old.
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


def make_redis(config: ManthanConfig, namespace: Namespace, sharding: Sharding, rank: int) -> RedisTier:
    """Return a rank's tier in Redis. Of ranks that have the same blocks, only the first writes them."""
    client = connect(config.tiers.redis, threads=CPU_ENCODE_THREADS + LOAD_THREADS + AHEAD_THREADS)
    shard, is_first = sharding.shard(rank), sharding.is_first(rank)
    return RedisTier(client, Circuit(), namespace, shard, config.tiers.redis.ttl_s, is_first)
