"""What all tests share: how property tests are tried, how tests are spread over processes, and servers."""

from collections.abc import Iterator
from pathlib import Path

import examples
import pytest

from manthan.benchmarks.server import VllmServer

MODEL = str(Path(__file__).parent / "data" / "tiny-llama")
PURE = ("codec", "manager", "policies")
"""Folders whose tests start no engine."""
START_S = 600
"""Long enough for a start beside all that other tests do."""

examples.register()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several processes a file's tests run in one, and those of files marked with one `xdist_group` too.

    What starts engines goes first: then no process is left with the longest of them at the end.
    """
    items.sort(key=lambda item: item.path.parent.name in PURE)
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


@pytest.fixture(scope="session")
def plain_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """`vllm serve` without Manthan, a pool of 64 blocks, 640 tokens at most."""
    flags = ["--block-size", "32", "--num-gpu-blocks-override", "64", "--max-model-len", "640", "--enforce-eager"]
    log = tmp_path_factory.mktemp("plain") / "log"
    with VllmServer(MODEL, [*flags, "--enable-prompt-tokens-details"], log) as server:
        server.wait_until_ready(START_S)
        yield server


SERVED = """
{idle_after_s: 30, sweep_interval_s: 0.1, min_tokens: 64,
 quotas: {header: X-Tenant-ID, pinned_share: 0.01, tenants: {no-room: 0}}}
"""  # 26 blocks for pinned sessions


@pytest.fixture(scope="session")
def manthan_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """`vllm serve` with flags and a file that they go before, which takes tenants from a header."""
    folder = tmp_path_factory.mktemp("manthan")
    (folder / "manthan.yaml").write_text(SERVED)
    flags = ["--block-size", "32", "--num-gpu-blocks-override", "131", "--max-model-len", "4096", "--enforce-eager"]
    flags += ["--manthan-policy", "lru", "--manthan-config", str(folder / "manthan.yaml")]
    flags += ["--manthan-idle-after", "0.5", "--manthan-cold-bytes", "64MiB", "--enable-prompt-tokens-details"]
    with VllmServer(MODEL, flags, folder / "log", {"VLLM_SERVER_DEV_MODE": "1"}) as server:
        server.wait_until_ready(START_S)
        yield server
