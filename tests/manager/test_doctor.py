"""What `manthan doctor` finds of RAM, disks, keys and templates; tests/vllm_hooks/test_doctor.py has the command."""

import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from doctor import PASSWORD, allow, config, elsewhere, on_disk
from key_files import write_keys
from redis_server import RedisServer, running

from manthan.manager.config.model import ManthanConfig
from manthan.manager.doctor.disk import check_disk, file_system
from manthan.manager.doctor.finding import Finding, Mark
from manthan.manager.doctor.keys import check_keys
from manthan.manager.doctor.memory import cgroup_limit, check_pinning, check_ram
from manthan.manager.doctor.redis import check_redis
from manthan.manager.doctor.template import Message, Parting, check_template, common, partings
from manthan.manager.stores.disk.root import open_root

GIB = 1 << 30


# -- memory -----------------------------------------------------------------------------------------------


def kernel(folder: Path, total: int, free: int, groups: str = "") -> Path:
    """What /proc would say."""
    (folder / "self").mkdir(parents=True)
    (folder / "meminfo").write_text(f"MemTotal: {total >> 10} kB\nMemAvailable: {free >> 10} kB\nHugePages_Total: 0\n")
    (folder / "self" / "cgroup").write_text(groups)
    return folder


def test_more_codes_than_ram() -> None:
    found = check_ram(config(cold_store__max_bytes="100TiB").cold_store)
    assert found.mark is Mark.WRONG
    assert found.said.startswith("cold_store.max_bytes is 100.0TiB, but this machine has ")
    assert found.said.endswith("of RAM, in which vLLM has to live too: lower it.")


def test_more_codes_than_ram_that_is_free(tmp_path: Path) -> None:
    found = check_ram(config().cold_store, kernel(tmp_path, 8 * GIB, 3 * GIB), tmp_path)
    assert (found.mark, "only 3.0GiB of 8.0GiB are free" in found.said) == (Mark.WARNING, True)


@pytest.mark.parametrize(
    ("lines", "file"),
    [
        ("0::/pods/one", "pods/memory.max"),
        ("3:cpu:/x\n4:memory:/pods/one", "memory/pods/one/memory.limit_in_bytes"),
    ],
)
def test_a_container_s_limit_counts(lines: str, file: str, tmp_path: Path) -> None:
    proc, groups = kernel(tmp_path / "proc", 64 * GIB, 60 * GIB, lines), tmp_path / "groups"
    (groups / file).parent.mkdir(parents=True)
    (groups / file).write_text(f"{2 * GIB}\n")
    found = check_ram(config().cold_store, proc, groups)
    assert found.mark is Mark.WRONG
    assert "but its cgroup (the container's memory limit) allows 2.0GiB" in found.said
    (groups / file).write_text("max\n")
    assert cgroup_limit(proc, groups) is None
    assert check_ram(config().cold_store, proc, groups).mark is Mark.OK


def test_only_what_is_in_ram_counts(tmp_path: Path) -> None:
    small = kernel(tmp_path, 4 * GIB, 4 * GIB)
    assert check_ram(on_disk(tmp_path, cold_store__max_bytes="1TiB").cold_store, small, tmp_path).mark is Mark.SKIPPED
    store = config(cold_store__kind="tiered", cold_store__max_bytes="40GiB").cold_store
    assert "a quarter of cold_store.max_bytes is 10.0GiB" in check_ram(store, small, tmp_path).said


LOCKING = """
import os, resource
from doctor import config, lock
from manthan.manager.doctor.memory import check_pinning
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
if os.getuid() == 0:
    os.setuid(65534)  # root may lock what it likes
print(check_pinning(config().cold_store, lock).said)
"""


def test_memory_that_cannot_be_pinned() -> None:
    assert elsewhere(LOCKING) == (
        "64.0MiB of RAM cannot be pinned (ENOMEM), the memlock limit is 64.0KiB, and cold_store.max_bytes is 4.0GiB: "
        "lower that, or raise it (ulimit -l unlimited, LimitMEMLOCK=infinity, --ulimit memlock=-1).\n"
    )


def test_a_driver_that_pins_beyond_the_limit_is_believed() -> None:
    found = check_pinning(config().cold_store, lambda nbytes: "", limit=8 << 20)
    assert (found.mark, found.said[-50:]) == (
        Mark.OK,
        "memlock limit is 8.0MiB, which the driver does not count."[-50:],
    )
    assert check_pinning(config().cold_store, None).mark is Mark.SKIPPED


# -- a disk, and keys -------------------------------------------------------------------------------------


def test_a_folder_that_is_good(tmp_path: Path) -> None:
    found = check_disk(on_disk(tmp_path, cold_store__max_bytes="1MiB"))
    kind = subprocess.run(["stat", "-f", "-c", "%T", tmp_path], capture_output=True, text=True).stdout
    assert found.mark is Mark.OK or kind.startswith("tmpfs"), found.said


def test_a_folder_in_ram(tmp_path: Path) -> None:
    if file_system(Path("/dev/shm"), Path("/proc/self/mounts")) != "tmpfs":
        pytest.skip("there is no tmpfs")
    found = check_disk(on_disk(Path("/dev/shm")))
    assert found == Finding(
        "disk",
        Mark.WRONG,
        "disk.path is '/dev/shm', which is on tmpfs, which is RAM and empty after a restart: name a folder on a disk.",
    )


def test_a_folder_on_another_machine(tmp_path: Path) -> None:
    mounts, shared = tmp_path / "mounts", tmp_path / "my share"
    (shared / "codes").mkdir(parents=True)
    line = f"nas:/codes {str(shared).replace(' ', chr(92) + '040')} nfs4 rw 0 0\n"
    mounts.write_text("/dev/vda / ext4 rw 0 0\n" + line)
    found = check_disk(on_disk(shared / "codes"), mounts)
    assert (found.mark, "which is on nfs4, which is not of this machine" in found.said) == (Mark.WRONG, True)
    assert file_system(tmp_path, mounts) == "ext4"


def test_too_little_room(tmp_path: Path) -> None:
    found = check_disk(on_disk(tmp_path, cold_store__max_bytes="8000TiB"))
    assert found.mark is Mark.WRONG
    assert "free, but cold_store.max_bytes is 7.8PiB: lower it, or make room." in found.said


LOOKING = """
import sys
from doctor import on_disk
from manthan.manager.doctor.disk import check_disk
print(check_disk(on_disk(sys.argv[1], cold_store__max_bytes="1MiB")).said)
"""


def test_what_cannot_be_used_and_what_is_in_use(tmp_path: Path) -> None:
    assert "there is no such folder" in check_disk(on_disk(tmp_path / "x")).said
    with open_root(tmp_path):
        assert elsewhere(LOOKING, tmp_path).endswith("1.0MiB; a server uses it now.\n")


def test_keys_that_everybody_may_read(tmp_path: Path) -> None:
    path = write_keys(tmp_path / "keys", "k1", "k2")
    store = on_disk(tmp_path, cold_store__encryption=str(path)).cold_store
    assert check_keys(store) == Finding("encryption", Mark.OK, f"{path} is for its owner alone, and has 2 keys.")
    path.chmod(0o644)
    found = check_keys(store)
    assert found.mark is Mark.WRONG
    assert found.said.endswith("has mode 0644, which lets others read or change it: chmod 600 it.")


# -- Redis ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    yield from running(tmp_path_factory.mktemp("doctor"), "--maxmemory", "100mb")


def in_redis(url: str) -> ManthanConfig:
    return config(cold_store__kind="redis", redis__url=url, **{"cold_store__max_bytes": "64MiB"})


def test_a_redis_that_is_good(server: RedisServer) -> None:
    server.client.config_set("maxmemory-policy", "volatile-ttl")
    assert [(one.check, one.mark) for one in check_redis(in_redis(server.url))] == [
        ("Redis", Mark.OK),
        ("Redis memory", Mark.OK),
    ]
    assert server.client.dbsize() == 0


def test_a_redis_that_evicts_nothing(server: RedisServer) -> None:
    server.client.config_set("maxmemory-policy", "noeviction")
    [found] = [one for one in check_redis(in_redis(server.url)) if one.mark is Mark.WARNING]
    assert "has maxmemory-policy noeviction, so that it refuses writes when it is full" in found.said


def test_a_user_without_rights(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANTHAN_REDIS_PASSWORD", PASSWORD)
    allow(server, without="unlink")
    [found] = check_redis(in_redis(server.url.replace("//", "//manthan@")))
    assert found.mark is Mark.WRONG
    assert "refuses a command that engines send" in found.said
    assert "'unlink' command" in found.said
    allow(server)
    assert next(iter(check_redis(in_redis(server.url.replace("//", "//manthan@"))))).mark is Mark.OK


def test_nobody_answers() -> None:
    [found] = check_redis(in_redis("redis://127.0.0.1:1/0"))
    assert found.mark is Mark.WRONG
    assert "redis://127.0.0.1:1/0 does not answer" in found.said


# -- templates --------------------------------------------------------------------------------------------


class Words:
    """A tokenizer of letters, and templates in Python. keeps: whether thinking stays where other messages follow.
    knows: whether it is shown at all. clock: the time is ahead of all. opens: the prompt opens the thinking."""

    def __init__(self, keeps: bool = True, knows: bool = True, clock: bool = False, opens: bool = False) -> None:
        self.keeps, self.knows, self.clock, self.opens = keeps, knows, clock, opens

    def render(self, messages: Sequence[Message], *, asks: bool, minutes: int = 0) -> list[int]:
        text = f"[{minutes} minutes]" if self.clock else ""
        for at, message in enumerate(messages):
            thought, content = message.get("reasoning_content", ""), message["content"]
            if thought and self.knows and (self.keeps or at == len(messages) - 1):
                thought = f"<think>\n{thought}\n</think>\n\n"
            else:
                thought = ""
            if not self.keeps and at < len(messages) - 1:
                content = content.rpartition("</think>")[2].strip()
            text += f"<{message['role']}>{thought}{content}<end>"
        return self.encode(text + ("<assistant>" + ("<think>\n" if self.opens else "") if asks else ""))

    def encode(self, text: str) -> list[int]:
        return list(map(ord, text))

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(map(chr, tokens))


def rewritten(words: Words) -> set[str]:
    return {one.of for one in partings(words) if one.rewrites}


def test_what_only_appends_is_good() -> None:
    for words in (Words(), Words(knows=False)):
        assert rewritten(words) == set()
        assert check_template(words).mark is Mark.OK


@pytest.mark.parametrize(
    ("words", "of"),
    [
        (Words(keeps=False), {"thinking", "thinking within the answer"}),
        (Words(keeps=False, knows=False), {"thinking within the answer"}),
        (Words(clock=True), {"another day"}),
        (Words(opens=True, keeps=False), {"plain answers", "another day", "thinking", "thinking within the answer"}),
    ],
)
def test_what_rewrites_history_is_told(words: Words, of: set[str]) -> None:
    assert rewritten(words) == of
    assert check_template(words).mark is Mark.WRONG


def test_where_turns_part_is_shown() -> None:
    [found] = [one for one in partings(Words(keeps=False)) if one.of == "thinking"]
    assert isinstance(found, Parting)
    assert (found.before, found.was, found.comes) == ("sistant>", "<think>\n", "The capi")
    said = check_template(Words(keeps=False)).said
    assert f"repeats {found.kept} of a turn's {found.tokens} tokens, up to 'sistant>'" in said


def test_common_beginnings() -> None:
    assert [common([1, 2, 3], other) for other in ([1, 2, 4], [1, 2], [1, 2, 3, 4], [], [5])] == [2, 2, 3, 0, 0]
