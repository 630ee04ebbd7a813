"""The disk fails, hangs, is full, slow, or only read from, while sessions come and go: answers stay right, and when it
is well again, it is in use again."""

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from disk_faults import Faults, resize, small_disk
from server_sessions import failures, has_no, restored, wait_until_cold

from manthan.benchmarks.server import VllmServer

pytestmark = pytest.mark.slow
MODEL = str(Path(__file__).parents[1] / "data" / "tiny-llama")
FLAGS = [
    *("--block-size", "32", "--num-gpu-blocks-override", "131", "--max-model-len", "2048"),
    *("--enforce-eager", "--enable-prompt-tokens-details"),
]
MIB = 1 << 20
GUESTS = 6
ANSWER = {"temperature": 0, "max_tokens": 4}
YAML = """
{idle_after_s: 0.2, min_tokens: 64,
 cold_store: {kind: disk, max_bytes: 64MiB}}
"""


class Guests:
    """Each asks again and again, about what he said at first."""

    def __init__(self, server: VllmServer, table: type, seed: int) -> None:
        self.server, self.rng = server, random.Random(seed)
        self.tables = {f"guest-{seed}-{number}": table(100 * seed + number) for number in range(GUESTS)}

    def ask_all(self) -> None:
        for name, table in self.tables.items():
            prompt, right = table.question(self.rng.randrange(16))
            reply = self.server.chat([{"role": "user", "content": prompt}], session_id=name, **ANSWER)
            assert reply.text == right

    def all_return(self) -> bool:
        wait_until_cold(self.server)
        before = restored(self.server)
        self.ask_all()
        return restored(self.server) - before >= 16 * GUESTS


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    return Faults(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("disk")
    with small_disk(folder, 80 * MIB):
        yield folder


@pytest.fixture(scope="module")
def server(folder: Path, faults: Faults, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    run = tmp_path_factory.mktemp("run")
    (run / "manthan.yaml").write_text(YAML)
    flags = ["--manthan-config", str(run / "manthan.yaml"), "--manthan-disk-path", str(folder)]
    with VllmServer(MODEL, [*FLAGS, *flags], run / "log", faults.environment) as server:
        server.wait_until_ready(600)
        yield server
        server.kill()


@pytest.fixture
def guests(server: VllmServer, faults: Faults, table, request: pytest.FixtureRequest) -> Iterator[Guests]:
    """All have been here once, and are cold."""
    faults.now("")
    guests = Guests(server, table, sum(request.node.name.encode()))
    guests.ask_all()
    server.wait_for(guests.all_return, 120, "have everybody return")
    wait_until_cold(server)
    yield guests
    faults.now("")
    server.wait_for(guests.all_return, 120, "have everybody return when the disk is well again")


@pytest.mark.parametrize(("fault", "cause"), [("eio", "disk"), ("erofs", "disk"), ("enospc", "store_full")])
def test_the_disk_does_not_do_what_it_is_asked(
    server: VllmServer, guests: Guests, faults: Faults, table, fault: str, cause: str
) -> None:
    faults.now(fault)
    before = failures(server)[cause]
    strangers = Guests(server, table, 7 + len(fault))
    for _ in range(3):
        guests.ask_all()
        strangers.ask_all()
        time.sleep(0.5)
    server.wait_for(lambda: failures(server)[cause] > before, 60, "notice it")


def test_a_disk_that_takes_two_seconds_for_each_block(server: VllmServer, guests: Guests, faults: Faults) -> None:
    faults.now("slow")
    before = failures(server)["store_down"]
    guests.ask_all()
    assert failures(server)["store_down"] > before, "everybody has waited for the disk"


@pytest.mark.parametrize("fault", ["hang", "hang-writes"])
def test_a_disk_whose_calls_do_not_return(
    server: VllmServer, guests: Guests, faults: Faults, table, fault: str
) -> None:
    """New sessions stay hot, and those that are there come from it, or are computed."""
    before, read = failures(server)["store_down"], restored(server)
    faults.now(fault)
    strangers = Guests(server, table, 20 + len(fault))
    for _ in range(3):
        guests.ask_all()
        strangers.ask_all()
    server.wait_for(lambda: failures(server)["store_down"] > before, 60, "notice it")
    assert (restored(server) > read) == (fault == "hang-writes")
    server.wait_for(lambda: has_no(server, ["evicting"]), 60, "let sessions be idle again")


def test_a_disk_that_is_full(server: VllmServer, guests: Guests, folder: Path, table) -> None:
    used = sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
    resize(folder, used + MIB)
    before = failures(server)["store_full"]
    strangers = [Guests(server, table, 50 + number) for number in range(4)]
    for each in strangers:
        each.ask_all()
        time.sleep(0.5)
    server.wait_for(lambda: failures(server)["store_full"] > before, 60, "notice it")
    guests.ask_all()
    resize(folder, 80 * MIB)


def test_files_that_are_cut_or_overwritten(server: VllmServer, guests: Guests, folder: Path) -> None:
    rng = random.Random(3)
    for path in folder.rglob("*.seg"):
        size = path.stat().st_size
        if not size:
            continue
        with path.open("r+b") as file:
            for _ in range(200):
                file.seek(rng.randrange(size))
                file.write(rng.randbytes(1))
        os.truncate(path, size - size // 8)
    guests.ask_all()
