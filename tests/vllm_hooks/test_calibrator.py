"""A profile from a server's own traffic: the guard tries it, new blocks use it, and the next start has it."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_engine import MODEL, Engine, Table

from manthan.codec.profile import Profile
from manthan.manager.config.profiles import profile_path

TOKENS = 2000


def hasten(worker: Any, every: int, wanted: int) -> int:
    """Have traffic make a profile soon, and a few blocks make a verdict, however slow the codec is."""
    from manthan.vllm_hooks.worker import guard
    from manthan.vllm_hooks.worker.half import running_half

    half = running_half()
    guard.BATCHES = 1
    half.guard._prompts._left = 0
    if half.calibrator is None:
        return 0
    half.calibrator.every, half.calibrator.wanted = every, wanted
    return len(half.calibrator._attentions)


def written(worker: Any) -> list[str]:
    """Codecs of the compressed blocks in the tier, oldest first."""
    from manthan.codec import wire
    from manthan.vllm_hooks.worker.half import running_half

    store = running_half().engine.store
    found = store.read(0, list(store._arena.keys() if hasattr(store, "_arena") else store.keys()), "")
    return [wire.peek_sections(buf, wire.peek(buf))[-1].codec for buf in found if not isinstance(buf, str | None)]


def worsen(worker: Any) -> None:
    """Have the guard find all that has a profile unfaithful."""
    from dataclasses import replace

    from manthan.vllm_hooks.worker import guard

    measure = guard.measure

    def worse(format: Any, *rest: Any) -> Any:
        found = measure(format, *rest)
        return replace(found, logit_noise=found.logit_noise + 1) if format.codec.startswith("klt") else found

    guard.measure = worse


def talk(engine: Engine, seeds: range, tenant: str = "") -> None:
    """Hold a session with each seed, and have it go cold and return."""
    for seed in seeds:
        prompt, _ = Table(seed).question(seed % 5)
        engine.ask(prompt, f"chat {seed}", **({"tenant": tenant} if tenant else {}))
        time.sleep(0.3)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return profile_path(MODEL)


@pytest.fixture
def engine(cache: Path, start_engine: Callable[..., Iterator[Engine]]) -> Iterator[Engine]:
    yield from start_engine(blocks=131, idle=0.1, tiers={"max_bytes": "64MiB"})


def test_traffic(cache: Path, engine: Engine) -> None:
    assert engine.on_worker(hasten, 1, TOKENS) == 4
    talk(engine, range(3), "acme")
    for n in range(1, 6):
        talk(engine, range(8 * n, 8 * n + 8))
        print(n, cache.exists(), sorted(x.name for x in cache.parent.glob("*")) if cache.parent.exists() else None)
    raise SystemExit
