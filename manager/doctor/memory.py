"""RAM for codes: what the machine has, what its container may take, and what may be pinned."""

import resource
from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic import ByteSize

from manthan.manager.config.model import ColdStoreConfig
from manthan.manager.doctor.finding import Finding, Mark

RAM, PINNED = "RAM", "pinned RAM"
PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
TRIED_NBYTES = 64 << 20
"""So much is pinned at most, to see whether that can be done."""


def ram_of(store: ColdStoreConfig) -> tuple[int, str]:
    """How many bytes of RAM codes may take, and the key that says so; 0 for none."""
    if store.kind == "host":
        return store.max_bytes, "cold_store.max_bytes"
    nbytes = store.front_bytes or store.host_bytes
    return nbytes, "cold_store.host_bytes" if store.host_bytes else "a quarter of cold_store.max_bytes"


def check_ram(store: ColdStoreConfig, proc: Path = PROC, cgroups: Path = CGROUPS) -> Finding:
    """Whether there is as much RAM as codes may take. proc, cgroups: where the kernel tells it."""
    wanted, key = ram_of(store)
    if not wanted:
        return Finding(RAM, Mark.SKIPPED, f"cold_store.kind is {store.kind}, which keeps no codes in RAM.")
    told = _meminfo(proc)
    limit = cgroup_limit(proc, cgroups)
    most, whose = told["MemTotal"], "this machine has"
    if limit is not None and limit < most:
        most, whose = limit, "its cgroup (the container's memory limit) allows"
    if wanted >= most:
        return Finding(
            RAM,
            Mark.WRONG,
            f"{key} is {_size(wanted)}, but {whose} {_size(most)} of RAM, in which vLLM has to live too: lower it.",
        )
    free = min(told["MemAvailable"], most)
    if wanted > free:
        return Finding(
            RAM,
            Mark.WARNING,
            f"{key} is {_size(wanted)}, and only {_size(free)} of {_size(most)} are free now: lower it, or end what "
            "takes the rest.",
        )
    return Finding(
        RAM, Mark.OK, f"{key} is {_size(wanted)}, of {_size(most)} that {whose}, {_size(free)} of them free."
    )


def check_pinning(store: ColdStoreConfig, pin: Callable[[int], str] | None, limit: int | None = None) -> Finding:
    """Whether the RAM that a GPU reads codes from can be locked.

    pin: tries that with so many bytes, and returns why it cannot be done, or "". None where nothing is pinned. limit:
    how many bytes a process may lock (RLIMIT_MEMLOCK, ulimit -l), -1 for any number; the real one unless given.
    """
    wanted, key = ram_of(store)
    if pin is None or not wanted:
        why = "there is no GPU" if pin is None else "no codes are kept in RAM"
        return Finding(PINNED, Mark.SKIPPED, f"{why}, so that none is pinned.")
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    is_enough = limit == resource.RLIM_INFINITY or limit >= wanted
    said = "unlimited" if limit == resource.RLIM_INFINITY else _size(limit)
    tried = min(wanted, max(TRIED_NBYTES, 0 if is_enough else limit + 1))
    if why := pin(tried):
        raised = "" if is_enough else ", or raise it (ulimit -l unlimited, LimitMEMLOCK=infinity, --ulimit memlock=-1)"
        return Finding(
            PINNED,
            Mark.WRONG,
            f"{_size(tried)} of RAM cannot be pinned ({why}), the memlock limit is {said}, and {key} is "
            f"{_size(wanted)}: lower that{raised}.",
        )
    beyond = "" if is_enough else ", which the driver does not count"
    return Finding(PINNED, Mark.OK, f"{_size(tried)} were pinned for a moment; the memlock limit is {said}{beyond}.")


def cgroup_limit(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """The bytes that this process's control groups (version 1 or 2) may take; None for no limit."""
    limits = []
    for file in _limit_files(proc, cgroups):
        text = file.read_text().strip() if file.is_file() else "max"
        limits += [int(text)] if text.isdigit() else []
    return min(limits, default=None)


def _limit_files(proc: Path, cgroups: Path) -> Iterator[Path]:
    """Of the groups that this process is in, from the innermost to the root as it is seen from here."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root, name = (cgroups / "memory", "memory.limit_in_bytes") if controllers else (cgroups, "memory.max")
        folder = root / path.strip("/")
        yield from (each / name for each in (folder, *folder.parents) if each.is_relative_to(root))


def _meminfo(proc: Path) -> dict[str, int]:
    """Bytes by name, as in /proc/meminfo."""
    lines = (line.split() for line in (proc / "meminfo").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) > 1}


def _size(nbytes: int) -> str:
    return ByteSize(nbytes).human_readable()
