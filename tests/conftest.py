"""What all tests share: how property tests are tried, how tests are spread over processes, and servers."""

import atexit
import logging
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import examples
import pytest
import repo_benchmarks  # noqa: F401 it makes them importable
from filelock import FileLock
from typer.testing import CliRunner
from warm_server import LOOKS, warm_server

from manthan.benchmarks.server import VllmServer
from manthan.manager.cli import app

MODEL = str(Path(__file__).parent / "data" / "tiny-llama")
PURE = ("codec", "manager", "policies")
"""Folders whose tests start no engine."""
LONG = ("test_invariants.py", "test_generations.py", "test_boundary.py", "test_groups.py")
"""Files whose tests take a minute or more."""
START_S = 600
"""Long enough for a start next to all that other tests do."""

SHARED = re.compile(r"\b(?:(?:plain|manthan|unguarded|steered)_(server)|sweeping_(engine))\b")

examples.register()

# A profile that one test's server leaves behind would be found by the next one's, and by the user's own.
CACHE = tempfile.mkdtemp(prefix="manthan-tests-")
atexit.register(shutil.rmtree, CACHE, ignore_errors=True)
os.environ.setdefault("VLLM_CACHE_ROOT", str(Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "vllm").expanduser()))
os.environ.setdefault("MPLCONFIGDIR", str(Path(tempfile.gettempdir(), "manthan-tests-matplotlib")))
os.environ["XDG_CACHE_HOME"] = CACHE


@pytest.fixture(autouse=True)
def no_profile_stays() -> Iterator[None]:
    """What one test has put into the cache folder is not there for the next."""
    yield
    shutil.rmtree(Path(CACHE, "manthan"), ignore_errors=True)


def pytest_runtest_setup() -> None:
    """Let tests hear what is logged: vLLM, once imported, keeps it to itself. Give each test the same random tensors
    whenever it runs."""
    logging.getLogger("vllm").propagate = True
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put first what takes long or has to be in one process, and files with engines before others, so that none of them
    is left at the end."""
    items.sort(
        key=lambda item: (item.path.parent.name in PURE, item.path.name not in LONG and not shared_by(item.path))
    )


@cache
def shared_by(file: Path) -> str:
    """Return what tests of this file share with those of other files: "server", "engine", or nothing."""
    found = SHARED.search(file.read_text(encoding="utf-8"))
    return (found[1] or found[2]) if found else ""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run each file in one process, and all that share servers or an engine in one, so that each is started once."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return shared_by(config.rootpath / file) or file

    return Scheduling(config, log)


@pytest.fixture(scope="session")
def tiny_profile(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the tiny model, as `manthan calibrate` makes it, once for all processes."""
    folder = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):  # each of them has a folder of its own in a common one
        folder = folder.parent
    path = folder / "tiny.safetensors"
    with FileLock(folder / "tiny.lock"):
        if not path.exists():
            done = CliRunner().invoke(app, ["calibrate", MODEL, "--tokens", "4096", "--out", str(path)])
            assert done.exit_code == 0, done.output
    return path


@pytest.fixture(scope="session")
def plain_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """`vllm serve` without Manthan, a pool of 64 blocks, 640 tokens at most."""
    flags = ["--block-size", "32", "--num-gpu-blocks-override", "64", "--max-model-len", "640", "--enforce-eager"]
    log = tmp_path_factory.mktemp("plain") / "log"
    with warm_server(MODEL, [*flags, "--enable-prompt-tokens-details"], log) as server:
        server.wait_until_ready(START_S)
        yield server
        server.kill()  # a stop takes ten seconds


SERVED = """
{idle: {after_s: 30, min_tokens: 64}, tiers: {pinned_share: 0.01},
 tenants: {header: X-Tenant-ID, shares: {no-room: 0, left: 0.5, right: 0.02}}}
"""  # 671,088 bytes for pinned sessions: 25 blocks
BEFORE = ["--enable-scale-out", "--manthan-policy", "lru", "--manthan-idle-after", "0.5"]
"""Flags that go before the file's keys."""


def served(folder: Path, configuration: str, *more: str) -> Iterator[VllmServer]:
    """`vllm serve` with a configuration file, which takes tenants from a header."""
    (folder / "manthan.yaml").write_text(configuration)
    flags = ["--block-size", "32", "--num-gpu-blocks-override", "131", "--max-model-len", "4096", "--enforce-eager"]
    flags += ["--manthan-config", str(folder / "manthan.yaml"), "--manthan-cold-bytes", "64MiB", *more]
    flags += ["--enable-prompt-tokens-details"]
    with warm_server(MODEL, flags, folder / "log", {"VLLM_SERVER_DEV_MODE": "1", LOOKS: "0.3"}) as server:
        server.wait_until_ready(START_S)
        yield server
        server.kill()


@pytest.fixture(scope="session")
def manthan_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """One on which sessions go cold."""
    yield from served(tmp_path_factory.mktemp("manthan"), SERVED, *BEFORE)


@pytest.fixture(scope="session")
def unguarded_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """Serve the same with the codec that is configured, whatever it does to this model: blocks have its size."""
    configuration = SERVED.replace("{", "{codec: {guard: false}, ", 1)
    yield from served(tmp_path_factory.mktemp("unguarded"), configuration, *BEFORE)


STEERED = """
{idle: {after_s: 3600, min_tokens: 64}, codec: {guard: false},
 tiers: {pinned_share: 0.01}, tenants: {header: X-Tenant-ID}}
"""  # 671,088 bytes for pinned sessions: 25 blocks


@pytest.fixture(scope="session")
def steered_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """One on which nobody goes cold by the clock, with an API key."""
    yield from served(tmp_path_factory.mktemp("steered"), STEERED, "--api-key", "sesame")
