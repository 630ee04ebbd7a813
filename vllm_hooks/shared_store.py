"""A cold store in Redis as this engine uses it: its namespace, its books, and each rank's blocks."""

import os
import secrets
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from manthan.codec import wire
from manthan.manager.config.resolve import ManthanConfig
from manthan.manager.stores.directory import Directory
from manthan.manager.stores.keyring import PLAIN_NAMES, ring_of
from manthan.manager.stores.redis.client import Circuit, RedisUnreachableError, check, connect
from manthan.manager.stores.redis.directory import RedisDirectory
from manthan.manager.stores.redis.index import RedisIndex
from manthan.manager.stores.redis.schema import FORMAT, Namespace
from manthan.manager.stores.redis.store import AHEAD_THREADS, RedisStore
from manthan.manager.stores.sealed import Sealer
from manthan.vllm_hooks.fingerprint import model_identity
from manthan.vllm_hooks.transfer_config import from_vllm_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from manthan.manager.sessions.session import MemoryShape
    from manthan.vllm_hooks.support import Group, Groups

logger = init_logger("vllm.manthan")

LOAD_THREADS = 2
"""Threads of a worker that read the store: one for requests, one for prefetches."""


def namespace_of(vllm_config: "VllmConfig", config: ManthanConfig, groups: "Groups", weights: str) -> Namespace:
    """The same in every process of every engine whose codes mean the same, whatever else they are told to do.

    Codec and profile are not in it: each block names its own. weights: digest of all that was loaded.
    """
    group = groups.chain
    beside: list[object] = [[*_identity(window.group), window.tokens] for window in groups.windows]
    if any(window.tokens is None for window in groups.windows):
        beside.append(config.codec.state)
    if groups.again and beside:
        beside.append(groups.again)  # anchors are at other places of chains
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    ring = ring_of(config.cold_store.encryption)
    return Namespace.of(
        config.redis.prefix,
        vllm_config.model_config.model,
        {
            "wire": wire.VERSION,
            "model": model_identity(vllm_config, weights),
            "dtype": group.dtype_name,
            "block_tokens": group.spec.block_size,
            "shape": group.shape,
            "tensor_parallel": parallel.tensor_parallel_size,
            "block_hash": [cache.prefix_caching_hash_algo, os.environ.get("PYTHONHASHSEED", "")],
            **({"names": ring.names.mark} if ring is not None else {}),
            **({"group": group.index, "beside": beside} if beside else {}),
        },
    )


def _identity(group: "Group") -> list[object]:
    """What tells a group of windows or states from others."""
    return [group.index, group.dtype_name, group.spec.block_size, group.shape]


def engine_name() -> str:
    """Host, process and a number that tells this start from others."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"


def make_directory(
    vllm_config: "VllmConfig",
    config: ManthanConfig,
    namespace: Namespace,
    shape: "MemoryShape",
    capacity: int,
    owner: str,
    shards: int,
    ring: Callable[[], None],
) -> Directory:
    """The books of a cold store that engines share. capacity: its budget in bytes. shards: of a block."""
    model = vllm_config.model_config
    facts = {
        "model": model.model,
        "revision": model.revision or "",
        "dtype": str(model.dtype).removeprefix("torch."),
        "codec": config.codec.name,
        "block_tokens": shape.block_tokens,
        "ranks": shards,
        "budget_bytes": int(config.cold_store.max_bytes),
        "ttl_s": f"{config.redis.ttl_s:g}",
        "format": FORMAT,
    }
    circuit = Circuit(ring)
    client, keys = connect(config.redis), ring_of(config.cold_store.encryption)
    sealer = Sealer(keys, namespace.name) if keys is not None else None
    names = sealer.names if sealer is not None else PLAIN_NAMES

    def make_index(of: Namespace) -> RedisIndex:
        return RedisIndex(client, circuit, of, owner, shards, capacity, config.redis.ttl_s, names=names)

    return RedisDirectory(make_index, namespace, circuit, facts, ring, sealer=sealer)


def check_redis(vllm_config: "VllmConfig") -> None:
    """Raise ConfigError for a server that cannot be used; with redis.required false only if it says so itself."""
    config = from_vllm_config(vllm_config)
    if not config.cold_store.is_shared:
        return
    try:
        check(connect(config.redis), config.redis)
    except RedisUnreachableError as error:
        if config.redis.required:
            raise
        logger.warning("Manthan: %s Sessions are not kept cold until it answers.", error)


def make_redis(config: ManthanConfig, namespace: Namespace, rank: int) -> RedisStore:
    """One rank's blocks."""
    client = connect(config.redis, threads=config.encode_threads + LOAD_THREADS + AHEAD_THREADS)
    return RedisStore(client, Circuit(), namespace, rank, config.redis.ttl_s)
