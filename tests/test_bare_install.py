"""After `pip install .` and no more: an environment with the wheel and what it declares, nothing else."""

import os
import subprocess
import sys
import venv
from importlib.metadata import Distribution, distributions, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPO = Path(__file__).parents[1]
FROM_VLLM = {"numba", "torch"}
OF_VLLM = ("codec.cpu.numba_", "codec.gpu", "codec.transformers", "manager.calibration.model")
"""Modules that import what comes with vLLM; nothing imports them where that is missing."""
MAIN = "import sys; from manthan.manager.cli import app; sys.argv[0] = 'manthan'; app()"
IMPORT_ALL = """
import importlib, pkgutil
for name in ("codec", "policies", "manager"):
    package = importlib.import_module(f"manthan.{name}")
    for module in pkgutil.walk_packages(package.__path__, f"manthan.{name}.", onerror=lambda name: None):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            print(module.name.removeprefix("manthan."), error.name)
"""


def needed(name: str, found: dict[str, Distribution]) -> dict[str, Distribution]:
    """The installed distributions that this one declares, and those that they do; no extras."""
    if name.lower() not in found:
        installed = [
            path for path in sys.path if Path(path).name == "site-packages"
        ]  # not what was built in a checkout
        found[name.lower()] = dist = next(iter(distributions(name=name, path=installed)))
        for line in dist.requires or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                needed(requirement.name, found)
    return found


class Bare:
    """A virtual environment into which these distributions are linked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        venv.create(folder / "venv", symlinks=True, with_pip=False)
        self.python = folder / "venv" / "bin" / "python"
        [self.site] = (folder / "venv" / "lib").glob("python*/site-packages")
        for dist in needed("manthan-kv", {}).values():
            for top in {file.parts[0] for file in dist.files or []} - {"..", "__pycache__"}:
                (self.site / top).symlink_to(Path(str(dist.locate_file(top))).resolve())

    def run(self, code: str, *args: str) -> subprocess.CompletedProcess[str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        command = [self.python, "-c", code, *args]
        return subprocess.run(command, cwd=REPO / "configs", env=env, capture_output=True, text=True)

    def manthan(self, *args: str) -> subprocess.CompletedProcess[str]:
        return self.run(MAIN, *args)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Bare:
    return Bare(tmp_path_factory.mktemp("bare"))


def test_nothing_else_is_there(bare: Bare) -> None:
    result = bare.run("import vllm")
    assert "No module named 'vllm'" in result.stderr
    assert str(bare.site) in bare.run("import numpy; print(numpy.__file__)").stdout


@pytest.mark.parametrize(
    ("args", "shown"),
    [
        (["version"], version("manthan-kv")),
        (["policies"], "returns"),
        (["config", "check", "default.yaml"], "tiers.max_bytes"),
        (["simulate", "--help"], "--policy"),
        (["--help"], "bench"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_command_works(bare: Bare, args: list[str], shown: str) -> None:
    result = bare.manthan(*args)
    assert result.returncode == 0, result.stderr
    assert shown in result.stdout
    assert result.stderr == ""


@pytest.mark.parametrize("args", [["bench"], ["bench", "capacity", "MODEL", "--json", "x"], ["eval", "--help"]])
def test_a_command_of_an_extra_says_which(bare: Bare, args: list[str]) -> None:
    result = bare.manthan(*args)
    assert result.returncode == 1
    assert result.stdout == ""
    how = "pip install '.[bench]' in a clone of the repository"
    assert result.stderr == f"manthan {args[0]} needs httpx, which is not installed: {how}\n"


def test_doctor_says_that_vllm_is_missing(bare: Bare) -> None:
    result = bare.manthan("doctor")
    assert result.returncode == 1
    said = " ".join(result.stdout.split())
    assert "it is not installed: pip install '.[vllm]' (vllm" in said
    assert ") in a clone of the repository." in said
    assert result.stderr == ""


def test_what_is_imported_is_declared(bare: Bare) -> None:
    result = bare.run(IMPORT_ALL)
    assert result.returncode == 0, result.stderr
    missing = [line.split() for line in result.stdout.splitlines()]
    assert {package for _, package in missing} <= FROM_VLLM
    assert {module for module, _ in missing if not module.startswith(OF_VLLM)} == set()
