"""Servers of the soak, killed and started again on the same folder: their memory, and what they say of themselves."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import psutil
import yaml
from soak_chats import BLOCK, HEADER, LONGEST

from manthan.benchmarks.endpoint import ServerError
from manthan.benchmarks.server import CHAT_TEMPLATE, VllmServer

MODEL = Path(__file__).parents[1] / "data" / "tiny-llama"
POOL_BLOCKS, TOGETHER = 128, 32
CODE_BYTES = 1000
"""About the size of a token's compressed blocks, with what a block has besides."""
HOST_SHARE, DISK_SHARE = 0.25, 0.5
"""Shares of the store's budget that a server's RAM and disk have."""
MANTHAN: dict[str, Any] = {
    "policy": "lru",
    "idle": {"after_s": 1, "min_tokens": 64},
    "tiers.pinned_share": 0.05,
    "tenants": {"header": HEADER, "shares": {"*": 0.5}},
}
START_S = 1800.0
SAMPLE_S, WINDOW_S = 2.0, 120.0
MIB = 2**20
STEADY_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(128 * 1024), "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16"}
"""Environment of vLLM's CPU build, unless the caller's says otherwise. The build makes a oneDNN primitive for each new
number of tokens. It keeps 1,024 of them between large buffers, which glibc then cannot give back. Memory would grow for
hours, also without Manthan. See docs/troubleshooting.md."""
RESET_S, SLEEP_S = 30.0, 60.0
LOOKS = 3
"""Times that a server is asked again for its metrics before that is an error."""
TOLD = (
    "vllm:manthan_",
    "vllm:prompt_tokens_cached_by_source_total",
    "vllm:kv_cache_usage_perc",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:num_preemptions_total",
)
Told = dict[str, float]
"""Values by name, without what all begin with, and by label."""


@dataclass(frozen=True)
class Setting:
    """What the servers have in common.

    Attributes:
        run: Folder for logs and configurations.
        disk: Folder of the disk tiers.
        environment: Variables that make the disk fail.
        store_bytes: Budget of the last tier, which both share.
        flags: Further flags of all servers.
    """

    run: Path
    disk: Path
    environment: dict[str, str]
    redis_url: str
    codec: str
    store_bytes: int
    flags: Sequence[str] = ()


@dataclass
class Life:
    """A server from when it answers.

    Attributes:
        server: Number of the server; -1 for the plain one.
        ready_s: When it answered, from which memory's seconds count.
        memory: Seconds, and bytes of all processes.
        told: Its last metrics.
    """

    server: int
    ready_s: float = 0.0
    end_s: float = 0.0
    memory: list[tuple[float, int]] = field(default_factory=list)
    told: Told = field(default_factory=dict)


def resident_bytes(group: int) -> int:
    """Return the resident bytes of a process group, without pages of files and what processes share.

    The system takes pages of files away when other programs need room, and brings them back.
    """
    total = 0
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.Error):  # it has just ended
            if os.getpgid(process.pid) == group:
                size = process.memory_info()
                total += size.rss - size.shared
    return total


class Rise(NamedTuple):
    """Rise of a life's memory after its warm-up, in MiB, and that divided by the hours from then on."""

    mib: float
    an_hour: float


def rise(memory: Sequence[tuple[float, int]], warm_up_s: float) -> Rise | None:
    """Return how far the highest median of two minutes after the warm-up is above the first; None without two."""
    windows: dict[int, list[int]] = {}
    for seconds, nbytes in memory:
        if seconds >= warm_up_s:
            windows.setdefault(int((seconds - warm_up_s) / WINDOW_S), []).append(nbytes)
    medians = [float(np.median(windows[at])) / MIB for at in sorted(windows)]
    if len(medians) < 2:
        return None
    mib = max(medians) - medians[0]
    return Rise(mib, mib / ((memory[-1][0] - warm_up_s) / 3600))


class Server:
    """One server, started again and again. Use as a context manager: the last life is stopped at the end.

    Args:
        number: Number of the server, or -1 for a plain one.
        lives: List of each `Life`, in the order of their starts.
    """

    is_leaving = threading.Event()
    """Set if the soak was stopped from outside: nothing more is to happen to any server."""

    def __init__(self, number: int, setting: Setting, lives: list[Life]) -> None:
        self.number, self._setting, self._lives = number, setting, lives
        self._watches = contextlib.ExitStack()
        self._starts = 0
        self.life: Life
        self.server: VllmServer

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self._watches.close()
        if self._starts:
            self.server.stop()

    @property
    def name(self) -> str:
        return "plain" if self.number < 0 else f"server-{self.number}"

    def start(self) -> None:
        """Start the process."""
        self._starts += 1
        self.life = Life(self.number)
        steady = {name: value for name, value in STEADY_MEMORY.items() if name not in os.environ}
        environment = steady | {"VLLM_SERVER_DEV_MODE": "1"}
        if self.number >= 0:
            environment |= self._setting.environment
        log = self._setting.run / f"{self.name}-{self._starts}.log"
        self.server = VllmServer(str(MODEL), self._flags(), log, environment)
        self.server.start()

    def wait(self) -> int:
        """Return the number of this life, from 1 on, when the server answers. Raises ServerError."""
        self.server.wait_until_ready(START_S)
        self.life.ready_s = time.monotonic()
        self._lives.append(self.life)
        self._watches.enter_context(self._watched())
        return len(self._lives)

    def end(self, *, kill: bool) -> None:
        """End all processes with SIGKILL, or politely."""
        life = self.life
        life.told, life.end_s = self.look(), time.monotonic()
        self._watches.close()
        if kill:
            self.server.kill()
        self.server.stop()

    def look(self) -> Told:
        """Return its metrics. Raises ServerError.

        uvicorn closes a connection that nobody used for 5 s: if it is late, one on which it was just asked.
        """
        for _ in range(LOOKS):
            with contextlib.suppress(ServerError):
                return told(self.server)
            self.check()
        return told(self.server)

    def check(self) -> None:
        """Raise ServerError if it has died, or if the soak was stopped."""
        if self.is_leaving.is_set():
            raise self.server.error("The soak was stopped.")
        if not self.server.is_alive():
            raise self.server.error(f"The server died (exit status {self.server.exit_status}).")

    def reset(self, *, drop_all: bool, stop_running: bool) -> int:
        """Reset the prefix cache, and return the number of tries. Raises ServerError if it never succeeds."""
        query = f"reset_external={str(drop_all).lower()}&reset_running_requests={str(stop_running).lower()}"
        deadline, tries = time.monotonic() + RESET_S, 0
        while time.monotonic() < deadline:
            tries += 1
            if self._post(f"/reset_prefix_cache?{query}")["success"]:
                return tries
            time.sleep(0.2)
        raise self.server.error(f"The server would not reset its prefix cache in {RESET_S:.0f} s ({tries} tries).")

    def sleep(self) -> None:
        """Sleep at level 1; requests that run or come are answered after it."""
        self._post("/sleep?level=1&mode=keep")

    def wake(self) -> None:
        if self._post("/wake_up")["status"] != "awake":
            raise self.server.error("The server did not wake up.")

    def _post(self, path: str) -> dict[str, Any]:
        try:
            answer = httpx.post(self.server.url + path, timeout=SLEEP_S)
        except httpx.TransportError as error:
            raise self.server.error(f"{path}: {error!r}") from error
        if answer.is_error:
            raise self.server.error(f"{path}: the server answered {answer.status_code}: {answer.text[:300]}")
        return dict(answer.json())

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Look at its memory every SAMPLE_S."""
        over, life, group = threading.Event(), self.life, self.server.pid
        assert group is not None

        def watch() -> None:
            while not over.wait(SAMPLE_S):
                life.memory.append((time.monotonic() - life.ready_s, resident_bytes(group)))

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()

    def _flags(self) -> list[str]:
        flags = [
            *("--dtype", "bfloat16", "--block-size", str(BLOCK), "--num-gpu-blocks-override", str(POOL_BLOCKS)),
            *("--max-model-len", str(LONGEST), "--max-num-seqs", str(TOGETHER), "--enforce-eager"),
            *("--enable-prompt-tokens-details", "--disable-uvicorn-access-log", "--chat-template", CHAT_TEMPLATE),
            *self._setting.flags,
        ]
        return flags if self.number < 0 else [*flags, "--manthan-config", str(self._config())]

    def _config(self) -> Path:
        setting, folder = self._setting, self._setting.disk / self.name
        folder.mkdir(exist_ok=True)
        store = {
            "kind": "redis",
            "host_bytes": int(HOST_SHARE * setting.store_bytes),
            "disk_bytes": int(DISK_SHARE * setting.store_bytes),
            "max_bytes": setting.store_bytes,
        }
        path = setting.run / f"{self.name}.yaml"
        more = {
            "tiers": store,
            "tiers.disk.path": str(folder),
            "tiers.redis.url": setting.redis_url,
            "codec": {"name": setting.codec, "guard": False},
        }
        path.write_text(yaml.safe_dump(MANTHAN | more))
        return path


def wait_for(servers: Sequence[Server], done: Callable[[list[Told]], bool], timeout_s: float) -> list[Told] | None:
    """Return what the servers said when that was done; None if it never was. Raises ServerError if one dies."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = [server.look() for server in servers]
        if done(found):
            return found
        pause(servers, 1.0)
    return None


def pause(servers: Sequence[Server], seconds: float) -> None:
    """Raise ServerError if a server dies meanwhile."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        for server in servers:
            server.check()
        time.sleep(min(0.5, left))


def told(server: VllmServer) -> Told:
    """Raise ServerError."""
    values: Told = {}
    for name, labels, value in server.samples(*TOLD):
        if name.endswith(("_bucket", "_created")):
            continue
        label = next((labels[one] for one in ("state", "cause", "source", "hint", "outcome") if one in labels), "")
        key = name.removeprefix("vllm:").removeprefix("manthan_") + (f"{{{label}}}" if label else "")
        values[key] = values.get(key, 0.0) + value
    return values
