"""One rank's cold store, where codes outlive the engine: its tiers."""

from typing import TYPE_CHECKING

import torch

from manthan.manager.config.model import ManthanConfig
from manthan.manager.stores.cold_store import ColdStore, HostStore
from manthan.manager.stores.redis.schema import Namespace
from manthan.manager.stores.sealed import SealedStore, Sealer, keys_of
from manthan.manager.stores.tiered import TieredStore
from manthan.vllm_hooks.disk_store import open_disk
from manthan.vllm_hooks.shared_store import make_redis
from manthan.vllm_hooks.transfer_config import from_vllm_config
from manthan.vllm_hooks.worker.pinned import PinnedRam

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def make_store(vllm_config: "VllmConfig", namespace: Namespace, gpu: torch.device | None = None) -> ColdStore:
    """gpu: that reads what is in RAM itself. Raises ConfigError."""
    config, parallel = from_vllm_config(vllm_config), vllm_config.parallel_config
    cold, ranks, rank = config.cold_store, parallel.world_size, parallel.rank
    store: ColdStore
    if cold.is_shared:
        store = make_redis(config, namespace, rank)
    else:
        store = open_disk(config, parallel, namespace.name, cold.max_bytes // ranks, rank)
    if cold.front_disk_bytes:
        front = open_disk(config, parallel, namespace.name, cold.front_disk_bytes // ranks, rank)
        store = TieredStore(front, store)
    store = _sealed(store, config, namespace, rank)
    if cold.front_bytes:
        nbytes = cold.front_bytes // ranks
        store = TieredStore(HostStore(nbytes, PinnedRam(nbytes, gpu) if gpu else None), store)
    return store


def _sealed(store: ColdStore, config: ManthanConfig, namespace: Namespace, rank: int) -> ColdStore:
    """The same, where codes are to be sealed at rest."""
    keys = keys_of(config.cold_store.encryption)
    return SealedStore(store, Sealer(keys, namespace.name), rank) if keys else store
