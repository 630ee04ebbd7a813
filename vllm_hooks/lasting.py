"""Stores that outlive an engine: a folder on disk, with a journal of sessions, and Redis.

A rank stores a shard of each block: the rank's KV heads and layers. Ranks with the same KV have the same shard.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess as ParentProcess
from pathlib import Path

from vllm.config import ParallelConfig, VllmConfig
from vllm.logger import init_logger

from manthan.manager.config.model import ConfigError, ManthanConfig
from manthan.manager.config.resolve import human_bytes
from manthan.manager.pool import BlockName
from manthan.manager.session.blocks import FrontTier
from manthan.manager.session.manager import SessionManager
from manthan.manager.session.persist import BlockNotes, JournalLink
from manthan.manager.tiers.disk import check_folder, counts_in, found_in, open_rank, open_root, remove_others
from manthan.manager.tiers.joined import Shard, ShardedTier, StackedTier
from manthan.manager.tiers.journal import Journal
from manthan.manager.tiers.redis import Circuit, Namespace, RedisTier, RedisUnreachableError, check, connect
from manthan.manager.tiers.redis_sessions import RedisSessions
from manthan.manager.tiers.sealed import SealedTier, Sealer, keys_of
from manthan.manager.tiers.tier import Tier
from manthan.manager.transfer import on_each, weighed
from manthan.vllm_hooks.fingerprint import Sharding, reads_others
from manthan.vllm_hooks.transfer_config import from_vllm_config
from manthan.vllm_hooks.worker.capacity import CPU_ENCODE_THREADS

logger = init_logger("vllm.manthan")

LOAD_THREADS = 2  # threads of a worker that read Redis for loads: one for requests, and one for prefetches
PATIENCE_S = 10.0  # most seconds to wait until the engine of a killed server has ended and unlocked the disk's folder


def check_disk(vllm_config: VllmConfig) -> None:
    """If tiers are on disk, raise ConfigError for an unusable folder, or for ranks on several hosts."""
    config, hosts = from_vllm_config(vllm_config), vllm_config.parallel_config.nnodes_within_dp
    if not config.tiers.is_on_disk:
        return
    if hosts > 1:
        raise ConfigError(
            f"tiers.kind is {config.tiers.kind}, but --nnodes spreads one engine over {hosts} hosts, and its "
            "scheduler looks for the blocks of all ranks on its own disk: use host or redis."
        )
    check_folder(config.tiers.disk.path, PATIENCE_S)


def check_redis(vllm_config: VllmConfig) -> None:
    """Log a warning if a configured Redis does not answer, or would refuse writes when full.

    Raises ConfigError if Redis refuses the user or password, or is too old, or if redis-py does not take the URL.
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


def make_sessions(
    vllm_config: VllmConfig,
    config: ManthanConfig,
    namespace: Namespace,
    owner: str,
    wake: Callable[[], None],
    sharding: Sharding,
) -> RedisSessions:
    """Return the access to sessions in Redis. owner: name of the engine. wake: wakes the engine, from any thread."""
    others = sharding.others() if reads_others(vllm_config, sharding) else []
    return RedisSessions(
        connect(config.tiers.redis),
        Circuit(wake),
        namespace,
        [each.shards for each in (sharding, *others)],
        config.tiers.redis.ttl_s,
        {"model": vllm_config.model_config.model, "engine": owner},
        wake,
        _sealer(config, namespace.name),
    )


def make_store(vllm_config: VllmConfig, namespace: Namespace, sharding: Sharding) -> Tier:
    """Return a rank's tiers that outlive the engine, as a single tier.

    The tier also reads blocks of engines with other numbers of ranks, if this engine can. Raises ConfigError, for
    example if another server uses the disk's folder.
    """
    config, rank, name = from_vllm_config(vllm_config), vllm_config.parallel_config.rank, namespace.name
    sealer, root = _sealer(config, name), _root(config, vllm_config.parallel_config)

    def sealed(shard: Shard, tier: Tier) -> Tier:
        return tier if sealer is None else SealedTier(tier, sealer, shard)

    sources, copies = list[list[Tier]](), list[Tier]()
    is_reader, own = reads_others(vllm_config, sharding), sharding.kept(vllm_config).shard(rank)
    if config.tiers.is_shared:
        client = connect(config.tiers.redis, threads=CPU_ENCODE_THREADS + LOAD_THREADS)
        shard, is_first = sharding.shard(rank), sharding.is_first(rank)  # of ranks with the same blocks, one writes
        redis = RedisTier(client, Circuit(), namespace, shard, config.tiers.redis.ttl_s, is_first)
        for other in sharding.others() if is_reader else ():
            shards = [Shard(at, other.shards) for at in sharding.sources(rank, other)]
            sources.append([sealed(each, redis.of(each)) for each in shards])
        store: Tier = redis
        if config.tiers.disk_bytes:
            store = StackedTier(open_rank(root, name, own, config.tiers.disk_bytes // own.of), redis)
    else:
        shard = own
        store = open_rank(root, name, own, config.tiers.max_bytes // own.of)
        left = [count for count in counts_in(root / name) if count != own.of] if is_reader else []
        for count in left:
            read = sharding.sources(rank, sharding.with_ranks(count // sharding.stages))
            rest = [at for at in range(own.at, count, own.of) if at not in read]
            opened = {at: open_rank(root, name, Shard(at, count), 0, is_left=True) for at in (*read, *rest)}
            sources.append([sealed(Shard(at, count), opened[at]) for at in read])
            copies += [opened[at] for at in rest]
    store = sealed(shard, store)
    return ShardedTier(store, sources, copies) if sources else store


class DiskBooks:
    """The disk's folder for the engine core: lock, blocks that earlier servers left, and journal (records of sessions).

    Ranks must have opened their tiers before. The constructor removes folders of other namespaces, and shards that this
    engine cannot read. It raises ConfigError if another server uses the folder. name: name of the namespace.
    """

    def __init__(self, vllm_config: VllmConfig, config: ManthanConfig, name: str, sharding: Sharding) -> None:
        self._shards, self._sharding = sharding.kept(vllm_config).shards, sharding
        root = _root(config, vllm_config.parallel_config)
        self._folder, self._lock = root / name, open_root(root)
        self._sealer = _sealer(config, name)
        _end_with_parent()
        is_reader = not config.tiers.is_shared and reads_others(vllm_config, sharding)
        self._counts = {self._shards, *(counts_in(root / name) if is_reader else ())}
        for other, nbytes in remove_others(root, name, self._counts).items():
            said = f"{other} in {root} is of another model or configuration, and is removed: {human_bytes(nbytes)}"
            logger.warning("Manthan: %s", said)

    def link(self, manager: SessionManager, fronts: Sequence[FrontTier], notes: BlockNotes | None) -> JournalLink:
        return JournalLink(Journal(self._folder, self._sealer), manager, fronts, notes)

    def adopt(self, link: JournalLink) -> None:
        """Enter the sessions and blocks that earlier servers left into the engine's tables."""
        began = time.monotonic()
        left = [self._left(count) for count in self._counts if count != self._shards]
        others = {name: sum(sizes.get(name, 0) for sizes in left) for sizes in left for name in sizes}
        own = [found_in(self._folder, Shard(at, self._shards)) for at in range(self._shards)]
        whole = [{name: rooms[-1] for name, rooms in rank.items()} for rank in own]
        inner = {
            name: weighed((rank.get(name, ()) for rank in own), on_each(self._shards))[:-1]
            for name, rooms in own[0].items()
            if rooms[1:] and name not in others
        }
        found = link.adopt(whole, began, others, inner)
        if found.written or found.dropped:
            logger.info(
                f"Manthan: {found.sessions} of {found.written} sessions of an earlier server are cold again: "
                f"{found.blocks} blocks ({human_bytes(found.nbytes)}) in {self._folder}, in "
                f"{time.monotonic() - began:.1f} s; {found.dropped} blocks that none of them needs are dropped."
            )

    def _left(self, count: int) -> dict[BlockName, int]:
        """Return the bytes of each block left by servers with `count` shards; 0 if one of its shards is missing."""
        other = self._sharding.with_ranks(count // self._sharding.stages)
        ranks = [found_in(self._folder, Shard(rank, count)) for rank in range(count)]
        names = dict.fromkeys(name for rank in ranks for name in rank)
        whole = {name for name in names if all(name in rank for rank in ranks[:: other.copies])}
        return {name: sum(rank[name][-1] for rank in ranks if name in rank) if name in whole else 0 for name in names}

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()


def _end_with_parent() -> None:
    """End this process when its parent, the server, has ended, so that a new server can lock the folder."""

    def watch(parent: ParentProcess) -> None:
        parent.join()
        logger.warning("Manthan: the server has ended, and so does its engine.")
        os.kill(os.getpid(), signal.SIGTERM)

    if parent := multiprocessing.parent_process():
        threading.Thread(target=watch, args=(parent,), name="manthan-parent", daemon=True).start()


def _sealer(config: ManthanConfig, name: str) -> Sealer | None:
    """Return the sealer of a namespace with this name; None if blocks are not sealed."""
    keys = keys_of(config.sealing)
    return Sealer(keys, name) if keys else None


def _root(config: ManthanConfig, parallel: ParallelConfig) -> Path:
    path, replica = Path(config.tiers.disk.path), parallel.data_parallel_index
    return path / f"replica-{replica}" if replica else path
