"""Arms of the capacity benchmark: systems to measure, such as plain vLLM, with their memory and servers."""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer
import yaml
from pydantic import ByteSize, TypeAdapter, ValidationError

from manthan.benchmarks.restore import HOT_POOL_SHARE, MANTHAN, POOL_SESSIONS, SPARE_POSITIONS
from manthan.benchmarks.served import Served
from manthan.benchmarks.server import VllmServer
from manthan.benchmarks.whole_blocks import write_plugin
from manthan.codec.registry import codec_names, needs_profile
from manthan.manager.config.profiles import AUTO

PLAIN, OFFLOAD = "plain", "offload"
WHOLE = "whole"
"""Arm like `host`, but a full store drops whole blocks. `host` first cuts off refinements: ends that add exactness."""
OURS = ("host", WHOLE, "device", "redis", "tiered")
ARMS = (PLAIN, OFFLOAD, *OURS)
ON_GPU_ONLY = (OFFLOAD, "device")
IN_REDIS = ("redis", "tiered")
TIERED_FRONT = 5
"""The arm `tiered` has 1 / TIERED_FRONT of its store in RAM, and the rest in Redis."""


@dataclass(frozen=True)
class Memory:
    """Bytes for an arm's KV. budget: pool and store together. pool_blocks, pool_nbytes: blocks, bytes of the KV pool.

    store_nbytes: room for compressed blocks or an offload, outside the pool.
    """

    budget: int
    pool_blocks: int
    pool_nbytes: int
    store_nbytes: int


@dataclass(frozen=True)
class CapacityArm:
    """System to measure. kind: name without the codec. codec: empty without Manthan. flags: more flags of `vllm serve`.

    longest: most tokens of a prompt with its answer. manthan: configuration, or None. eager: see Served.flags.
    """

    kind: str
    codec: str
    memory: Memory
    longest: int
    manthan: dict[str, Any] | None = None
    flags: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    eager: bool = True

    @property
    def name(self) -> str:
        return f"{self.kind} {self.codec}".strip()

    def server(self, served: Served, out: Path, benchmark: str = "capacity") -> VllmServer:
        """Return the server, not started yet. Folder `out` gets Manthan's configuration, if any, and the log."""
        stem = f"{benchmark}-{self.name.replace(' ', '-')}-{ByteSize(self.memory.budget).human_readable()}"
        flags = [*served.flags(self.memory.pool_blocks, self.longest, eager=self.eager), *self.flags]
        if self.manthan is not None:
            config = out / f"{stem}.yaml"
            config.write_text(yaml.safe_dump(self.manthan, sort_keys=False))
            flags += ["--manthan-config", str(config)]
        env = {"VLLM_SERVER_DEV_MODE": "1"} | self.env  # for /reset_prefix_cache
        if self.kind == WHOLE:
            env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(write_plugin(out)), os.environ.get("PYTHONPATH"))))
        return VllmServer(str(served.folder), flags, out / f"{stem}.log", env)


def split(budget: int, served: Served, tokens: int, *, small_pool: bool) -> Memory:
    """Return the split of a budget for sessions of `tokens` tokens. vLLM's null block is part of the pool.

    The pool has all of the budget; with `small_pool` HOT_POOL_SHARE of it, or room for POOL_SESSIONS sessions if that
    is more. Raises BadParameter for a budget of less than twice that room.
    """
    blocks = budget // served.block_nbytes
    least = math.ceil(POOL_SESSIONS * tokens / served.block_size)
    if blocks < 2 * least:
        right = ByteSize(2 * least * served.block_nbytes).human_readable()
        raise typer.BadParameter(
            f"--budgets: {ByteSize(budget).human_readable()} is too small for sessions of {tokens} tokens of "
            f"{served.name}: name {right} or more, or fewer --tokens"
        )
    pool = max(math.ceil(HOT_POOL_SHARE * blocks), least) if small_pool else blocks
    return Memory(budget, pool, pool * served.block_nbytes, budget - pool * served.block_nbytes if small_pool else 0)


def make_arm(
    kind: str,
    codec: str,
    budget: int,
    served: Served,
    tokens: int,
    redis: dict[str, str],
    flags: Sequence[str],
    profile: Path | None = None,
) -> CapacityArm:
    """Return the arm with a budget, for sessions of `tokens` tokens. The other arguments are those of arm_in."""
    memory = split(budget, served, tokens, small_pool=kind != PLAIN)
    return arm_in(memory, kind, codec, tokens + SPARE_POSITIONS, redis, flags, profile)


def arm_in(
    memory: Memory,
    kind: str,
    codec: str,
    longest: int,
    redis: dict[str, str],
    flags: Sequence[str],
    profile: Path | None = None,
) -> CapacityArm:
    """Return the arm with this memory.

    longest: most tokens of a prompt with the answer. redis: url and prefix, for the arms in Redis. flags: further
    arguments of `vllm serve`. profile: of the model, for codecs that need one. With a profile Manthan's guard is off: a
    guard uses a finer codec until it has measured the loss of `codec`.
    """
    more = tuple(flags)
    if kind == PLAIN:
        return CapacityArm(kind, "", memory, longest, flags=more)
    if kind == OFFLOAD:
        size = ("--kv-offloading-size", f"{memory.store_nbytes / 2**30:.6f}")
        return CapacityArm(kind, "", memory, longest, flags=(*more, *size))
    used = {"profile": str(profile.absolute())} if profile and takes_profile(codec) else {}
    named = {"name": codec, "guard": False, **used} if profile else codec
    manthan: dict[str, Any] = {**MANTHAN, "idle.min_tokens": 0, "codec": named}
    manthan["tiers"] = _tiers(kind, memory.store_nbytes)
    if kind in IN_REDIS:
        manthan["tiers"]["redis"] = redis | {"prefix": f"{redis['prefix']}{kind}-{codec}-{memory.budget}:"}
    return CapacityArm(kind, codec, memory, longest, manthan, more)


def _tiers(kind: str, nbytes: int) -> dict[str, Any]:
    if kind == "tiered":
        front = nbytes // TIERED_FRONT
        return {"kind": "redis", "max_bytes": nbytes - front, "host_bytes": front}
    return {"kind": "host" if kind == WHOLE else kind, "max_bytes": nbytes}


# -- arguments ------------------------------------------------------------------------------------------


def read_budgets(text: str) -> list[int]:
    """Return the sizes of a text such as `64MiB,128MiB` in bytes, ascending. Raises BadParameter."""
    sizes = TypeAdapter(ByteSize)
    try:
        found = [int(sizes.validate_python(part.strip())) for part in text.split(",")]
    except ValidationError:
        found = [0]
    if min(found) <= 0:
        raise typer.BadParameter(f"--budgets must be sizes with commas between, such as 64MiB,128MiB, not {text!r}")
    return sorted(found)


def read_kinds(text: str, on_gpu: bool) -> list[str]:
    """Return names in the order of ARMS. Raises BadParameter for an unknown arm, or one that needs a missing GPU."""
    wanted = {part.strip() for part in text.split(",")} if text else {PLAIN, "host", *(ON_GPU_ONLY if on_gpu else ())}
    refuse_unknown("--arms", wanted, ARMS)
    if not on_gpu and wanted & {*ON_GPU_ONLY}:
        names = " and ".join(sorted(wanted & {*ON_GPU_ONLY}))
        raise typer.BadParameter(f"--arms {names} needs a GPU, and none was found here: name plain or host")
    return [kind for kind in ARMS if kind in wanted]


def read_codecs(text: str, profile: Path | None = None) -> list[str]:
    """Return names of codecs. Raises BadParameter for an unknown codec, or one that needs a missing profile."""
    wanted = [part.strip() for part in text.split(",")]
    known = [AUTO, *(name for name in codec_names() if profile is not None or not needs_profile(name))]
    refuse_unknown("--codecs", set(wanted), known)
    return wanted


def takes_profile(codec: str) -> bool:
    return codec == AUTO or needs_profile(codec)


def refuse_unknown(flag: str, wanted: set[str], known: Sequence[str]) -> None:
    if unknown := sorted(wanted - {*known}):
        raise typer.BadParameter(f"{flag} {', '.join(unknown)} is unknown: there are {', '.join(known)}")


def shown(arm: CapacityArm) -> str:
    """Return an arm's name and memory in a line, for the console."""
    memory = arm.memory
    store = f", {ByteSize(memory.store_nbytes).human_readable()} outside" if memory.store_nbytes else ""
    total, pool = (ByteSize(nbytes).human_readable() for nbytes in (memory.budget, memory.pool_nbytes))
    return f"{arm.name}, {total}: a pool of {pool}{store}"


def as_json(arm: CapacityArm) -> dict[str, Any]:
    """Return an arm's settings for the report."""
    memory = arm.memory
    return {
        "arm": arm.name,
        "budget": memory.budget,
        "pool_blocks": memory.pool_blocks,
        "pool_bytes": memory.pool_nbytes,
        "store_bytes": memory.store_nbytes,
        "manthan": json.loads(json.dumps(arm.manthan)),
        "flags": list(arm.flags),
    }
