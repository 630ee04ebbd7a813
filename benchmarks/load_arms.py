"""Arms of the load benchmark: systems to measure, such as plain vLLM. All but `wide` have equal KV pools.

All stores of KV outside the pool are equally large. `wide` has no store, but a pool as large as both. `plain-ordered`
is plain vLLM that serves later turns first. `host-arrival` is `host` that serves requests in the order of arrival.
"""

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from manthan.benchmarks.capacity_arms import (
    IN_REDIS,
    OFFLOAD,
    ON_GPU_ONLY,
    OURS,
    PLAIN,
    CapacityArm,
    Memory,
    arm_in,
    refuse_unknown,
    takes_profile,
)

WIDE, ORDERED, LMCACHE, DISK, ARRIVAL = "wide", "plain-ordered", "lmcache", "disk", "host-arrival"
ARMS = (PLAIN, ORDERED, WIDE, OFFLOAD, LMCACHE, ARRIVAL, *OURS[:2], DISK, *OURS[2:])
CPU_ARMS, GPU_ARMS = (PLAIN, WIDE, "host"), (PLAIN, OFFLOAD, "host")
MANTHAN_ARMS = (*OURS, DISK, ARRIVAL)
LOG_FORMAT = "%(levelname)s %(created).3f [%(filename)s:%(lineno)d] %(message)s"
"""Format of a server's log lines: with the Unix time to the millisecond, to compare lines with requests."""
LMCACHE_CHUNK_TOKENS = 256
"""Tokens of a chunk by LMCache's default."""
LMCACHE_CONNECTOR = "lmcache.integration.vllm.lmcache_mp_connector"
"""Module of the package lmcache that has a connector for vLLM."""


class LMCacheServer(NamedTuple):
    """LMCache's server process: its two ports, and the number of tokens in a chunk."""

    port: int
    http_port: int
    chunk_tokens: int


@dataclass(frozen=True)
class Arms:
    """Common settings of all arms. longest: most tokens of a prompt with the answer. requests: most requests at a time.

    more: further configuration of Manthan, by dotted key. made_up: True for made-up weights. Manthan's guard, which
    measures a codec's loss, is then off.
    """

    memory: Memory
    longest: int
    requests: int
    idle_after_s: float
    more: dict[str, Any]
    profile: Path | None
    made_up: bool
    redis: dict[str, str]
    out: Path
    flags: Sequence[str]
    lmcache: LMCacheServer | None = None

    def make(self, kind: str, codec: str) -> CapacityArm:
        """Return the arm. kind: one of ARMS. codec: empty for an arm without Manthan."""
        memory = self.memory if kind != WIDE else _all_pool(self.memory)
        base = kind if kind in (OFFLOAD, *MANTHAN_ARMS) else PLAIN
        arm = arm_in(memory, "host" if kind == ARRIVAL else base, codec, self.longest, self.redis, self._flags())
        arm = dataclasses.replace(arm, kind=kind, eager=False, env={"VLLM_LOGGING_CONFIG_PATH": str(self._logging())})
        if arm.manthan is not None:
            return dataclasses.replace(arm, manthan=arm.manthan | self._manthan(kind, codec))
        if kind == ORDERED:
            return dataclasses.replace(arm, flags=(*arm.flags, "--scheduling-policy", "priority"))
        return self._lmcache(arm) if kind == LMCACHE else arm

    def _flags(self) -> tuple[str, ...]:
        return "--enable-per-request-metrics", "--max-num-seqs", str(min(256, self.requests)), *self.flags

    def _manthan(self, kind: str, codec: str) -> dict[str, Any]:
        """Return an arm's configuration of Manthan, by dotted key. For the arm `disk`, make an empty folder."""
        profile = {"profile": str(self.profile)} if self.profile and takes_profile(codec) else {}
        options: dict[str, Any] = {
            "idle.after_s": self.idle_after_s,
            "codec": {"name": codec, "guard": not self.made_up, **profile},
        }
        if kind == DISK:
            folder = self.out / f"load-disk-{codec}"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            options["tiers.disk.path"] = str(folder)
        return options | self.more | ({"ordering": "arrival"} if kind == ARRIVAL else {})

    def _lmcache(self, arm: CapacityArm) -> CapacityArm:
        """Return the arm with LMCache's multi-process mode, in which vLLM's connector starts LMCache's server.

        LMCache takes all its RAM at the start, like Manthan, and reports no usage to its makers.
        """
        assert self.lmcache is not None
        server = {
            "--http-port": self.lmcache.http_port,
            "--l1-size-gb": f"{self.memory.store_nbytes / 2**30:.6f}",
            "--chunk-size": self.lmcache.chunk_tokens,
            "--eviction-policy": "LRU",
            "--supported-transfer-mode": "auto",
        }
        more = {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": self.lmcache.port,
            "lmcache.mp.autostart": True,
            "lmcache.mp.autostart.wait_timeout": 300,
            "lmcache.mp.autostart.server_args": " ".join(
                (*(f"{flag} {value}" for flag, value in server.items()), "--no-l1-use-lazy --disable-observability")
            ),
        }
        connector = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": more}
        flags = (*arm.flags, "--kv-transfer-config", json.dumps(connector))
        return dataclasses.replace(arm, flags=flags, env=arm.env | {"LMCACHE_TRACK_USAGE": "false"})

    def _logging(self) -> Path:
        path = self.out.resolve() / "load-logging.json"
        handler = {"class": "logging.StreamHandler", "formatter": "load", "stream": "ext://sys.stdout"}
        config = {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"load": {"format": LOG_FORMAT}},
            "handlers": {"load": handler},
            "loggers": {"vllm": {"handlers": ["load"], "level": "INFO", "propagate": False}},
        }
        path.write_text(json.dumps(config, indent=1))
        return path


def _all_pool(memory: Memory) -> Memory:
    """Return a split of the same bytes in which the pool has all."""
    block = memory.pool_nbytes // memory.pool_blocks
    blocks = memory.budget // block
    return Memory(memory.budget, blocks, blocks * block, 0)


def read_arms(text: str, on_gpu: bool) -> list[str]:
    """Return names in the order of ARMS; for an empty text the defaults. Raises BadParameter for an unknown name."""
    wanted = {part.strip() for part in text.split(",")} if text else {*(GPU_ARMS if on_gpu else CPU_ARMS)}
    refuse_unknown("--arms", wanted, ARMS)
    return [kind for kind in ARMS if kind in wanted]


def cannot_run(kind: str, on_gpu: bool) -> str:
    """Return a sentence with the reason why the arm cannot run here; empty for an arm that can."""
    if kind in ON_GPU_ONLY and not on_gpu:
        return f"Arm {kind} is left out: it needs a GPU, and none was found here."
    if kind == LMCACHE:
        tried = subprocess.run(
            [sys.executable, "-c", f"import {LMCACHE_CONNECTOR}"], capture_output=True, text=True, check=False
        )
        if tried.returncode:
            said = tried.stderr.strip().rpartition("\n")[2]
            return f"Arm lmcache is left out: the package lmcache cannot be imported here ({said})."
    if kind in IN_REDIS and shutil.which("redis-server") is None:
        return f"Arm {kind} is left out: redis-server is not installed; install it, or name a server with --redis-url."
    return ""
