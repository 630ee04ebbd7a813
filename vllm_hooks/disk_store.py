"""A disk as this engine uses it: its folder, its journal, and each rank's blocks."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from manthan.manager.config.model import ConfigError, ManthanConfig
from manthan.manager.pool import BlockName
from manthan.manager.session.blocks import FrontTier
from manthan.manager.session.manager import SessionManager
from manthan.manager.session.persist import JournalLink
from manthan.manager.tiers.arena_tier import ArenaTier
from manthan.manager.tiers.disk_folder import check_folder, found_in, open_rank, open_root, remove_others
from manthan.manager.tiers.journal import Journal
from manthan.manager.tiers.sealed import Sealer, keys_of
from manthan.vllm_hooks.telemetry.log import human_bytes
from manthan.vllm_hooks.transfer_config import from_vllm_config

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig

logger = init_logger("vllm.manthan")


PATIENCE_S = 10.0
"""Seconds that an engine whose server was killed may need to end, and to unlock its folder."""


def check_disk(vllm_config: "VllmConfig") -> None:
    """Raise ConfigError for a folder that cannot be used, or not by ranks that are on other hosts."""
    config, hosts = from_vllm_config(vllm_config), vllm_config.parallel_config.nnodes_within_dp
    if not config.tiers.is_on_disk:
        return
    if hosts > 1:
        raise ConfigError(
            f"tiers.kind is {config.tiers.kind}, but --nnodes spreads one engine over {hosts} hosts, and its "
            "scheduler looks for the codes of all ranks on the disk of its own: use host or redis."
        )
    check_folder(config.tiers.disk.path, PATIENCE_S)


def open_disk(config: ManthanConfig, parallel: "ParallelConfig", name: str, nbytes: int, rank: int) -> ArenaTier:
    """Return a rank's part, of `nbytes`. name: of the namespace. Raises ConfigError if another server has it."""
    return open_rank(_root(config, parallel), name, rank, nbytes)


class DiskBooks:
    """The scheduler half's part: the folder's lock, and the journal. Ranks have opened theirs before.

    Args:
        name: of the namespace.
        shards: number of parts of a block, each in a folder.

    Raises:
        ConfigError: Another server has the folder.
    """

    def __init__(self, vllm_config: "VllmConfig", config: ManthanConfig, name: str, shards: int) -> None:
        self._parallel, self._shards = vllm_config.parallel_config, shards
        root = _root(config, self._parallel)
        self._folder, self._lock = root / name, open_root(root)
        self._keys = keys_of(config.sealing)
        _end_with_parent()
        for other, nbytes in remove_others(root, name).items():
            logger.warning(
                "Manthan: %s in %s is of another model or configuration, and is removed: %s",
                other,
                root,
                human_bytes(nbytes),
            )

    def link(
        self, manager: SessionManager, fronts: Sequence[FrontTier], notes: MutableMapping[BlockName, bytes] | None
    ) -> JournalLink:
        """Return what writes the manager's sessions down. The arguments are those of `JournalLink`."""
        sealer = Sealer(self._keys, self._folder.name) if self._keys else None
        return JournalLink(Journal(self._folder, sealer), manager, fronts, notes)

    def adopt(self, link: JournalLink) -> None:
        """Enter the sessions that an earlier server left. The driver must listen by then: it drops all other blocks."""
        began = time.monotonic()
        sizes = [found_in(self._folder / f"rank-{rank}") for rank in range(self._shards)]
        found = link.adopt(sizes, began)
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

    def close(self) -> None:
        """Unlock the folder."""
        if self._lock is not None:
            self._lock.close()


def _end_with_parent() -> None:
    """End this process in order when the server that started it has ended.

    vLLM leaves engines of a killed server behind, and nobody else can have their folder.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        logger.warning("Manthan: the server has ended, and so does its engine.")
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="manthan-parent", daemon=True).start()


def _root(config: ManthanConfig, parallel: "ParallelConfig") -> Path:
    path, replica = Path(config.tiers.disk.path), parallel.data_parallel_index
    return path / f"replica-{replica}" if replica else path
