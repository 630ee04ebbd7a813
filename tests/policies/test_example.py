"""The example of docs/policies.md, built and installed as its reader would."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "manthan-policy-largest"
MANTHAN = "from manthan.manager.cli import app; app(prog_name='manthan')"
ORDER = """
from manthan.manager.config import load_config
from manthan.manager.registries import choose_policy
from manthan.policies import SessionView

policy, options = choose_policy(load_config("x.yaml").policy)
largest = policy(options)
for session_id, tokens in (("long", 900), ("short", 100), ("longer", 1000), ("shorter", 10)):
    largest.used(SessionView(session_id, tokens=tokens))
print(*largest.victims())
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the package is installed into."""
    folder = tmp_path_factory.mktemp("example")
    shutil.copytree(EXAMPLE, folder / "source")  # building leaves files there
    offline = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
    command = [sys.executable, "-m", "pip", "install", "-q", *offline, "--target", folder / "site", folder / "source"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder / "site"


def run(site: Path, folder: Path, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)


def test_it_is_used_by_its_name(site: Path, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("policy: {name: largest, spared_tokens: 500}")
    checked = run(site, tmp_path, MANTHAN, "config", "check", "x.yaml")
    assert checked.returncode == 0, checked.stderr
    rows = [line.split() for line in checked.stdout.splitlines()]
    assert ["policy.name", "largest", "x.yaml"] in rows
    assert ["policy.spared_tokens", "500", "x.yaml"] in rows
    assert run(site, tmp_path, ORDER).stdout.split() == ["longer", "long", "short", "shorter"]


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        (
            "spared_tokens: -1",
            "policy.spared_tokens must be a whole number of tokens, 0 or more, such as 4096, not -1",
        ),
        ("spared: 1", "unknown largest option 'spared' (did you mean 'spared_tokens'?)"),
    ],
)
def test_its_option_is_checked(option: str, sentence: str, site: Path, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(f"policy: {{name: largest, {option}}}")
    checked = run(site, tmp_path, MANTHAN, "config", "check", "x.yaml")
    assert (checked.returncode, checked.stdout, checked.stderr.strip()) == (1, "", f"x.yaml: {sentence}")


def test_it_is_listed(site: Path, tmp_path: Path) -> None:
    listed = run(site, tmp_path, MANTHAN, "policies").stdout
    assert "The largest session goes first." in listed
    assert "spared_tokens=4096" in listed
