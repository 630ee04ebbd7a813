"""The folder of a cold store on disk: what is refused, in a sentence, and whose it is."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from manthan.manager.config.model import ConfigError
from manthan.manager.tiers.disk import check_folder, open_root, remove_others
from manthan.manager.tiers.journal import Journal

OTHER = """
import sys, time
from pathlib import Path
from manthan.manager.tiers.disk import open_root
held = open_root(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


def refused(path: object) -> str:
    with pytest.raises(ConfigError) as error:
        check_folder(str(path))
    return str(error.value)


def test_what_is_no_folder(tmp_path: Path) -> None:
    assert refused(tmp_path / "x") == (
        f"tiers.disk.path is '{tmp_path}/x', but there is no such folder: name one that is there, on a "
        "local file system."
    )
    (tmp_path / "x").touch()
    assert "but that is no folder: name one" in refused(tmp_path / "x")


def test_a_folder_that_may_not_be_written_to(tmp_path: Path) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(tmp_path)], check=False).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        assert refused(tmp_path) == (
            f"tiers.disk.path is '{tmp_path}', but nothing can be written there (Read-only file system): name a folder "
            "that this user may write to."
        )
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize("folder", [".", "replica-1"])
def test_two_servers_do_not_share_a_folder(tmp_path: Path, folder: str) -> None:
    other = subprocess.Popen(  # a server's engine has a parent that is not ours
        ["sh", "-c", '"$0" -c "$1" "$2"; true', sys.executable, OTHER, str(tmp_path / folder)], stdout=subprocess.PIPE
    )
    assert other.stdout.readline() == b"held\n"
    sentence = f"tiers.disk.path is '{tmp_path}', which another server uses: give each a folder of its own."
    assert refused(tmp_path) == sentence
    with pytest.raises(ConfigError, match="which another server uses"):
        open_root(tmp_path / folder)
    [pid, _] = (tmp_path / folder / "lock").read_text().split()
    os.kill(int(pid), signal.SIGKILL)
    other.wait()
    other.stdout.close()
    check_folder(str(tmp_path))
    open_root(tmp_path / folder).close()


def test_processes_of_one_server_do_not_refuse_each_other(tmp_path: Path) -> None:
    held = open_root(tmp_path)
    check_folder(str(tmp_path))
    code = f"from manthan.manager.tiers.disk import check_folder; check_folder({str(tmp_path)!r})"
    other = subprocess.Popen([sys.executable, "-c", OTHER, str(tmp_path / "replica-1")], stdout=subprocess.PIPE)
    other.stdout.readline()  # our child, as an engine is
    check_folder(str(tmp_path))
    subprocess.run([sys.executable, "-c", code.replace(str(tmp_path), str(tmp_path / "replica-1"))], check=True)
    other.kill()
    other.wait()
    other.stdout.close()
    held.close()


def test_what_is_of_another_configuration_is_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in ("mine-0123456789ab", "other-ba9876543210"):
        Journal(tmp_path / name).close()
        (tmp_path / name / "rank-0-of-1").mkdir()
        (tmp_path / name / "rank-0-of-1" / "blocks").write_bytes(bytes(1000))
    for kept in ("notes", "photos-ba9876543210"):
        (tmp_path / kept).mkdir()
        (tmp_path / kept / "file").write_text("x")
    (tmp_path / "mine-0123456789ab" / "rank-0-of-1").rename(tmp_path / "mine-0123456789ab" / "rank-0-of-1.bad")
    removed = remove_others(tmp_path, "mine-0123456789ab", {1})
    assert list(removed) == ["other-ba9876543210"]
    assert removed["other-ba9876543210"] >= 1000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine-0123456789ab", "notes", "photos-ba9876543210"]
