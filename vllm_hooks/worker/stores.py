"""One rank's cold store, or the one of all ranks that have the same KV; where codes outlive the engine, its tiers."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from manthan.manager.config.model import ColdStoreConfig, ConfigError, ManthanConfig
from manthan.manager.stores import arena
from manthan.manager.stores.cold_store import ColdStore, HostStore
from manthan.manager.stores.disk import segment
from manthan.manager.stores.keyring import ring_of
from manthan.manager.stores.redis.schema import Namespace
from manthan.manager.stores.sealed import OVERHEAD, SealedStore, Sealer
from manthan.manager.stores.served import RemoteStore, ServingStore, StoreServer
from manthan.manager.stores.tiered import TieredStore
from manthan.vllm_hooks.disk_store import open_disk
from manthan.vllm_hooks.shared_store import make_redis
from manthan.vllm_hooks.transfer_config import from_vllm_config
from manthan.vllm_hooks.worker.pinned import PinnedRam

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def make_store(
    vllm_config: "VllmConfig", namespace: Namespace, copies: int, gpu: torch.device | None = None
) -> ColdStore:
    """copies: see `manthan.vllm_hooks.replicas`. gpu: that reads what is in RAM itself. Raises ConfigError."""
    config = from_vllm_config(vllm_config)
    if config.cold_store.kind == "redis":  # which all ranks reach themselves
        shard = vllm_config.parallel_config.rank // copies
        return _sealed(make_redis(config, namespace, shard), config, namespace, shard)
    return one_for_all(partial(_make_tiers, vllm_config, namespace, copies, gpu), vllm_config, copies)


def one_for_all(make: Callable[[], ColdStore], vllm_config: "VllmConfig", copies: int) -> ColdStore:
    """The store that is made, which the first of so many ranks has, and serves to the others. Raises ConfigError."""
    transfer, rank = vllm_config.kv_transfer_config, vllm_config.parallel_config.rank
    assert transfer is not None
    if copies == 1:
        return make()
    name = f"{transfer.engine_id}-{rank // copies}"
    if rank % copies:
        return RemoteStore(name, _room_in(from_vllm_config(vllm_config).cold_store))
    store = make()
    try:
        return ServingStore(store, StoreServer(store, name))
    except OSError as error:
        raise ConfigError(
            f"engine_id of --kv-transfer-config is {transfer.engine_id!r}, and the ranks cannot share a cold store by "
            f"that name ({error.strerror}): leave it out, or choose one that no other engine of this machine has."
        ) from None


def _room_in(store: ColdStoreConfig) -> Callable[[int], int]:
    """What a block of so many bytes takes of the budget."""
    more = OVERHEAD if store.encryption.key_file else 0
    if store.is_shared:
        return lambda nbytes: nbytes + more
    room = segment.room if store.is_on_disk else arena.room
    return lambda nbytes: room(nbytes + more)


def _sealed(store: ColdStore, config: ManthanConfig, namespace: Namespace, shard: int) -> ColdStore:
    """The same, where codes are to be sealed at rest."""
    ring = ring_of(config.cold_store.encryption)
    return store if ring is None else SealedStore(store, Sealer(ring, namespace.name), shard)


def _make_tiers(vllm_config: "VllmConfig", namespace: Namespace, copies: int, gpu: torch.device | None) -> ColdStore:
    config, parallel = from_vllm_config(vllm_config), vllm_config.parallel_config
    cold, shards, shard = config.cold_store, parallel.world_size // copies, parallel.rank // copies
    store: ColdStore
    if cold.is_shared:
        store = make_redis(config, namespace, shard)
    else:
        store = open_disk(config, parallel, namespace.name, cold.max_bytes // shards, shard)
    if cold.front_disk_bytes:
        front = open_disk(config, parallel, namespace.name, cold.front_disk_bytes // shards, shard)
        store = TieredStore(front, store)
    store = _sealed(store, config, namespace, shard)
    if cold.front_bytes:
        nbytes = cold.front_bytes // shards
        store = TieredStore(HostStore(nbytes, PinnedRam(nbytes, gpu) if gpu else None), store)
    return store
