"""A profile from a server's own traffic: the guard tries it, new blocks use it, and the next start has it."""

import logging
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from logged import said
from some_blocks import until
from traffic import hasten
from vllm import EngineArgs
from vllm_engine import MODEL, Engine, Table

from manthan.codec.profile import DIVERGENCES, Profile
from manthan.manager.config.profiles import choose_codec, profile_path
from manthan.vllm_hooks import kv_transfer_config
from manthan.vllm_hooks.messages import Candidate, ManthanMetadata, ManthanWorkerMetadata
from manthan.vllm_hooks.scheduler_half import SchedulerHalf
from manthan.vllm_hooks.settled import CALIBRATES
from manthan.vllm_hooks.transfer_config import from_vllm_config, settings
from manthan.vllm_hooks.worker.calibrator import EVERY, LEAST, Calibrator

CHATS = 4


def doubt(worker: Any) -> None:
    """Have the guard find each profile unfaithful."""
    from dataclasses import replace

    from manthan.vllm_hooks.worker import guard

    measure = guard.measure

    def worse(format: Any, *rest: Any) -> Any:
        found = measure(format, *rest)
        return replace(found, logit_noise=found.logit_noise + 1) if format.codec == "klt-8x" else found

    guard.measure = worse


def seen(worker: Any) -> tuple[int, list[str], list[str]]:
    """Return the number of tokens taken, the codecs that are measured, and those of the blocks in the tier."""
    from manthan.codec import wire
    from manthan.vllm_hooks.worker.half import running_half

    half = running_half()
    store = half.engine.store
    found = [next(store.read(group, [key])) for group, key in list(store._blocks)]
    stored = {wire.peek_sections(buf, wire.peek(buf))[-1].codec for buf in found}
    taken = 0 if half.calibrator is None else half.calibrator._taken
    return taken, [] if half.guard is None else [form.codec for form in half.guard._formats], sorted(stored - {"exact"})


def has_judged_profile(worker: Any) -> bool:
    from manthan.vllm_hooks.worker.half import running_half

    guard = running_half().guard
    return guard is not None and guard._formats[0].codec == "klt-8x" and guard._was_judged


def talk(engine: Engine, seeds: range, **hints: Any) -> None:
    """Hold a session with each seed, and have all of them go cold."""
    before = engine.sessions("cold")
    for seed in seeds:
        engine.ask(Table(seed).question(seed % 5)[0], f"chat {seed}", **hints)
    engine.wait_until_cold(int(before) + len(seeds))


def talk_until(engine: Engine, seed: int, is_true: Callable[[], bool]) -> int:
    """Hold sessions until it is true. Returns the next seed."""
    for at in range(seed, seed + 10 * CHATS, CHATS):
        talk(engine, range(at, at + CHATS))
        if is_true():
            return at + CHATS
    raise AssertionError("it does not become true")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The profile that the next start looks for."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return profile_path(MODEL)


@pytest.fixture
def engine(path: Path, start_engine: Callable[..., Iterator[Engine]]) -> Iterator[Engine]:
    for engine in start_engine(blocks=131, idle=0.1, tiers={"max_bytes": "64MiB"}):
        engine.on_worker(hasten)
        yield engine
    assert not [file for file in path.parent.glob("*") if file.suffix != ".safetensors"], "a refused profile stays"


@pytest.mark.slow
def test_new_blocks_use_the_profile_old_ones_return_and_the_next_start_has_it(
    path: Path, engine: Engine, start_engine: Callable[..., Iterator[Engine]]
) -> None:
    talk(engine, range(2), tenant="acme")
    assert engine.on_worker(seen) == (0, ["wht-5x", "wht-4x"], ["wht-4x"]), "a tenant's prompts shape nothing"
    talk(engine, range(2, 4))
    assert engine.on_worker(seen)[0] > 0
    engine.reset(cold=True)
    engine.wait(lambda: engine.sessions("cold") == 0, "an empty cold store")
    talk(engine, range(1), tenant="acme")
    assert engine.on_worker(seen)[0] == 0, "a reset drops what was taken"
    seed = talk_until(engine, 4, path.exists)
    taken, measured, _ = engine.on_worker(seen)
    assert taken > 2000
    assert measured == ["klt-8x", "wht-5x", "wht-4x"]
    talk(engine, range(seed, seed + 2))
    assert "klt-8x" in engine.on_worker(seen)[2]
    for old in (4, seed):
        prompt, right = Table(old).question(old % 5)
        answer = engine.ask(prompt, f"chat {old}")
        assert (answer.text, answer.cached_tokens) == (right, (answer.prompt_tokens - 1) // 32 * 32)
    assert engine.failures() == 0
    assert engine.on_worker(seen)[0] == taken, "one profile, and then none"
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    chosen = choose_codec(from_vllm_config(configured()).codec, MODEL)
    assert (chosen.name, chosen.path) == ("klt-8x", path)
    info = Profile.load(path).info
    assert (info.metric, info.divergences[2]) == ("attention", pytest.approx(DIVERGENCES[2]))
    assert settings(configured())[CALIBRATES] == ""
    for next_one in start_engine(blocks=131, idle=0.1, tiers={"max_bytes": "64MiB"}):
        talk(next_one, range(2))
        assert next_one.on_worker(seen) == (0, ["klt-8x", "wht-5x", "wht-4x"], ["klt-8x"]), "before the guard's verdict"


def test_a_profile_that_the_guard_refuses_leaves_the_codec(path: Path, engine: Engine) -> None:
    engine.on_worker(doubt)
    path.parent.mkdir(parents=True)
    left = path.with_suffix(f".{2**22 + 1}")
    left.write_text("by a process that is gone: no process has that number")
    seed = talk_until(engine, 0, lambda: not left.exists())
    seed = talk_until(engine, seed, lambda: engine.on_worker(has_judged_profile))
    talk(engine, range(seed, seed + 1))  # in whose steps the scheduler hears of it
    engine.reset(cold=False)
    assert engine.metric("manthan_codec_fallback") == 0, "the codec that the configuration asks for is still used"
    assert engine.on_worker(seen)[2] == ["wht-4x", "wht-5x"]
    assert not path.exists()
    assert from_vllm_config(configured()).codec.name == "wht-5x"


def test_a_slow_disk_under_a_profile_delays_no_step(path: Path) -> None:
    """The scheduler's thread has another thread rename the profile that the guard has chosen."""
    renamed, has_time, shape = list[str](), threading.Event(), object()

    class Slow(type(path)):  # type: ignore[misc]
        def replace(self, target: Path) -> Path:
            assert has_time.wait(20)
            renamed.append(threading.current_thread().name)
            return super().replace(target)  # type: ignore[no-any-return]

    half = MagicMock(_candidate=Candidate(Slow(path.with_suffix(".1")), shape), manager=SimpleNamespace(shape=shape))
    path.parent.mkdir(parents=True)
    path.with_suffix(".1").write_text("a profile")
    SchedulerHalf.worker_output(half, ManthanWorkerMetadata())
    assert (renamed, half._candidate) == ([], None)
    has_time.set()
    until(path.exists)
    assert renamed == ["manthan-profile"]


@pytest.mark.parametrize(
    ("told", "dtype"),
    [(SimpleNamespace(slot_mapping=0), torch.bfloat16), (SimpleNamespace(query_start_loc=0), torch.float8_e4m3fn)],
    ids=["as FlashInfer's", "queries in fp8"],
)
def test_attention_that_hides_its_prompts_or_queries_makes_no_profile(told: Any, dtype: torch.dtype) -> None:
    calibrator: Any = object.__new__(Calibrator)
    with said(logging.WARNING) as lines:
        calibrator._try(calibrator._take, 0, told, torch.empty(2, 4, 8, dtype=dtype))
    assert lines == [
        f"Manthan: no profile is made from traffic: NotImplementedError: SimpleNamespace with queries in {dtype}"
    ]
    assert calibrator._is_done


def test_the_log_says_once_that_tenants_shape_no_profile() -> None:
    half: Any = object.__new__(SchedulerHalf)
    request = SimpleNamespace(kv_transfer_params=None, kv_hints=None, cache_salt=None)
    mine = SimpleNamespace(**vars(request) | {"cache_salt": "acme's"})
    half._calibrates, half._has_left_out = True, False
    with said(logging.INFO) as lines:
        half._requests = {"a": request}
        assert (half._may_calibrate(LEAST), half._may_calibrate(LEAST - 1)) == (True, False)
        half._requests |= {"b": mine}
        assert not half._may_calibrate(LEAST - 1)
        assert lines == [], "too short a step is not left out because of a tenant"
        assert [half._may_calibrate(LEAST) for _ in range(2)] == [False, False]
    [line] = lines
    assert line.startswith("Manthan: prompts of tenants are left out of the profile that is made from traffic;")
    half._calibrates, half._has_left_out = False, False
    with said(logging.INFO) as lines:
        assert not half._may_calibrate(LEAST)
    assert lines == [], "no profile is being made"


def test_a_reset_begins_anew_and_a_change_of_weights_ends_calibration() -> None:
    calibrator: Any = object.__new__(Calibrator)
    calibrator._wants = calibrator._is_busy = calibrator._is_done = False
    calibrator.every, calibrator._passed, calibrator._taken, calibrator._builder = EVERY, 5000, 4096, ["begun"]
    step = partial(ManthanMetadata, tokens=512, may_calibrate=True)
    calibrator.begin_step(step())
    assert not calibrator._wants, "enough was taken"
    calibrator.begin_step(step(place=""))
    assert (calibrator._wants, calibrator._taken, calibrator._builder) == (True, 0, [])
    calibrator.begin_step(step(place="", has_new_weights=True))
    assert not calibrator._wants
    calibrator.begin_step(step())
    assert not calibrator._wants


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_rows_of_the_longest_prompt_are_taken_without_reading_the_device(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor of device `meta` has no numbers: to wait for one raises."""
    monkeypatch.setattr("manthan.vllm_hooks.worker.calibrator.model_event", lambda device: None)
    calibrator: Any = object.__new__(Calibrator)
    calibrator._wants, calibrator._taken, calibrator._parts, calibrator._builder = True, 0, [], []
    calibrator._attentions, calibrator._device, calibrator._threads = [None] * 2, torch.device(device), MagicMock()
    starts, lengths = torch.tensor([0, 3, 203, 204], device=device), torch.tensor([50, 260, 9], device=device)
    told = SimpleNamespace(query_start_loc=starts, seq_lens=lengths, max_query_len=256)  # some backends round it up
    rows = torch.arange(204.0)[:, None, None].to(device)
    for layer in range(2):
        calibrator._take(layer, told, rows, rows, rows)
    (_, _, _, place, parts, _), _ = calibrator._threads.submit.call_args
    assert len(parts) == 2
    if device == "cpu":
        assert place.tolist() == [260, 200], "the prompt's tokens so far, and those of the step"
        assert all((x[:200] == rows[3:203]).all() for part in parts for x in part)


def configured(model: str = MODEL, **options: Any) -> Any:
    transfer = kv_transfer_config(**options)
    return EngineArgs(model, kv_transfer_config=transfer, max_model_len=1024).create_engine_config()


@pytest.mark.parametrize(
    "options",
    [
        {"codec": {"guard": False}},
        {"codec": {"name": "wht-5x"}},
        {"tiers": {"kind": "redis"}},
    ],
)
def test_no_profile_is_made_where_none_is_wanted(path: Path, options: dict[str, Any]) -> None:
    assert settings(configured())[CALIBRATES] == str(path)
    assert settings(configured(**options))[CALIBRATES] == ""
