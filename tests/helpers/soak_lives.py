"""The server of the soak, killed and started again on the same folder: its memory, and what it says of itself."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml
from soak_chats import BLOCK, HEADER
from soak_faults import Disk

from manthan.benchmarks.endpoint import ServerError
from manthan.benchmarks.server import CHAT_TEMPLATE, VllmServer
from manthan.benchmarks.soak_memory import MemorySampler, Sample
from manthan.benchmarks.soak_run import STEADY_MEMORY

MODEL = Path(__file__).parents[1] / "data" / "tiny-llama"
POOL_BLOCKS, LONGEST, TOGETHER = 256, 1024, 64
RAM_S, DISK_S = 3, 36
"""Budgets are for what comes in so many seconds."""
SESSION_BYTES = 100_000
"""About what the codes of one take."""
MANTHAN: dict[str, Any] = {
    "policy": "lru",
    "idle_after_s": 1,
    "sweep_interval_s": 0.25,
    "min_tokens": 64,
    "quotas": {"header": HEADER, "default_share": 0.5, "pinned_share": 0.05},
    "prefetch": {"lead_s": 1},
}
DISK_SETTINGS = {"timeout_s": 0.5, "sync_s": 1}
START_S = 300.0
SAMPLE_S = 2.0
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


@dataclass
class Life:
    """Of the server, from when it answers. Seconds of the run; memory's are from `ready_s` on. told: its last words.
    processor_s: of each of its processes, without the start."""

    start_s: float
    ready_s: float = 0.0
    end_s: float = 0.0
    processor_s: dict[str, float] = field(default_factory=dict)
    memory: list[Sample] = field(default_factory=list)
    told: Told = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"memory": [list(sample) for sample in self.memory]}


class Lives:
    """Use as a context manager: the last one is stopped at the end. rate: new sessions a second, for budgets.
    on_sample: what else is to be written down."""

    def __init__(self, run: Path, disk: Disk, rate: float, codec: str, on_sample: Callable[[], Told]) -> None:
        self._run, self._disk, self._rate, self._codec, self._on_sample = run, disk, rate, codec, on_sample
        self._began = time.monotonic()
        self.lives: list[Life] = []
        self.samples: list[Told] = []
        self._stack, self._watches = contextlib.ExitStack(), contextlib.ExitStack()
        self.server: VllmServer

    def __enter__(self) -> "Lives":
        return self

    def __exit__(self, *_: object) -> None:
        self._watches.close()
        self._stack.close()

    def now(self) -> float:
        return time.monotonic() - self._began

    def begin(self) -> str:
        """Returns its URL when it answers. Raises ServerError."""
        life = Life(self.now())
        number = len(self.lives) + 1
        steady = {name: value for name, value in STEADY_MEMORY.items() if name not in os.environ}
        self.server = VllmServer(
            str(MODEL), flags(self._config()), self._run / f"life-{number}.log", self._disk.environment | steady
        )
        self._stack.enter_context(self.server)
        self.server.wait_until_ready(START_S)
        life.ready_s = self.now()
        self._start_processor_s = self._processor_s()
        self.lives.append(life)
        assert self.server.pid is not None
        sampler = self._watches.enter_context(MemorySampler(self.server.pid))
        life.memory = sampler.samples
        self._watches.enter_context(self._watched())
        return self.server.url

    def end(self, *, kill: bool) -> None:
        """With SIGKILL, or politely."""
        life = self.lives[-1]
        life.told, life.end_s = self.look(), self.now()
        life.processor_s = {
            name: seconds - self._start_processor_s.get(name, 0) for name, seconds in self._processor_s().items()
        }
        self._watches.close()
        if kill:
            self.server.kill()
        self._stack.close()

    def look(self) -> Told:
        """What it says now. Raises ServerError."""
        return told(self.server)

    def wait_for(self, done: Callable[[Told], bool], timeout_s: float) -> Told | None:
        """What it said when that was done; None if it never was. Raises ServerError if it dies."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            found = self.look()
            if done(found):
                return found
            self.pause(1.0)
        return None

    def pause(self, seconds: float) -> None:
        """Raises ServerError if it dies meanwhile."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if not self.server.is_alive():
                raise self.server.error(f"The server died (exit status {self.server.exit_status}).")
            time.sleep(min(0.5, left))

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """A sample every SAMPLE_S."""
        over, server = threading.Event(), self.server

        def watch() -> None:
            while not over.wait(SAMPLE_S):
                with contextlib.suppress(ServerError):  # who asks it something finds out, too
                    took = {"processor_s": sum(self._processor_s().values())}
                    found = {name: value for name, value in told(server).items() if value}
                    self.samples.append({"at_s": self.now()} | self._on_sample() | took | found)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()

    def _config(self) -> Path:
        come = int(self._rate * SESSION_BYTES)
        store = {"kind": "tiered", "tiers": ["host", "disk"], "host_bytes": RAM_S * come, "max_bytes": DISK_S * come}
        path = self._run / "soak.yaml"
        disk = {"path": str(self._disk.folder)} | DISK_SETTINGS
        codec = {"name": self._codec}
        path.write_text(yaml.safe_dump(MANTHAN | {"cold_store": store, "disk": disk, "codec": codec}))
        return path

    def _processor_s(self) -> dict[str, float]:
        assert self.server.pid is not None
        return group_processor_s(self.server.pid)


def flags(config: Path) -> list[str]:
    return [
        *("--dtype", "bfloat16", "--block-size", str(BLOCK), "--num-gpu-blocks-override", str(POOL_BLOCKS)),
        *("--max-model-len", str(LONGEST), "--max-num-seqs", str(TOGETHER), "--enforce-eager"),
        *("--enable-prompt-tokens-details", "--disable-uvicorn-access-log", "--chat-template", CHAT_TEMPLATE),
        *("--manthan-config", str(config)),
    ]


def told(server: VllmServer) -> Told:
    """Raises ServerError."""
    values: Told = {}
    for name, labels, value in server.samples(*TOLD):
        if name.endswith(("_bucket", "_created")):
            continue
        label = next((labels[one] for one in ("state", "cause", "source", "hint") if one in labels), "")
        key = name.removeprefix("vllm:").removeprefix("manthan_") + (f"{{{label}}}" if label else "")
        values[key] = values.get(key, 0.0) + value
    return values


def group_processor_s(group: int) -> dict[str, float]:
    """Of the processes of this group that are there, by what they call themselves."""
    seconds: dict[str, float] = {}
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group:
                times, name = process.cpu_times(), process.name()
                seconds[name] = seconds.get(name, 0.0) + times.user + times.system
        except (ProcessLookupError, psutil.Error):  # it has just ended
            continue
    return seconds
