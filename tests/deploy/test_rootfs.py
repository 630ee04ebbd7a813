"""The image's root, made of the Dockerfile's steps without a daemon."""

import runpy
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from deployment import DEPLOY, REPO

SCRIPT = REPO / ".ci" / "rootfs.py"
ROOTFS: dict[str, Any] = runpy.run_path(str(SCRIPT))


def test_each_step_of_the_dockerfile_is_known() -> None:
    found = list(ROOTFS["steps"]((DEPLOY / "Dockerfile").read_text(encoding="utf-8")))
    assert [step.name for step in found].count("FROM") == 2
    [install] = [step.text for step in found if "uv pip install" in step.text]
    assert ROOTFS["MOUNT"].findall(install) == [("wheel", "/wheels", "/wheels")]
    assert all(step.name == "ARG" or hasattr(ROOTFS["Builder"], f"_{step.name.lower()}") for step in found)


def test_a_step_that_is_not_known_ends_it(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no such instruction"):
        ROOTFS["Builder"](tmp_path, tmp_path, "0").build("ADD a b")


@pytest.mark.slow
def test_its_steps_make_a_root_in_which_the_command_runs(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, SCRIPT, tmp_path], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    [archive] = tmp_path.iterdir()
    with tarfile.open(archive) as root:
        files = {member.name: member for member in root}
    store = files["./var/lib/manthan"]
    assert (store.uid, store.gid, store.mode) == (2000, 0, 0o770)
    assert files["./usr/local/bin/manthan"].mode & 0o111
    assert not [name for name in files if name.startswith(("./wheels/", "./source/"))]
