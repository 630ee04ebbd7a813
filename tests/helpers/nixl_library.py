"""NIXL, which hands KV from one engine to another: its wheel, in a folder that is put in front of `sys.path`."""

import subprocess
import sys

import pytest
from filelock import FileLock
from release import ROOT

PACKAGES = ("nixl==1.5.1", "nixl-cu12==1.5.1")
"""The Python package, and one of its libraries. They run without a GPU too."""


def import_nixl() -> None:
    """Make `nixl` importable here, and in processes that begin later. Skips the test where pip cannot fetch it."""
    folder = ROOT / "build" / "nixl"
    folder.parent.mkdir(exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not (folder / "nixl").exists():
            command = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--only-binary", ":all:"]
            done = subprocess.run(
                [*command, "--target", str(folder), *PACKAGES], capture_output=True, text=True, check=False
            )
            if done.returncode:
                pytest.skip(f"pip cannot fetch {PACKAGES[0]}: {done.stderr.strip()[-200:]}")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
