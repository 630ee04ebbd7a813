"""The packages in docs/examples, built, installed and used as a reader would."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

MANTHAN = "from manthan.manager.cli import app; app(prog_name='manthan')"
EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def install(package: Path, folder: Path) -> Path:
    """A folder within this one that the package is installed into."""
    shutil.copytree(package, folder / "source")  # building leaves files there
    offline = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
    command = [sys.executable, "-m", "pip", "install", "-q", *offline, "--target", folder / "site", folder / "source"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder / "site"


def path_with(site: Path) -> str:
    """PYTHONPATH, with this folder in front."""
    return os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))


def run(site: Path, folder: Path, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python code, in this folder, with what is installed."""
    env = os.environ | {"PYTHONPATH": path_with(site)}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60)
