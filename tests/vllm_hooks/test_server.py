"""`vllm serve` as an operator runs it, with the flags and without."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from manthan.benchmarks.server import Reply, VllmServer
from manthan.manager.config.resolve import FLAG_KEYS
from manthan.vllm_hooks.telemetry.metrics import METRICS

REPO = Path(__file__).parents[2]
ANSWER = {"temperature": 0, "max_tokens": 4}


@pytest.fixture(scope="module")
def server(manthan_server: VllmServer) -> VllmServer:
    """Without a session of other tests."""

    def is_empty() -> bool:
        httpx.post(f"{manthan_server.url}/reset_prefix_cache?reset_external=true")
        ask(manthan_server, "x", "short")  # the reset reaches the metrics with the next step
        text = httpx.get(f"{manthan_server.url}/metrics").text
        return all(f'state="{state}"}} 0.0' in text for state in ("active", "idle", "cold"))

    manthan_server.wait_for(is_empty, 60, "forget its sessions")
    assert any("cold store is emptied" in line for line in manthan_server.new_log_lines())
    return manthan_server


def ask(server: VllmServer, prompt: str, session: str, **fields: Any) -> Reply:
    return server.chat([{"role": "user", "content": prompt}], session_id=session, **ANSWER, **fields)


def wait_until_cold(server: VllmServer) -> None:
    def is_cold() -> bool:
        text = httpx.get(f"{server.url}/metrics").text
        return 'state="cold"} 3.0' in text and 'state="idle"} 0.0' in text

    server.wait_for(is_cold, 60, "show three cold sessions")
    assert httpx.post(f"{server.url}/reset_prefix_cache").json() == {"success": True}  # what returns is restored


def test_sessions_go_cold_and_return(server, table) -> None:
    tables = [table(seed) for seed in range(3)]
    for n, t in enumerate(tables):
        prompt, right = t.question(1)
        assert ask(server, prompt, f"guest-{n}").text == right
    wait_until_cold(server)
    started = server.log.read_text().splitlines()
    assert len([line for line in started if "Manthan is on: policy lru, codec wht-5x (4.88x" in line]) == 1
    assert len([line for line in started if f"the live page is at {server.url}/manthan/" in line]) == 1
    assert len([line for line in started if "idle after 0.5 s" in line and "64.0MiB for 79872 tokens" in line]) == 1
    lines = server.new_log_lines()
    restored = []
    for n, t in enumerate(tables):
        assert len([line for line in lines if "INFO" in line and f"session guest-{n} went cold" in line]) == 1
        prompt, right = t.question(1)
        reply = ask(server, prompt, f"guest-{n}")
        assert reply.text == right
        blocks = (reply.prompt_tokens - 1) // 32
        assert reply.cached_tokens == blocks * 32
        restored.append(f"session guest-{n} restored {blocks} of {blocks} blocks")
    lines = server.new_log_lines()
    assert [len([line for line in lines if "INFO" in line and what in line]) for what in restored] == [1, 1, 1]


def test_every_metric_is_on_the_metrics_page(server) -> None:
    text = httpx.get(f"{server.url}/metrics").text
    for name in METRICS:
        assert f"vllm:manthan_{name}" in text
    metrics = server.metrics()
    ratios = [pytest.approx(ratio, abs=0.03) for ratio in (4.06, 4.84)]  # wht-4x until there is a verdict, then wht-5x
    assert metrics["vllm:manthan_compression_ratio"] in ratios
    assert metrics["vllm:manthan_restores_total"] >= 3
    assert metrics["vllm:manthan_restored_blocks_total"] >= 3 * 17
    assert metrics["vllm:manthan_encode_seconds_count"] == metrics["vllm:manthan_encoded_blocks_total"]
    restored = metrics["vllm:manthan_restored_blocks_total"]
    nbytes = metrics["vllm:manthan_restore_bytes_sum"]  # of wht-5x, wht-4x, and exact blocks of what sessions share
    assert 0.95 * 27_000 * restored < nbytes < 0.75 * 131_072 * restored


def test_a_cache_salt_is_shown_nowhere(server, table) -> None:
    salt = "a-salt-that-nobody-may-see"
    server.new_log_lines()
    ask(server, table(4).question(1)[0], "salted", cache_salt=salt, kv_transfer_params={"manthan": {"priority": 1}})
    lines: list[str] = []

    def is_cold() -> bool:
        lines.extend(server.new_log_lines())
        return any("session salted went cold" in line for line in lines)

    server.wait_for(is_cold, 120, "compress the session")
    assert salt not in "".join(lines)
    assert salt not in httpx.get(f"{server.url}/metrics").text


def test_without_flags_it_is_plain_vllm(plain_server, table) -> None:
    prompt, right = table(0).question(1)
    first, again = (ask(plain_server, prompt, "guest-0") for _ in range(2))
    assert (first.text, first.cached_tokens) == (right, 0)
    assert (again.text, again.cached_tokens) == (right, (again.prompt_tokens - 1) // 32 * 32)
    hints = {"manthan": {"no such hint": 1}}
    assert ask(plain_server, prompt, "guest-0", kv_transfer_params=hints).text == right
    assert "vllm:manthan" not in httpx.get(f"{plain_server.url}/metrics").text
    lines = plain_server.log.read_text().replace(str(REPO), "").splitlines()  # a clone may be called manthan
    assert not [line for line in lines if "anthan" in line and not re.search("--manthan|GET /manthan", line)]


@pytest.mark.slow
def test_the_flags_have_a_group_of_their_own_in_the_help() -> None:
    vllm = Path(sys.executable).with_name("vllm")
    page = subprocess.run([vllm, "serve", "--help=Manthan"], capture_output=True, text=True, check=True).stdout
    for flag in FLAG_KEYS:
        assert flag in page
    assert "Session memory manager" in page
