"""KV events: what a router learns of what is stored is what is stored, neither more nor less."""

import json
import os
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import group_models
import pytest
import redis_server
from scripts import run_script
from vllm_engine import MODEL

SCRIPT = "event_sessions.py"
MINUTES = float(os.environ.get("EVENTS_MINUTES", "10"))
"""How long the long run takes."""


@pytest.fixture
def sockets() -> Iterator[str]:
    """A folder whose path is short enough for them."""
    with tempfile.TemporaryDirectory(prefix="events-", dir="/tmp") as folder:
        yield folder


def live(folder: str, seed: int, store: dict[str, Any], **more: Any) -> dict[str, Any]:
    """One engine's life; it is killed at the end."""
    environment = {"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": str(seed % 2)}
    codec = {"name": "k3v3", "sink_tokens": 0, "guard": False}
    manthan = {"idle.min_tokens": 64, "codec": codec} | store
    job = {"model": MODEL, "blocks": 100, "actions": 25, "seconds": 0, "resets": False} | more
    out, _ = run_script(SCRIPT, job | {"folder": folder, "seed": seed, "manthan": manthan}, **environment)
    told: dict[str, Any] = json.loads(out)
    assert told["came"]["stored"] > 0 < told["came"]["hashed"]
    return told


def on_disk(folder: Path, max_bytes: str = "4MiB") -> dict[str, Any]:
    return {"tiers": {"kind": "disk", "max_bytes": max_bytes, "disk": {"path": str(folder)}}}


def test_a_subscriber_knows_what_is_stored_also_after_a_restart(sockets: str, tmp_path: Path) -> None:
    first = live(sockets, 1, on_disk(tmp_path))
    assert first["first"] == []
    assert first["came"]["removed"] > 0 < first["came"]["promised"]
    second = live(sockets, 2, on_disk(tmp_path), resets=True, actions=15)
    assert second["first"] == first["last"] != []


def test_with_windows_what_anchors_are_made_of_is_told_too(sockets: str, tmp_path: Path) -> None:
    model = group_models.made("gpt-oss", tmp_path / "model")
    live(sockets, 3, {"tiers": {"kind": "host", "max_bytes": "6MiB"}}, model=model, blocks=160, resets=True)


@pytest.mark.slow
def test_of_what_others_have_in_redis_each_tells_what_it_has_found(sockets: str, tmp_path: Path) -> None:
    for server in redis_server.running(tmp_path):
        redis = {"tiers": {"kind": "redis", "max_bytes": "4MiB", "redis": {"url": server.url}}}
        assert live(sockets, 5, redis, actions=40)["came"]["removed"] > 0
        second = live(sockets, 5, redis, actions=15)
        assert second["first"] == []
        assert second["came"]["restored"] > 0


@pytest.mark.slow
def test_for_ten_minutes(sockets: str, tmp_path: Path) -> None:
    """Lives of a minute or less on a disk, one after the other, and between them others with windows, states or RAM."""
    chance, until, told, seed = random.Random(0), time.monotonic() + 60 * MINUTES, [], 100
    families = {name: group_models.made(name, tmp_path / name) for name in ("gpt-oss", "qwen3-next", "mistral")}
    left: list[str] = []
    (tmp_path / "disk").mkdir()
    while time.monotonic() < until:
        seed, is_void = seed + 1, chance.random() < 0.3
        lasts = {"actions": 60, "seconds": min(40.0, max(0.0, until - time.monotonic()))}
        found = live(sockets, seed, on_disk(tmp_path / "disk"), resets=is_void, **lasts)
        assert found["first"] == left
        left = [] if found["came"]["resets"] else found["last"]
        host = {"tiers": {"kind": "host", "max_bytes": chance.choice(["2MiB", "6MiB"])}}
        name, model = chance.choice([("llama", MODEL), *families.items()])
        blocks = {"qwen3-next": 40}.get(name, 160)
        told += [found, live(sockets, 1000 + seed, host, model=model, blocks=blocks, resets=True, actions=30)]
    came = [life["came"] for life in told]
    total = {what: sum(each[what] for each in came) for what in came[0]}
    print(f"{len(came)} lives: {total}")
    assert all(total.values())
