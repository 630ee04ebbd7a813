"""SIGTERM to `vllm serve` on a disk: idle sessions are saved first, and the next server has them."""

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import yaml
from api_client import ApiClient
from vllm_engine import MODEL, Table
from warm_server import warm_server

from manthan.benchmarks.server import VllmServer

FLAGS = ["--block-size", "32", "--num-gpu-blocks-override", "400", "--max-model-len", "8192", "--enforce-eager"]
START_S = 600
DRAIN_S = 120
LATE_S = 60
"""Most seconds that the end takes besides, on a machine that does other things."""
GUESTS, LONG = range(4), 8000
SAVED = "sessions are saved before the engine ends"


@dataclass
class End:
    """What was seen of a server's end. tokens: that a request got which ran when it began, of LONG."""

    log: str
    exit_status: int | None
    tokens: int = 0

    @property
    def is_clean(self) -> bool:
        """True if it ended as vLLM does. That fails where its core ends while it is being looked up."""
        return self.exit_status == 0 or "psutil.ZombieProcess" in self.log.splitlines()[-1]


def serve(folder: Path, number: int, drain_s: float) -> VllmServer:
    """Serve on the disk in this folder; nothing is saved while the server runs."""
    config, disk = folder / f"{number}.yaml", folder / "disk"
    disk.mkdir(exist_ok=True)
    tiers = {"kind": "disk", "max_bytes": "64MiB", "drain_s": drain_s, "disk": {"path": str(disk)}}
    config.write_text(yaml.safe_dump({"idle": {"after_s": 3600, "min_tokens": 64}, "tiers": tiers}))
    flags = [*FLAGS, "--manthan-config", str(config), "--enable-prompt-tokens-details"]
    return warm_server(MODEL, flags, folder / f"{number}.log")


def ask(server: VllmServer, seed: int) -> tuple[int, int]:
    """Return the full blocks of a guest's prompt, and how many of them were not computed. The answer is right."""
    prompt, right = Table(seed).question(1)
    reply = server.complete(prompt, max_tokens=4, temperature=0, ignore_eos=True, session_id=f"guest-{seed}")
    assert reply.text == right
    return (reply.prompt_tokens - 1) // 32, reply.cached_tokens // 32


def sessions(server: VllmServer) -> dict[str, int]:
    """Return the number of sessions in each state."""
    found: dict[str, int] = ApiClient(server).get("/state")["sessions"]
    return found


def terminate(server: VllmServer, drain_s: float) -> End:
    """Send SIGTERM, and wait until the server has ended."""
    assert server.pid is not None
    os.kill(server.pid, signal.SIGTERM)
    until = time.monotonic() + drain_s + LATE_S
    while server.is_alive():
        assert time.monotonic() < until, "the server does not end"
        time.sleep(0.1)
    return End(server.log.read_text(), server.exit_status)


def terminate_amid_a_request(server: VllmServer, drain_s: float) -> End:
    runs, tokens = threading.Event(), 0

    def read() -> None:
        nonlocal tokens
        body = {"model": MODEL, "prompt": "say", "max_tokens": LONG, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=drain_s) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    tokens += len(json.loads(line.removeprefix("data: "))["choices"])
                    runs.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert runs.wait(DRAIN_S)
    end = terminate(server, drain_s)
    reader.join()
    end.tokens = tokens
    return end


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drain")


@pytest.fixture(scope="module")
def drained(folder: Path) -> End:
    """The end of a server on which guests were idle and not saved, and a request ran."""
    with serve(folder, 1, DRAIN_S) as server:
        server.wait_until_ready(START_S)
        assert {ask(server, seed)[1] for seed in GUESTS} == {0}
        assert sessions(server) == {"active": 0, "idle": len(GUESTS), "cold": 0}
        return terminate_amid_a_request(server, DRAIN_S)


@pytest.fixture(scope="module")
def second(folder: Path, drained: End) -> Iterator[VllmServer]:
    """The next server on the same disk, which saves nothing at its end."""
    with serve(folder, 2, 0) as server:
        server.wait_until_ready(START_S)
        yield server


def test_the_server_ends_once_its_idle_sessions_are_saved(drained: End) -> None:
    assert drained.is_clean
    [saved] = re.findall(rf"(\d+) {SAVED}", drained.log)
    assert int(saved) in (len(GUESTS), len(GUESTS) + 1), "and the one that was aborted, if it was long enough"
    assert "not saved within" not in drained.log
    engine = [line for line in drained.log.splitlines() if line.startswith("(EngineCore")]
    assert not any(" ERROR " in line for line in engine)


def test_requests_that_run_are_aborted_at_once(drained: End) -> None:
    assert 0 < drained.tokens < LONG
    aborted, saved = (drained.log.index(line) for line in ("aborting in-flight requests count=1", SAVED))
    assert aborted < saved


def test_the_next_server_has_all_of_them_and_one_that_does_not_drain_saves_nothing(second: VllmServer) -> None:
    assert sessions(second)["cold"] >= len(GUESTS)
    found = [ask(second, seed) for seed in GUESTS]
    assert all(cached == full > 10 for full, cached in found)
    assert ask(second, max(GUESTS) + 1)[1] == 0
    end = terminate(second, 0)
    assert end.is_clean
    assert SAVED not in end.log
