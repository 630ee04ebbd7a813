"""Engines that the tests of this folder share."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import worker_store
from typer.testing import CliRunner
from vllm import EngineArgs
from vllm.config import set_current_vllm_config
from vllm_engine import MODEL, Engine, Table, running

from manthan.manager.cli import app


@pytest.fixture(scope="session")
def table() -> type[Table]:
    return Table


@pytest.fixture(scope="session")
def start_engine() -> Callable[..., Iterator[Engine]]:
    """For a module that needs an engine of its own."""
    return running


@pytest.fixture(scope="package")
def sweeping_engine() -> Iterator[Engine]:
    """Sessions go cold after a fifth of a second; the pool has room for seven of them."""
    for engine in running(blocks=131, idle=0.2, tiers={"max_bytes": "64MiB"}):
        engine.compiled = engine.on_worker(worker_store.compiled)
        yield engine


@pytest.fixture(scope="package")
def crowded_engine() -> Iterator[Engine]:
    """Sessions are saved after half a second; the pool has room for five of them, the cold store for about ten."""
    store = {"max_bytes": 190 * 25856}
    yield from running(blocks=96, idle=0.5, tiers=store, codec={"guard": False})


@pytest.fixture
def engine(sweeping_engine: Engine) -> Iterator[Engine]:
    sweeping_engine.start_afresh()
    return sweeping_engine


@pytest.fixture
def crowded(crowded_engine: Engine) -> Iterator[Engine]:
    crowded_engine.start_afresh()
    return crowded_engine


@pytest.fixture(scope="session")
def tiny_profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the tiny model, as `manthan calibrate` makes it."""
    path = tmp_path_factory.mktemp("profile") / "tiny.safetensors"
    done = CliRunner().invoke(app, ["calibrate", MODEL, "--tokens", "4096", "--out", str(path)])
    assert done.exit_code == 0, done.output
    return path


@pytest.fixture(scope="module")
def engine_config() -> Iterator[None]:
    """What vLLM's attention backends ask for when they are made outside of an engine."""
    with set_current_vllm_config(EngineArgs(MODEL).create_engine_config()):
        yield
