"""A profile from a server's own traffic on a GPU: new blocks use it, and old ones return."""

import time
from collections.abc import Iterator
from pathlib import Path

import gpu_worker
import pytest
from traffic import hasten
from vllm_engine import Engine, Table, running

CHATS, WITHIN_S = 8, 300.0
"""WITHIN_S: the first profile waits for the compilation of kernels."""


@pytest.fixture(params=["host", "device"])
def engine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # for the profile
    for engine in running(blocks=131, idle=0.1, tiers={"kind": request.param, "max_bytes": "512MiB"}):
        engine.on_worker(hasten)
        yield engine


def talk(engine: Engine, seeds: range) -> None:
    """Hold a session with each seed, and have all of them go cold."""
    before = engine.sessions("cold")
    for seed in seeds:
        engine.ask(Table(seed).question(seed % 5)[0], f"chat {seed}")
    engine.wait_until_cold(int(before) + len(seeds))


def test_new_blocks_use_the_profile_and_old_ones_return(engine: Engine, tmp_path: Path) -> None:
    assert engine.on_worker(gpu_worker.engine_name) == "CudaEngine"
    seed, until = 0, time.monotonic() + WITHIN_S
    while "klt-8x" not in engine.on_worker(gpu_worker.codecs):
        assert time.monotonic() < until, "the profile is not used"
        talk(engine, range(seed, seed + CHATS))
        seed += CHATS
    assert {"klt-8x", "wht-5x"} <= set(engine.on_worker(gpu_worker.codecs))
    for old in (1, seed - 1):
        prompt, right = Table(old).question(old % 5)
        answer = engine.ask(prompt, f"chat {old}")
        assert (answer.text, answer.cached_tokens) == (right, (answer.prompt_tokens - 1) // 32 * 32)
    assert engine.failures() == 0
    [file] = [each for each in tmp_path.rglob("*") if each.is_file() and each.suffix == ".safetensors"]
    assert file.stat().st_size > 0
