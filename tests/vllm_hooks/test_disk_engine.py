"""Engines one after the other on one folder: what each finds again, and what it does not."""

import random
import shutil
import sqlite3
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import group_models
import pytest
from vllm_engine import Completion, Engine, Table, until_killed

from manthan.manager.tiers.journal import JOURNAL

SLOW = pytest.mark.slow
GUESTS = range(8)
ALL = 100_000
"""More first tokens than any session has: all are kept exact."""


def engine(folder: Path, **options: Any) -> AbstractContextManager[Engine]:
    """Its pool has room for all guests, so that none is overwritten before it is saved, however slow the machine is."""
    store = {"tiers": {"kind": "disk", "max_bytes": "64MiB", "disk": {"path": str(folder)}}}
    return until_killed(**({"blocks": 161} | store | options))


def ask_all(engine: Engine, seed: int = 0) -> tuple[int, int]:
    """How many full blocks the guests' prompts have, and how many of them were not computed; all answers are right."""
    full = cached = 0
    for guest in GUESTS:
        prompt, right = Table(10 * seed + guest).question(3)
        answer = engine.ask(prompt, f"guest-{seed}-{guest}")
        assert answer.text == right
        full += (answer.prompt_tokens - 1) // 32
        cached += answer.cached_tokens // 32
    engine.wait(lambda: not any(map(engine.sessions, ("active", "idle"))), "only cold sessions")
    return full, cached


def all_return(engine: Engine) -> bool:
    """Whether all is found again that nothing but the disk has."""
    engine.empty_pool()
    full, cached = ask_all(engine)
    return cached == full


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/rank-0-of-1/blocks"))


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an engine that eight guests talked to, killed while others were being answered and went cold."""
    folder = tmp_path_factory.mktemp("killed")
    with engine(folder) as first:
        assert ask_all(first)[1] == 0
        evictions = first.metric("manthan_evictions_total")
        for seed in range(100, 116):
            first.start(first.generate(Table(seed).question(1)[0], f"noise-{seed}", 40))
        first.wait(lambda: first.metric("manthan_evictions_total") > evictions, "somebody else who goes cold")
    return folder


@pytest.fixture
def left(killed: Path, tmp_path: Path) -> Path:
    """The same, for one test."""
    return shutil.copytree(killed, tmp_path, dirs_exist_ok=True)


@pytest.mark.slow
def test_all_that_was_cold_when_it_was_killed_returns(left: Path) -> None:
    """Behind a reset nothing of it is found again, neither by this engine nor by the next one."""
    with engine(left) as second:
        assert all_return(second)
        assert second.failures() == 0
        second.wait(lambda: second.reset(cold=True), "a reset")
        assert ask_all(second)[1] == 0
        assert all_return(second), "it is of use until the end"
        assert files_of(left) == []
        with sqlite3.connect(next(left.glob("*/sessions.sqlite"))) as db:
            assert db.execute("SELECT count(*) FROM sessions").fetchone() == (0,)
    with engine(left) as third:
        assert third.sessions("cold") == 0
        assert ask_all(third)[1] == 0


@pytest.mark.slow
def test_with_all_files_damaged_it_starts_and_computes(left: Path) -> None:
    """Folders are where files were, but for the journal, which begins with zeros."""
    files = [path for path in left.rglob("*") if path.is_file()]
    for file in files:
        if file.suffix == ".sqlite":
            file.write_bytes(bytes(4096) + file.read_bytes()[4096:])
        else:
            file.unlink()
            file.mkdir()
            (file / "in it").touch()
    with engine(left) as other:
        assert ask_all(other)[1] == 0
        assert all_return(other)
    assert all(file.with_name(f"{file.name}.bad").exists() for file in files if file.name in ("blocks", JOURNAL))


@SLOW
def test_a_conversation_with_states_goes_on_in_the_next_engine(tmp_path: Path) -> None:
    (folder := tmp_path / "disk").mkdir()
    flags = {"skip_tokenizer_init": True, "max_num_seqs": 4, "max_num_batched_tokens": 2048, "seed": 0}
    options = {
        "model": group_models.made("qwen3-next", tmp_path / "model"),
        "flags": flags,
        "blocks": 64,
        "codec": {"name": "k3v3", "sink_tokens": ALL, "guard": False},
    }
    rng = random.Random(5)
    prompt = [rng.randrange(10, 1000) for _ in range(420)]

    def turn(on: Engine) -> Completion:
        return on.run(on.complete(prompt, "talk", 40))

    with engine(folder, **options) as first:
        said = turn(first)
        first.wait_until_cold(1)
    prompt += said.tokens + [rng.randrange(10, 1000) for _ in range(60)]
    with engine(folder, **options) as second:
        found = turn(second)
    assert found.cached_tokens > 300
    with engine(folder, **options | {"tiers": "host"}) as alone:
        computed = turn(alone)
    assert computed.cached_tokens == 0
    assert found.tokens[:8] == computed.tokens[:8]
