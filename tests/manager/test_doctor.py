"""What `manthan doctor` finds of memlock, disks, keys, Redis and templates."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from documents import REPO
from key_files import write_keys
from redis_server import RedisServer, running

from manthan.manager import doctor
from manthan.manager.config.model import ManthanConfig
from manthan.manager.config.resolve import resolve_config
from manthan.manager.doctor import (
    Finding,
    Grade,
    Message,
    Parting,
    check_disk,
    check_keys,
    check_memlock,
    check_redis,
    check_template,
    file_system,
    partings,
)
from manthan.manager.tiers.disk import open_root

GIB = 1 << 30
PASSWORD = "not-for-the-log"


def config(**options: object) -> ManthanConfig:
    """Return a configuration. `tiers__kind` stands for `tiers.kind`."""
    return resolve_config(env={}, flags={key.replace("__", "."): value for key, value in options.items()}).config


def on_disk(path: Path, **options: object) -> ManthanConfig:
    return config(tiers__kind="disk", tiers__disk__path=str(path), **options)


# -- memlock ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "mark"), [(8 << 20, Grade.WARNING), (GIB << 3, Grade.OK), (-1, Grade.OK)])
def test_a_memlock_limit_below_what_is_pinned(limit: int, mark: Grade, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (limit, limit))
    found = check_memlock(config().tiers, has_gpu=True)
    assert found.mark is mark
    assert ("the limit is 8.0MiB, but 4.0GiB of RAM are pinned" in found.said) == (mark is Grade.WARNING)


def test_nothing_is_pinned_without_a_gpu_or_ram(tmp_path: Path) -> None:
    assert check_memlock(config().tiers, has_gpu=False).mark is Grade.SKIPPED
    assert check_memlock(on_disk(tmp_path).tiers, has_gpu=True).mark is Grade.SKIPPED


# -- a disk ----------------------------------------------------------------------------------------------


def test_a_folder_that_is_good(tmp_path: Path) -> None:
    found = check_disk(on_disk(tmp_path, tiers__max_bytes="1MiB"))
    kind = subprocess.run(["stat", "-f", "-c", "%T", tmp_path], capture_output=True, text=True).stdout
    assert found.mark is Grade.OK or kind.startswith("tmpfs"), found.said


def test_a_folder_in_ram(tmp_path: Path) -> None:
    if file_system(Path("/dev/shm")) != "tmpfs":
        pytest.skip("there is no tmpfs")
    found = check_disk(on_disk(Path("/dev/shm")))
    assert found == Finding(
        "disk",
        Grade.WRONG,
        "tiers.disk.path is '/dev/shm', which is on tmpfs, which is RAM and empty after a restart: name a folder on "
        "a disk.",
    )


def test_a_folder_on_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts, shared = tmp_path / "mounts", tmp_path / "my données"
    (shared / "codes").mkdir(parents=True)
    line = f"nas:/codes {str(shared).replace(' ', chr(92) + '040')} nfs4 rw 0 0\n"
    mounts.write_text("/dev/vda / ext4 rw 0 0\n" + line)
    monkeypatch.setattr(doctor, "MOUNTS", mounts)
    found = check_disk(on_disk(shared / "codes"))
    assert (found.mark, "which is on nfs4, which is not of this machine" in found.said) == (Grade.WRONG, True)
    assert file_system(tmp_path) == "ext4"


def test_a_file_of_keys(tmp_path: Path) -> None:
    assert check_keys(on_disk(tmp_path)).mark is Grade.SKIPPED
    file = tmp_path / "keys"
    sealed = on_disk(tmp_path, sealing__key_file=str(file))
    wrong = check_keys(sealed)
    assert wrong == Finding("keys", Grade.WRONG, f"sealing.key_file: {file} cannot be read: No such file or directory.")
    write_keys(file, "new", "old")
    assert check_keys(sealed) == Finding("keys", Grade.OK, f"{file} has 2 keys; the first one seals new blocks.")
    file.chmod(0o644)
    assert "has mode 0644" in check_keys(sealed).said


def test_too_little_room(tmp_path: Path) -> None:
    found = check_disk(on_disk(tmp_path, tiers__max_bytes="8000TiB"))
    assert found.mark is Grade.WRONG
    assert "for 7.8PiB of compressed blocks; lower that, or make room." in found.said


LOOKING = """
import sys
from manthan.manager.config.resolve import resolve_config
from manthan.manager import doctor
from manthan.manager.doctor import check_disk
flags = {"tiers": {"kind": "disk", "disk": sys.argv[1], "max_bytes": "1MiB"}}
print(check_disk(resolve_config(env={}, flags=flags).config).said)
"""


def test_what_cannot_be_used_and_what_is_in_use(tmp_path: Path) -> None:
    assert "there is no such folder" in check_disk(on_disk(tmp_path / "x")).said
    looking = ["sh", "-c", '"$0" -c "$@"; true', sys.executable, LOOKING, tmp_path]  # no child of ours
    with open_root(tmp_path):
        said = subprocess.run(looking, capture_output=True, text=True, check=True).stdout
    assert said.endswith("1.0MiB of compressed blocks; a server uses it now.\n")


# -- Redis ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    yield from running(tmp_path_factory.mktemp("doctor"), "--maxmemory", "100mb")


def allow(server: RedisServer, without: str = "") -> None:
    """Make the user of the document's ACL for engines, less one command."""
    lines = (REPO / "docs" / "redis.md").read_text(encoding="utf-8").splitlines()
    acl = next(line for line in lines if line.startswith("ACL SETUSER")).replace("PASSWORD", PASSWORD).split()
    assert f"+{without}" in acl or not without
    server.client.execute_command("ACL", "DELUSER", acl[2])
    server.client.execute_command(*(word for word in acl if word != f"+{without}"))


def in_redis(url: str) -> ManthanConfig:
    return config(tiers__kind="redis", tiers__redis__url=url, **{"tiers__max_bytes": "64MiB"})


def test_a_redis_that_is_good(server: RedisServer) -> None:
    server.client.config_set("maxmemory-policy", "volatile-ttl")
    assert [(one.check, one.mark) for one in check_redis(in_redis(server.url))] == [
        ("Redis", Grade.OK),
        ("Redis memory", Grade.OK),
    ]
    assert server.client.dbsize() == 0


def test_a_redis_that_evicts_nothing(server: RedisServer) -> None:
    server.client.config_set("maxmemory-policy", "noeviction")
    server.client.config_set("maxmemory", 1 << 30)
    [found] = [one for one in check_redis(in_redis(server.url)) if one.mark is Grade.WARNING]
    assert "has maxmemory-policy noeviction, so that it refuses writes when it is full" in found.said


def test_a_user_without_rights(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANTHAN_REDIS_PASSWORD", PASSWORD)
    allow(server, without="unlink")
    [found] = check_redis(in_redis(server.url.replace("//", "//manthan@")))
    assert found.mark is Grade.WRONG
    assert "refuses a command that engines send" in found.said
    assert "'unlink' command" in found.said
    allow(server)
    assert next(iter(check_redis(in_redis(server.url.replace("//", "//manthan@"))))).mark is Grade.OK


def test_nobody_answers() -> None:
    [found] = check_redis(in_redis("redis://127.0.0.1:1/0"))
    assert found.mark is Grade.WRONG
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
        assert check_template(words).mark is Grade.OK


@pytest.mark.parametrize(
    ("words", "of"),
    [
        (Words(keeps=False), {"thinking", "thinking within the answer"}),
        (Words(keeps=False, knows=False), {"thinking within the answer"}),
        (Words(clock=True), {"the next turn on another day"}),
        (
            Words(opens=True, keeps=False),
            {"plain answers", "the next turn on another day", "thinking", "thinking within the answer"},
        ),
    ],
)
def test_what_rewrites_history_is_told(words: Words, of: set[str]) -> None:
    assert rewritten(words) == of
    assert check_template(words).mark is Grade.WRONG


def test_where_turns_part_is_shown() -> None:
    [found] = [one for one in partings(Words(keeps=False)) if one.of == "thinking"]
    assert isinstance(found, Parting)
    assert (found.before, found.was, found.comes) == ("sistant>", "<think>\n", "The capi")
    said = check_template(Words(keeps=False)).said
    assert f"repeats {found.kept} of a turn's {found.tokens} tokens, up to 'sistant>'" in said
