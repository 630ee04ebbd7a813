"""`vllm serve` with its sessions on disk: killed while it works, started again, and what else happens to its folder."""

import os
import re
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from server_sessions import failures, restored, wait_until_cold
from warm_server import warm_server

from manthan.benchmarks.server import Reply, VllmServer

MODEL = str(Path(__file__).parents[1] / "data" / "tiny-llama")
FLAGS = [
    *("--block-size", "32", "--num-gpu-blocks-override", "131", "--max-model-len", "4096"),
    *("--enforce-eager", "--enable-prompt-tokens-details"),
]
YAML = "idle_after_s: 0.3\nmin_tokens: 64\n"
ANSWER = {"temperature": 0, "max_tokens": 4}
GUESTS = range(8)


def serve(folder: Path, log: Path, flags: Sequence[str] = ()) -> VllmServer:
    log.mkdir()
    (log / "manthan.yaml").write_text(YAML)
    manthan = ["--manthan-config", str(log / "manthan.yaml"), "--manthan-cold-store", "disk"]
    manthan += ["--manthan-disk-path", str(folder), "--manthan-cold-bytes", "64MiB"]
    return warm_server(MODEL, [*FLAGS, *manthan, *flags], log / "log")


def ask(server: VllmServer, prompt: str, session: str) -> Reply:
    return server.chat([{"role": "user", "content": prompt}], session_id=session, **ANSWER)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def killed(folder: Path, table, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The log of a server that eight guests talked to, and whose first process was killed while others were being
    answered and went cold."""
    with serve(folder, tmp_path_factory.mktemp("first") / "run") as server:
        server.wait_until_ready(600)
        for seed in GUESTS:
            prompt, right = table(seed).question(1)
            assert ask(server, prompt, f"guest-{seed}").text == right
            wait_until_cold(server)  # nobody waits for it: the next ones might overwrite it
        with ThreadPoolExecutor(4) as pool:
            for seed in range(100, 116):
                pool.submit(ask, server, table(seed).question(1)[0], f"noise-{seed}")
            went_cold = re.compile(r"noise-\d+ went cold")
            server.wait_for(lambda: bool(went_cold.search(server.log.read_text())), 60, "have somebody go cold")
            os.kill(server.pid, signal.SIGKILL)  # its engine is left behind, has the folder, and ends by itself
        yield server.new_log_lines()


@pytest.fixture(scope="module")
def again(folder: Path, killed: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """The server is started again."""
    with serve(folder, tmp_path_factory.mktemp("again") / "run") as server:
        server.wait_until_ready(600)
        yield server
        server.kill()


def test_sessions_of_a_server_that_was_killed_return(again: VllmServer, table) -> None:
    full = cached = 0
    for seed in GUESTS:
        prompt, right = table(seed).question(1)
        reply = ask(again, prompt, f"guest-{seed}")
        assert reply.text == right
        full += (reply.prompt_tokens - 1) // 32
        cached += reply.cached_tokens // 32
    assert cached >= 0.95 * full
    assert restored(again) == cached
    assert not failures(again)
    [said] = [line for line in again.new_log_lines() if "sessions of an earlier server are cold again" in line]
    print(f"{cached} of {full} full blocks came back: {said}")


@pytest.mark.slow
def test_another_server_is_refused_with_one_sentence(again: VllmServer, folder: Path, tmp_path: Path) -> None:
    with serve(folder, tmp_path / "run") as other:
        other.wait_until_dead(300)
        lines = other.new_log_lines()
    assert other.exit_status not in (0, None)
    assert [line for line in lines if line.startswith("vllm: error:")] == [
        f"vllm: error: disk.path is '{folder}', which another server uses: give each a folder of its own."
    ]
    assert not [line for line in lines if "Traceback" in line]
    assert again.is_healthy()
