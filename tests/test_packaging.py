"""The package as it is installed: nothing missing, nothing heavy imported, imports in one direction only."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]
MAY_IMPORT = {
    "codec": {"codec"},
    "policies": {"policies"},
    "manager": {"manager", "codec", "policies"},
    "vllm_hooks": {"vllm_hooks", "manager", "codec", "policies"},
    "benchmarks": {"benchmarks", "vllm_hooks", "manager", "codec", "policies"},
}
OURS = [*MAY_IMPORT, "tests", ".ci"]
NOT_INSTALLED = "experiments/"
KNOW_VLLM = {"vllm_hooks", "benchmarks"}

each_package = pytest.mark.parametrize("package", MAY_IMPORT)


def installed(package: str) -> Path:
    spec = find_spec(f"manthan.{package}")
    assert spec, f"manthan.{package} is not installed"
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def python_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def imported_modules(path: Path, package: str) -> Iterator[str]:
    """The absolute names of all that a file imports, at its top or inside of functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = f"manthan.{package}." + (node.module or "") if node.level else node.module or ""
            yield from (f"{module}.{alias.name}" for alias in node.names)


@each_package
def test_every_source_file_is_installed_as_it_is(package: str) -> None:
    def contents(folder: Path) -> dict[str, str]:
        return {str(path.relative_to(folder)): path.read_text() for path in python_files(folder)}

    ours = {path: text for path, text in contents(REPO / package).items() if not path.startswith(NOT_INSTALLED)}
    assert contents(installed(package)) == ours
    assert "__init__.py" in contents(installed(package))
    assert (installed(package) / "py.typed").exists()


@pytest.mark.parametrize("module", ["manthan.codec", "manthan.policies", "manthan.manager", "manthan.manager.cli"])
def test_importing_loads_neither_torch_nor_vllm(module: str, tmp_path: Path) -> None:
    code = f"import sys, {module}; print(*sorted({{'torch', 'vllm', 'transformers'}} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == ""


@each_package
def test_imports_run_one_way(package: str) -> None:
    allowed = MAY_IMPORT[package]
    for path in python_files(installed(package)):
        for name in imported_modules(path, package):
            root, _, rest = f"{name}.".partition(".")
            if root == "manthan":
                assert rest.split(".")[0] in allowed, f"{package}/{path.name} imports {name}"
            assert root != "vllm" or package in KNOW_VLLM, f"{package}/{path.name} imports {name}"
            assert root != "torch" or package != "policies", f"policies/{path.name} imports {name}"


@pytest.mark.parametrize("folder", OURS)
def test_our_packages_are_imported_by_their_full_name(folder: str) -> None:
    for path in python_files(REPO / folder):
        roots = {name.split(".")[0] for name in imported_modules(path, folder)}
        assert not roots & MAY_IMPORT.keys(), f"{folder}/{path.name} imports {roots & MAY_IMPORT.keys()}"
