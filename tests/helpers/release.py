"""Sources of a release of vLLM, read without running them: what modules define, and what classes have."""

import ast
import re
import subprocess
import sys
import zipfile
from functools import cache, cached_property
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).parents[2]
FOLDERS = ("benchmarks", "codec", "manager", "policies", "tests", "vllm_hooks")
IMPORTS = re.compile(r"^\s*(?:from|import)\s.*\bvllm\b", re.MULTILINE)
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_31_x86_64", "manylinux2014_x86_64")


@cache
def names_used() -> list[tuple[str, str]]:
    """Return each module of vLLM that Manthan's sources and tests import, and each name from it; "" for none."""
    found = set()
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if IMPORTS.search(text) else ():
            if isinstance(node, ast.ImportFrom) and not node.level:
                found |= {(node.module or "", alias.name) for alias in node.names}
            elif isinstance(node, ast.Import):
                found |= {(alias.name, "") for alias in node.names}
    return sorted((module, name) for module, name in found if module.split(".")[0] == "vllm")


def fetched(version: str) -> "Release":
    """Return the release's sources, from its wheel. Skips the test where pip cannot fetch that."""
    folder = ROOT / "build" / "releases" / version
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f"{version}.lock"):
        if not (folder / "vllm").exists():
            _fetch(version, folder)
    return Release(folder)


def _fetch(version: str, folder: Path) -> None:
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--only-binary", ":all:"]
    command += ["--python-version", "3.12", *platforms, "--dest", str(folder), f"vllm=={version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"pip cannot fetch vllm {version}: {done.stderr.strip()[-200:]}")
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        for name in packed.namelist():
            if name.startswith("vllm/") and name.endswith(".py"):
                packed.extract(name, folder / "part")
    (folder / "part" / "vllm").rename(folder / "vllm")
    wheel.unlink()


class Module:
    """A module's syntax tree. top: statements of its top level, those under `if` and `try` among them."""

    def __init__(self, path: Path) -> None:
        self.text = path.read_text(encoding="utf-8")
        self.tree = ast.parse(self.text)

    @cached_property
    def top(self) -> list[ast.stmt]:
        return list(_flat(self.tree.body))

    def find(self, name: str) -> ast.stmt | None:
        """Return the last statement that gives this name a value; None if there is none."""
        return next((each for each in reversed(self.top) if name in _names(each)), None)


class Release:
    """A release of vLLM in a folder that contains the folder `vllm`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.module = cache(self._module)

    def _module(self, name: str) -> Module | None:
        path = self.folder.joinpath(*name.split("."))
        found = next((each for each in (path / "__init__.py", path.with_suffix(".py")) if each.exists()), None)
        return Module(found) if found else None

    def has(self, module: str, name: str) -> bool:
        """True if the module is there, and the name in it: defined, assigned, imported, or a module itself."""
        made = self.module(module)
        if made is None or not name:
            return made is not None
        starred = [each for each in made.top if isinstance(each, ast.ImportFrom) and each.names[0].name == "*"]
        return (
            made.find(name) is not None
            or self.module(f"{module}.{name}") is not None
            or any(self.has(_absolute(module, each, self), name) for each in starred)
        )

    def definition(self, module: str, name: str) -> tuple[str, ast.stmt] | None:
        """Return the statement that defines a name, and its module. Imports are followed."""
        made = self.module(module)
        found = made.find(name) if made else None
        if isinstance(found, ast.ImportFrom):
            source = next(alias.name for alias in found.names if name in (alias.name, alias.asname))
            return self.definition(_absolute(module, found, self), source)
        return None if found is None else (module, found)

    def member(self, path: str) -> ast.AST | None:
        """Return what gives an attribute, `module.Class.name`, a value, in the class or in one it inherits from."""
        owner, _, name = path.rpartition(".")
        found = self.definition(*owner.rsplit(".", 1))
        if found is None or not isinstance(found[1], ast.ClassDef):
            return self.definition(owner, name)[1] if self.has(owner, name) else None  # type: ignore[index]
        module, made = found
        for node in ast.walk(made):
            if isinstance(node, ast.stmt) and name in _names(node, "self."):
                return node
        bases = (ast.unparse(base).split("[")[0] for base in made.bases)
        return next((each for base in bases if (each := self.member(f"{module}.{base}.{name}"))), None)

    def parameters(self, path: str) -> list[str]:
        """Return the names of a function's parameters, `module.function` or `module.Class.function`."""
        made = self.member(path)
        assert isinstance(made, ast.FunctionDef | ast.AsyncFunctionDef), path
        every = made.args
        extra = [each.arg for each in (every.vararg, every.kwarg) if each]
        return [*(each.arg for each in (*every.posonlyargs, *every.args, *every.kwonlyargs)), *extra]

    def source(self, path: str) -> str:
        """Return the text of a method, `module.Class.method`, or of a function."""
        made = self.member(path)
        assert made is not None, path
        owner = path.rpartition(".")[0]
        found = self.definition(*owner.rsplit(".", 1))
        module = self.module(found[0] if found else owner)
        assert module is not None, path
        return ast.get_source_segment(module.text, made) or ""


def _flat(body: list[ast.stmt]) -> "list[ast.stmt]":
    found: list[ast.stmt] = []
    for each in body:
        found.append(each)
        for part in ("body", "orelse", "finalbody") if isinstance(each, ast.If | ast.Try | ast.With) else ():
            found += _flat(getattr(each, part, []))
    return found


def _names(node: ast.stmt, prefix: str = "") -> set[str]:
    """Names to which a statement gives a value; with a `prefix` such as "self.", attributes too."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.split(".")[0] for alias in node.names}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    parts = [part for each in targets if each for part in (each.elts if isinstance(each, ast.Tuple) else [each])]
    return {ast.unparse(part).removeprefix(prefix) for part in parts}


def _absolute(module: str, node: ast.ImportFrom, release: Release) -> str:
    if not node.level:
        return node.module or ""
    is_package = (release.folder.joinpath(*module.split(".")) / "__init__.py").exists()
    base = module.split(".")[: len(module.split(".")) - node.level + is_package]
    return ".".join([*base, *([node.module] if node.module else [])])
