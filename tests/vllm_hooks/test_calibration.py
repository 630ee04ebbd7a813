"""Calibration while serving, as a worker has it: it takes some blocks, and whatever becomes of it costs nothing
else."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from logged import warnings
from paged_cache import HEADS, LAYERS, paged, shape_of, write
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm_engine import MODEL, Table

from manthan.codec.base import Dtype
from manthan.codec.model import ModelFacts
from manthan.codec.profile import Profile, ProfileInfo
from manthan.codec.rope import Rope
from manthan.manager.calibration.places import profile_path
from manthan.manager.calibration.traffic import Job
from manthan.manager.stores.cold_store import HostStore
from manthan.vllm_hooks import kv_transfer_config
from manthan.vllm_hooks.memory import block_format
from manthan.vllm_hooks.messages import ManthanMetadata, SpillBlock
from manthan.vllm_hooks.support import Group
from manthan.vllm_hooks.worker.blocks import CpuBlocks, HostMemory
from manthan.vllm_hooks.worker.calibration import EVERY, WAITING, Calibration, calibration_job
from manthan.vllm_hooks.worker.host_path import HostPath
from manthan.vllm_hooks.worker.layout import probe_layers

TOKENS, HEAD_DIM = 32, 32
SPILLS = [SpillBlock(bytes([n]) * 32, 0, n, 32 * n + 32) for n in range(6)]


class Made:
    """What a profile is made for: a memory of blocks, and who is told."""

    def __init__(self, path: Path) -> None:
        caches, layers, spec = paged("vec", torch.bfloat16, TOKENS, HEAD_DIM)
        self.spec = spec
        self.memory = HostMemory(probe_layers(caches, layers, 8, shape_of(spec)), shape_of(spec))
        for block in range(6):
            write(caches, layers, block, spec, seed=block)
        info = ProfileInfo("m", LAYERS, HEADS, HEAD_DIM, None, "none")
        self.job = Job(info, TOKENS, Dtype.BFLOAT16, "klt-8x", str(path), HEADS, tokens=1)
        self.profiles: list[Profile] = []
        self.calibration = Calibration(self.memory, self.job)
        tell = self.calibration._tell

        def told(path: str, seconds: float) -> None:
            tell(path, seconds)
            self.profiles.append(Profile.load(Path(path)))

        self.calibration._tell = told  # type: ignore[method-assign]

    def send(self, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 300
        while not until():
            assert time.monotonic() < deadline
            self.calibration.see(SPILLS)
            time.sleep(0.01)


@pytest.fixture
def make(engine_config: None) -> Iterator[Callable[[Path], Made]]:
    made: list[Made] = []

    def one(path: Path) -> Made:
        made.append(Made(path))
        return made[-1]

    yield one
    for each in made:
        each.calibration.stop()


def test_a_profile_is_made_and_nothing_more_is_taken(make: Callable[[Path], Made], tmp_path: Path) -> None:
    made = make(tmp_path / "p")
    made.send(lambda: bool(made.profiles))
    [profile] = made.profiles
    assert profile.digest == Profile.load(tmp_path / "p").digest
    assert profile.info.tokens >= 8 * HEADS * HEAD_DIM
    made.calibration._thread.join(10)
    made.calibration.see(SPILLS)
    assert made.calibration._blocks.empty()


def test_few_blocks_wait_however_many_go_cold(make: Callable[[Path], Made], tmp_path: Path) -> None:
    """One of two, and never more than so many: nobody waits for the process to begin."""
    made = make(tmp_path / "p")
    gathered = []
    gather = made.memory.gather
    made.memory.gather = lambda block: gathered.append(block) or gather(block)  # type: ignore[method-assign,func-returns-value]
    made.calibration.see(SPILLS)
    assert gathered == [spill.block_id for spill in SPILLS[::EVERY]]
    for _ in range(50):
        made.calibration.see(SPILLS)
    assert made.calibration._blocks.qsize() <= WAITING


@pytest.mark.parametrize("when", ["before", "reading"])
def test_what_is_under_way_is_given_up_when_the_engine_ends(
    make: Callable[[Path], Made], tmp_path: Path, when: str
) -> None:
    made = make(tmp_path / "p")
    if when == "reading":
        made.calibration._job = replace(made.job, tokens=10**9)
        made.send(lambda: made.calibration._process is not None)
    with warnings() as said:
        made.calibration.stop()
    assert not made.calibration._thread.is_alive()
    assert said == []
    assert list(tmp_path.iterdir()) == []
    if made.calibration._process is not None:
        assert made.calibration._process.poll() is not None


@pytest.mark.slow
def test_a_place_that_cannot_be_written_is_a_warning(make: Callable[[Path], Made], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    made = make(tmp_path / "file" / "p")
    with warnings() as said:
        made.send(lambda: not made.calibration._thread.is_alive())
    assert [line for line in said if "no profile is made of the traffic" in line] == said
    assert len(said) == 1
    assert made.profiles == []


def test_a_process_that_dies_is_a_warning(make: Callable[[Path], Made], tmp_path: Path) -> None:
    made = make(tmp_path / "p")
    made.calibration._job = replace(made.job, tokens=10**9)

    def kill_it() -> bool:
        if made.calibration._process is not None:
            made.calibration._process.kill()
        return not made.calibration._thread.is_alive()

    with warnings() as said:
        made.send(kill_it)
    assert len(said) == 1
    assert "no profile is made of the traffic" in said[0]


def test_blocks_go_cold_as_they_would_without_it(make: Callable[[Path], Made], tmp_path: Path) -> None:
    made = make(tmp_path / "p")
    form = block_format("wht-5x", Group(0, made.spec, LAYERS), bytes(16), ModelFacts(None))
    path = HostPath(
        {0: CpuBlocks(made.memory, form)}, HostStore(1 << 20), 1, torch.device("cpu"), False, made.calibration
    )
    path.submit_spills(ManthanMetadata(spills=SPILLS))
    deadline = time.monotonic() + 300
    while len(path._report.spills) < len(SPILLS):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert [result.cause for result in path._report.spills] == [None] * len(SPILLS)
    path.shutdown()


@pytest.mark.parametrize(
    ("codec", "load_format", "wanted"),
    [
        ({"name": "auto"}, "auto", True),
        ({"name": "auto", "calibrate": False}, "auto", False),
        ({"name": "wht-5x"}, "auto", False),
        ({"name": "auto"}, "dummy", False),
    ],
)
def test_when_a_profile_is_made(
    codec: dict[str, Any], load_format: str, wanted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of made-up weights, which say nothing of the model in that place."""
    from vllm import EngineArgs

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    transfer = kv_transfer_config(codec=codec)
    config = EngineArgs(
        MODEL, kv_transfer_config=transfer, max_model_len=1024, load_format=load_format
    ).create_engine_config()
    rope = Rope((1.0, 0.1))
    form = SimpleNamespace(
        shape=SimpleNamespace(layers=4, heads=2, head_dim=128, tokens=32, dtype=Dtype.BFLOAT16),
        facts=ModelFacts(rope),
    )
    job = calibration_job(config, form)  # type: ignore[arg-type]
    assert (job is not None) == wanted
    if job is not None:
        assert (job.info.model, job.info.rope, job.heads, job.ranks) == (MODEL, rope, 2, 1)
        assert Path(job.path) == profile_path(MODEL)


def want_few(worker: Any) -> str:
    """On a worker: as few tokens as can be."""
    made = get_kv_transfer_group().worker.path._calibration
    made._job = replace(made._job, tokens=1)
    return str(made._job.path)


@pytest.mark.slow
def test_two_ranks_make_one_profile(start_engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is used from the next start on."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = {
        "blocks": 131,
        "ranks": 2,
        "idle_after_s": 0.3,
        "sweep_interval_s": 0.05,
        "cold_store": {"max_bytes": "64MiB"},
        "codec": {"name": "auto", "sink_tokens": 4},
    }
    for engine in start_engine(**options):
        [path, other] = engine.on_workers(want_few)
        assert path == other
        for seed in range(40):
            prompt, _ = Table(seed).question(3)
            engine.ask(prompt, f"user-{seed}")
            engine.wait_until_quiet()
            if Path(path).exists():
                break
            time.sleep(0.3)
        engine.wait(Path(path).exists, "a profile")
        assert engine.failures() == 0
    profile = Profile.load(Path(path))
    assert (len(profile.ranks), profile.info.heads) == (2, 2)
    for engine in start_engine(**options):
        prompt, right = Table(5).question(3)
        assert engine.ask(prompt, "duo").text == right
        engine.wait_until_cold(1)
        answer = engine.ask(prompt, "duo")
        assert (answer.text, answer.cached_tokens) == (right, (answer.prompt_tokens - 1) // 32 * 32)
        assert engine.failures() == 0
