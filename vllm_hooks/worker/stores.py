"""One rank's cold store where codes outlive the engine: its tiers, one in front of the other."""

from typing import TYPE_CHECKING

from manthan.manager.config.model import ManthanConfig
from manthan.manager.stores.cold_store import ColdStore, HostStore
from manthan.manager.stores.keyring import ring_of
from manthan.manager.stores.redis.schema import Namespace
from manthan.manager.stores.sealed import SealedStore, Sealer
from manthan.manager.stores.tiered import TieredStore
from manthan.vllm_hooks.disk_store import open_disk
from manthan.vllm_hooks.shared_store import make_redis

if TYPE_CHECKING:
    from vllm.config import ParallelConfig


def make_store(config: ManthanConfig, namespace: Namespace, parallel: "ParallelConfig") -> ColdStore:
    """Raises ConfigError."""
    cold, ranks = config.cold_store, parallel.world_size
    store: ColdStore
    if cold.is_shared:
        store = make_redis(config, namespace, parallel.rank)
    else:
        store = open_disk(config, parallel, namespace.name, cold.max_bytes // ranks)
    if cold.front_disk_bytes:
        store = TieredStore(open_disk(config, parallel, namespace.name, cold.front_disk_bytes // ranks), store)
    ring = ring_of(cold.encryption)
    if ring is not None:
        store = SealedStore(store, Sealer(ring, namespace.name), parallel.rank)
    if cold.front_bytes:
        store = TieredStore(HostStore(cold.front_bytes // ranks), store)
    return store
