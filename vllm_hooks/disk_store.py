"""Disk of an engine: the folder, the journal, and each rank's blocks."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import MutableMapping, Sequence
from multiprocessing.process import BaseProcess as ParentProcess
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from manthan.manager.config.model import ConfigError, ManthanConfig
from manthan.manager.pool import BlockName
from manthan.manager.session.blocks import FrontTier
from manthan.manager.session.manager import SessionManager
from manthan.manager.session.persist import JournalLink
from manthan.manager.tiers.arena_tier import ArenaTier
from manthan.manager.tiers.disk_folder import check_folder, counts_in, found_in, open_rank, open_root, remove_others
from manthan.manager.tiers.journal import Journal
from manthan.manager.tiers.sealed import Sealer, keys_of
from manthan.manager.tiers.shards import Shard
from manthan.manager.transfer import on_each, weighed
from manthan.vllm_hooks.shards import Sharding, reads_others
from manthan.vllm_hooks.telemetry.log import human_bytes
from manthan.vllm_hooks.transfer_config import from_vllm_config

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig

logger = init_logger("vllm.manthan")


PATIENCE_S = 10.0
"""Most seconds to wait until the engine of a killed server has ended and unlocked the folder."""


def check_disk(vllm_config: "VllmConfig") -> None:
    """Raise ConfigError for an unusable folder, or for ranks on several hosts."""
    config, hosts = from_vllm_config(vllm_config), vllm_config.parallel_config.nnodes_within_dp
    if not config.tiers.is_on_disk:
        return
    if hosts > 1:
        raise ConfigError(
            f"tiers.kind is {config.tiers.kind}, but --nnodes spreads one engine over {hosts} hosts, and its "
            "scheduler looks for the blocks of all ranks on its own disk: use host or redis."
        )
    check_folder(config.tiers.disk.path, PATIENCE_S)


def open_disk(config: ManthanConfig, parallel: "ParallelConfig", name: str, nbytes: int) -> ArenaTier:
    """Return a rank's tier on disk. Raises ConfigError if another server uses the folder.

    name: of the namespace. nbytes: budget of all ranks.
    """
    shard = Shard(parallel.rank, parallel.world_size)
    return open_rank(_root(config, parallel), name, shard, nbytes // parallel.world_size)


def open_left(
    config: ManthanConfig, parallel: "ParallelConfig", name: str, sharding: Sharding
) -> tuple[list[dict[Shard, ArenaTier]], list[ArenaTier]]:
    """Return tiers of blocks left by servers with other numbers of ranks, for `ShardedTier`: `others`, and `copies`."""
    root, rank, ranks = _root(config, parallel), parallel.rank, parallel.world_size
    sources, copies = list[dict[Shard, ArenaTier]](), list[ArenaTier]()
    for count in counts_in(root / name):
        if count != ranks:
            read = sharding.sources(rank, sharding.with_ranks(count // sharding.stages))
            more = [at for at in range(rank, count, ranks) if at not in read]
            opened = {at: open_rank(root, name, Shard(at, count), 0, is_left=True) for at in (*read, *more)}
            sources.append({Shard(at, count): opened[at] for at in read})
            copies += [opened[at] for at in more]
    return sources, copies


class DiskBooks:
    """Lock of the folder, and the journal. Ranks must have opened their tiers before. name: of the namespace.

    Raises ConfigError if another server uses the folder.
    """

    def __init__(self, vllm_config: "VllmConfig", config: ManthanConfig, name: str, sharding: Sharding) -> None:
        self._ranks, self._sharding = vllm_config.parallel_config.world_size, sharding
        root = _root(config, vllm_config.parallel_config)
        self._folder, self._lock = root / name, open_root(root)
        self._keys = keys_of(config.sealing)
        _end_with_parent()
        is_reader = not config.tiers.is_shared and reads_others(vllm_config, sharding)
        self._counts = {self._ranks, *(counts_in(root / name) if is_reader else ())}
        for other, nbytes in remove_others(root, name, self._counts).items():
            logger.warning(
                "Manthan: %s in %s is of another model or configuration, and is removed: %s",
                other,
                root,
                human_bytes(nbytes),
            )

    def link(
        self, manager: SessionManager, fronts: Sequence[FrontTier], notes: MutableMapping[BlockName, bytes] | None
    ) -> JournalLink:
        """Return the link of the engine's sessions to the journal. Args: see `JournalLink`."""
        sealer = Sealer(self._keys, self._folder.name) if self._keys else None
        return JournalLink(Journal(self._folder, sealer), manager, fronts, notes)

    def adopt(self, link: JournalLink) -> None:
        began = time.monotonic()
        left = [self._left(count) for count in self._counts if count != self._ranks]
        others = {name: sum(sizes.get(name, 0) for sizes in left) for sizes in left for name in sizes}
        own = [found_in(self._folder, Shard(rank, self._ranks)) for rank in range(self._ranks)]
        whole = [{name: rooms[-1] for name, rooms in rank.items()} for rank in own]
        inner = {
            name: weighed((rank.get(name, ()) for rank in own), on_each(self._ranks))[:-1]
            for name, rooms in own[0].items()
            if rooms[1:] and name not in others
        }
        found = link.adopt(whole, began, others, inner)
        if found.written or found.dropped:
            logger.info(
                "Manthan: %d of %d sessions of an earlier server are cold again: %d blocks (%s) in %s, in %.1f s; "
                "%d blocks that none of them needs are dropped.",
                found.sessions,
                found.written,
                found.blocks,
                human_bytes(found.nbytes),
                self._folder,
                time.monotonic() - began,
                found.dropped,
            )

    def _left(self, count: int) -> dict[BlockName, int]:
        """Return the bytes that each block of a server with `count` ranks takes; 0 if one of its shards is missing."""
        other = self._sharding.with_ranks(count // self._sharding.stages)
        ranks = [found_in(self._folder, Shard(rank, count)) for rank in range(count)]
        names = dict.fromkeys(name for rank in ranks for name in rank)
        whole = {name for name in names if all(name in rank for rank in ranks[:: other.copies])}
        return {name: sum(rank[name][-1] for rank in ranks if name in rank) if name in whole else 0 for name in names}

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()


def _end_with_parent() -> None:
    """End this process when its parent, the server, has ended. Otherwise no new server could lock the folder."""

    def watch(parent: ParentProcess) -> None:
        parent.join()
        logger.warning("Manthan: the server has ended, and so does its engine.")
        os.kill(os.getpid(), signal.SIGTERM)

    if parent := multiprocessing.parent_process():
        threading.Thread(target=watch, args=(parent,), name="manthan-parent", daemon=True).start()


def _root(config: ManthanConfig, parallel: "ParallelConfig") -> Path:
    path, replica = Path(config.tiers.disk.path), parallel.data_parallel_index
    return path / f"replica-{replica}" if replica else path
