"""The package as it is installed: nothing missing, nothing heavy imported, imports in one direction only."""

import ast
import os
import subprocess
import sys
import tomllib
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
COMMANDS = "manthan.benchmarks.cli", "manthan.benchmarks.simulator.command"
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


@pytest.mark.parametrize("package", [package for package in MAY_IMPORT if package != "benchmarks"])
def test_every_source_file_is_installed_as_it_is(package: str) -> None:
    def contents(folder: Path) -> dict[str, str]:
        return {str(path.relative_to(folder)): path.read_text() for path in python_files(folder)}

    assert contents(installed(package)) == contents(REPO / package)
    assert "__init__.py" in contents(installed(package))
    assert (installed(package) / "py.typed").exists()


def test_the_wheel_has_the_benchmarks_that_commands_run_and_no_others() -> None:
    graph = import_graph("benchmarks", REPO / "benchmarks")
    needed, further = set(), set(COMMANDS)
    while further:
        needed |= further
        further = {name for module in further for name in graph[module]} - needed
    declared = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["setuptools"]["py-modules"]
    peers = {name for name in needed if name.startswith("manthan.benchmarks.peers")}
    simulator = {name for name in needed if name.startswith("manthan.benchmarks.simulator")}  # a package
    assert set(declared) == needed - peers - simulator - {"manthan.benchmarks"}
    assert len(declared) == len(set(declared)) > 20


@pytest.mark.parametrize("module", ["codec", "codec.block", "codec.gpu", "policies", "manager", "manager.cli"])
def test_importing_loads_neither_torch_nor_vllm(module: str, tmp_path: Path) -> None:
    code = f"import sys, manthan.{module}; print(*sorted({{'torch', 'vllm', 'transformers'}} & set(sys.modules)))"
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


def test_nothing_that_is_read_is_unpickled() -> None:
    for package in ("codec", "manager", "policies", "vllm_hooks"):
        for path in python_files(installed(package)):
            roots = {name.split(".")[0] for name in imported_modules(path, package)}
            assert not roots & {"pickle", "cloudpickle", "marshal", "shelve", "dill", "joblib"}, path
            assert not any(word in path.read_text() for word in ("allow_pickle", "torch.load(")), path


def run_time_imports(node: ast.AST, package: str) -> Iterator[str]:
    """The absolute names of what a file imports, at its top or inside of functions, but for type checkers alone."""
    for_checkers = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    for child in node.orelse if for_checkers else ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert not child.level, f"{package} has a relative import: {ast.unparse(child)}"
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        else:
            yield from run_time_imports(child, package)


def import_graph(package: str, folder: Path) -> dict[str, set[str]]:
    """Each module of a package, with those of the same package that it imports.

    `from package.module import name` is an import of the module, and of `package.module.name` if that is one.
    """
    names = {}
    for path in python_files(folder):
        parts = path.relative_to(folder).with_suffix("").parts
        names[".".join(["manthan", package, *(part for part in parts if part != "__init__")])] = path
    graph = {}
    for module, path in names.items():
        graph[module] = set()
        for name in run_time_imports(ast.parse(path.read_text()), package):
            found = name if name in names else name.rpartition(".")[0]
            graph[module] |= {found} & names.keys() - {module}
    return graph


@pytest.mark.parametrize("folder", OURS)
def test_our_packages_are_imported_by_their_full_name(folder: str) -> None:
    for path in python_files(REPO / folder):
        roots = {name.split(".")[0] for name in imported_modules(path, folder)}
        assert not roots & MAY_IMPORT.keys(), f"{folder}/{path.name} imports {roots & MAY_IMPORT.keys()}"


@pytest.mark.parametrize(("platform", "is_refused"), [("Linux x86_64", True), ("Darwin arm64", False)])
def test_no_cuda_torch_is_installed_for_the_tests(tmp_path: Path, platform: str, is_refused: bool) -> None:
    """`make setup` where pip finds no torch of version +cpu: it ends with a sentence, or takes the platform's own."""
    programs, python = tmp_path / "programs", tmp_path / "venv" / "bin" / "python"
    pip = 'echo "$@" >>"$(dirname "$0")/asked"; case "$*" in *torch==*+cpu) exit 1;; *torch==*) exit 9;; esac'
    for path, script in ((programs / "uname", f"echo {platform}"), (python, pip)):
        path.parent.mkdir(parents=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    command = [REPO / ".ci" / "setup_venv.sh", tmp_path / "venv", tmp_path / "wheels"]
    path = f"{programs}:{os.environ['PATH']}"
    ended = subprocess.run(command, env={"PATH": path}, capture_output=True, text=True, timeout=60)
    asked = (python.parent / "asked").read_text().splitlines()
    assert any("torch==" in line and "+cpu" not in line for line in asked) != is_refused
    assert ended.returncode == (1 if is_refused else 9)
    assert ("+cpu could not be installed" in ended.stderr and "PIP_FIND_LINKS" in ended.stderr) == is_refused
