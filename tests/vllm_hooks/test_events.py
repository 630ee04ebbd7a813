"""KV events: what a router learns of what is stored is what is stored, neither more nor less."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import group_models
import pytest
import redis_server
from scripts import run_script
from vllm_engine import MODEL


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
    job = {"model": MODEL, "blocks": 100, "actions": 25, "resets": False} | more
    job |= {"folder": folder, "seed": seed, "manthan": manthan}
    told: dict[str, Any] = run_script("event_sessions.py", job, **environment)[0]
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


@pytest.mark.slow
def test_with_windows_what_resume_points_are_made_of_is_told_too(sockets: str, tmp_path: Path) -> None:
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
