"""Engines with other numbers of tensor-parallel ranks read what one has stored, in Redis and on a disk."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from key_files import write_keys
from redis_server import RedisServer
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm_engine import Engine, Table, until_killed

TABLE, HEADS, BLOCK = Table(7), 2, 32
EXACT: dict[str, Any] = {"codec": {"sink_tokens": 4096}}
RANKS = [(2, 1), (1, 2, 1, 2), (2, 4, 1)]
"""Of engines one after the other. Of four ranks, two have the same head."""


def question(turn: int) -> tuple[str, str]:
    """Prompt of a turn, which begins with the one before, and the right answer."""
    entries = list(TABLE.values.items())
    lines = [f"assert {name} == {value}\n" for name, value in entries]
    name, value = entries[turn]
    return f"{TABLE.text}{''.join((2 * lines)[: 8 * turn])}assert {name} == ", value


def heads(worker: Any) -> set[str]:
    """Number of each KV head of each block that holds anything, and a digest of its numbers in all layers."""
    [blocks] = get_kv_transfer_group().worker.engine.blocks.values()
    used = {n for rows in blocks._memory._rows for n in rows.any(dim=1).nonzero()[:, 0].tolist()}
    found = set[str]()
    for block_id in used:
        keys, values = blocks._memory.gather(block_id)
        for at in range(keys.shape[1]):
            both = keys[:, at].tobytes() + values[:, at].tobytes()
            found.add(f"{blocks.format.first_head + at} {hashlib.sha256(both).hexdigest()}")
    return found


def held(engine: Engine) -> set[str]:
    return set().union(*engine.on_workers(heads))


def ask(engine: Engine, turn: int) -> tuple[int, int]:
    """Return how many full blocks a turn's prompt has, and how many of them were not computed."""
    prompt, right = question(turn)
    answer = engine.ask(prompt, "talk")
    assert answer.text == right
    assert engine.failures() == 0
    engine.wait_until_cold(1, resident=True)
    return (answer.prompt_tokens - 1) // BLOCK, answer.cached_tokens // BLOCK


def in_turn(tiers: dict[str, Any], ranks: Sequence[int], **options: Any) -> None:
    """Let engines with these numbers of ranks serve a talk, each a turn more.

    Each goes on with all that those before have stored, bit for bit, also where blocks are of several of them.
    """
    before = set[str]()
    for turn, count in enumerate(ranks):
        with until_killed(ranks=count, tiers=tiers, **EXACT | options) as engine:
            if turn:
                full, found = ask(engine, turn - 1)
                assert found == full
                assert len(before & held(engine)) >= HEADS * full
            full, found = ask(engine, turn)
            assert found < full, "there is something to store"
            before = held(engine)


def shards(server: RedisServer) -> dict[str, int]:
    """Number of values of each shard."""
    names = [name.rpartition(":")[2] for name in server.client.scan_iter("manthan:*:block:*")]
    return {name: names.count(name) for name in names}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS, ids=str)
def test_redis(tmp_path: Path, ranks: Sequence[int]) -> None:
    """Sealed, and with RAM before it."""
    sealing = {"key_file": str(write_keys(tmp_path / "keys", "one"))}
    with RedisServer(tmp_path) as server:
        in_turn({"kind": "redis", "redis": server.url, "host_bytes": "8MiB"}, ranks, sealing=sealing)
        found = shards(server)
        assert found.keys() == {"0-of-1", "0-of-2", "1-of-2"}
        assert found["0-of-2"] == found["1-of-2"], "ranks with the same head write it once"
        assert len({name.split(":")[1] for name in server.client.scan_iter("manthan:*:block:*")}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS, ids=str)
def test_disk(tmp_path: Path, ranks: Sequence[int]) -> None:
    (folder := tmp_path / "disk").mkdir()
    in_turn({"kind": "disk", "max_bytes": "64MiB", "disk": {"path": str(folder)}}, ranks)
    names = {path.parent.name for path in folder.glob("*/rank-*/blocks")}
    stored = {min(count, HEADS) for count in ranks}
    assert names == {f"rank-{rank}-of-{count}" for count in stored for rank in range(count)}, "each head once"
