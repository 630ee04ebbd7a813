"""A calibrated codec on a GPU, on the real engine: sessions return with right answers, and shrink before they go."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import gpu_worker
import pytest
from vllm_engine import MODEL, Engine, Table, running


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profile") / "tiny.safetensors"
    # in a process of its own: this one, which starts engines, does not touch the GPU
    words = ["calibrate", MODEL, "--tokens", "4096", "--out", str(path)]
    subprocess.run([sys.executable, "-c", "from manthan.manager.cli import app; app()", *words], check=True)
    return path


@pytest.fixture(params=["host", "device"])
def engine(request: pytest.FixtureRequest, profile: Path) -> Iterator[Engine]:
    codec = {"name": "klt-5x", "profile": str(profile), "guard": False}
    yield from running(blocks=131, idle=0.3, tiers={"kind": request.param, "max_bytes": "3MiB"}, codec=codec)


def test_sessions_shrink_and_return_with_right_answers(engine: Engine) -> None:
    assert engine.on_worker(gpu_worker.engine_name) == "CudaEngine"
    tables = [Table(seed) for seed in range(4)]
    for n, table in enumerate(tables):
        engine.ask(table.question(0)[0], f"session {n}")
    engine.wait_until_cold(4)
    right = 0
    for n, table in enumerate(tables):
        for index in range(1, 5):
            prompt, wanted = table.question(index)
            right += engine.ask(prompt, f"session {n}").text == wanted
    assert right >= 15, "the model itself is wrong now and then"
    assert engine.metric("manthan_restored_blocks_total") > 0
    for n in range(4, 24):
        engine.ask(Table(n).question(0)[0], f"session {n}")
        engine.wait(lambda: not engine.sessions("active"), "end of the requests")
    assert sum(engine.metric("manthan_trimmed_blocks_total", level=str(level)) for level in range(4)) > 0
    engine.empty_pool()
    restored = engine.metric("manthan_restored_blocks_total")
    asked = [(Table(n).question(1), f"session {n}") for n in range(18, 24)]
    right = [engine.ask(prompt, session).text == wanted for (prompt, wanted), session in asked]
    assert sum(right) >= 4
    assert engine.metric("manthan_restored_blocks_total") > restored
    assert engine.failures() == 0
