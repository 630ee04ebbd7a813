"""Engines that the tests of this folder share."""

from collections.abc import Callable, Iterator

import pytest
import worker_store
from vllm import EngineArgs
from vllm.config import set_current_vllm_config
from vllm_engine import MODEL, Engine, Table, running


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
    """Sessions are saved after a fifth of a second; the pool has room for three of them, the store for about six."""
    store = {"max_bytes": 120 * 25856}
    yield from running(blocks=70, idle=0.2, tiers=store, codec={"guard": False})


@pytest.fixture
def engine(sweeping_engine: Engine) -> Iterator[Engine]:
    sweeping_engine.start_afresh()
    return sweeping_engine


@pytest.fixture
def crowded(crowded_engine: Engine) -> Iterator[Engine]:
    crowded_engine.start_afresh()
    return crowded_engine


@pytest.fixture(scope="module")
def engine_config() -> Iterator[None]:
    """What vLLM's attention backends ask for when they are made outside of an engine."""
    with set_current_vllm_config(EngineArgs(MODEL).create_engine_config()):
        yield
