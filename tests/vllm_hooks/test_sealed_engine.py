"""Engines whose compressed blocks are sealed at rest: restarts, with keys that change meanwhile."""

from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from key_files import write_keys
from vllm_engine import Engine, Table, until_killed

GUESTS = {"alice-doe": "acme", "bob-poole": "", "carol-sue": "acme", "dave-smith": ""}


def engine(folder: Path) -> AbstractContextManager[Engine]:
    store = {"kind": "disk", "max_bytes": "64MiB", "disk": {"path": str(folder / "codes")}}
    return until_killed(tiers=store, sealing={"key_file": str(folder / "keys")})


def ask_all(engine: Engine) -> list[bool]:
    """Which guests have returned; answers are right in any case."""
    return [ask(engine, name) for name in GUESTS]


def ask(engine: Engine, name: str) -> bool:
    prompt, right = Table(sorted(GUESTS).index(name)).question(3)
    answer = engine.ask(prompt, name, tenant=GUESTS[name] or None)
    assert answer.text == right
    return answer.cached_tokens >= (answer.prompt_tokens - 1) // 32 * 32


def all_are_cold(engine: Engine) -> None:
    engine.wait(lambda: engine.sessions("cold") == len(GUESTS), "all sessions cold")


@pytest.mark.slow
def test_sessions_return_to_who_has_the_keys(tmp_path: Path) -> None:
    path, codes = tmp_path / "keys", tmp_path / "codes"
    write_keys(path, "k1")
    codes.mkdir()
    with engine(tmp_path) as first:
        assert ask_all(first) == [False] * 4
        all_are_cold(first)
    kept = b"".join(path.read_bytes() for path in codes.rglob("*") if path.is_file())
    assert len(kept) > 100_000
    assert not any(word.encode() in kept for word in GUESTS)
    write_keys(path, "k2", "k1")
    with engine(tmp_path) as second:
        assert ask_all(second) == [True] * 4
        all_are_cold(second)
        assert second.failures() == 0
    write_keys(path, "k3")
    with engine(tmp_path) as third:
        assert ask_all(third) == [False] * 4
