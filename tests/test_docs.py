"""The documents against what they are about: the ACL that is tested, hints, the configuration, metrics and causes."""

import ast
import json
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from documents import REPO, documents, rows
from loaded import load_config

from manthan.manager.config.model import GROUPS, RedisConfig
from manthan.manager.events import DropCause
from manthan.manager.session.hints import HIGHEST_PRIORITY, LONGEST_NAME, MOST_PREFETCHES, Hints, parse_hints
from manthan.vllm_hooks.telemetry.metrics import FAILURE_CAUSES, METRICS

PACKAGES = ("codec", "manager", "policies", "vllm_hooks")
REDIS = (REPO / "docs" / "redis.md").read_text(encoding="utf-8")
HINTS = (REPO / "docs" / "hints.md").read_text(encoding="utf-8")
TROUBLE = (REPO / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
README = (REPO / "README.md").read_text(encoding="utf-8")
MOST_OF_README, MOST_LINES = 150, 3000
MOST_BYTES = 20_000_000


def blocks(text: str, language: str) -> list[str]:
    """Return the texts between fences of this language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


YAML = [(path.name, block) for path in documents() for block in blocks(path.read_text(encoding="utf-8"), "yaml")]
PLACEHOLDER = re.compile(r"%[-.\d]*[a-z]")


def logged() -> Iterator[str]:
    """Yield all texts of the code, with … for inserted values."""
    for package in PACKAGES:
        for path in (REPO / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                    yield "".join(map(str, parts))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield PLACEHOLDER.sub("…", node.value)


@cache
def texts() -> set[str]:
    return set(logged())


def test_all_keys_under_redis_are_named_and_no_others() -> None:
    assert set(re.findall(r"`tiers\.redis\.(\w+)", REDIS)) == set(RedisConfig.model_fields)


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.relative_to(REPO).as_posix())
def test_metrics_are_those_of_the_code(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert "vllm:manthan_" in text or text not in (REDIS, HINTS, README)
    named = {re.sub("_(total|bucket|sum|count)$", "", name) for name in re.findall(r"vllm:manthan_(\w+)", text)}
    assert named <= set(METRICS)


def causes() -> set[str]:
    """Return the causes of failures that troubleshooting.md explains."""
    return {cause for row in rows(TROUBLE, "cause") for cause in re.findall(r"`(\w+)`", row[0])}


def test_causes_and_outcomes_are_those_of_the_code() -> None:
    assert causes() == set(FAILURE_CAUSES)
    assert causes() | {"found", "nothing", "unanswered"} | set(re.findall(r'outcome="(\w+)"', REDIS)) <= texts()
    assert set(re.findall(r'cause="(\w+)"', TROUBLE)) <= set(DropCause)


def test_every_cause_of_a_refused_block_is_explained() -> None:
    text = (REPO / "codec" / "errors.py").read_text(encoding="utf-8")
    refusals = set(re.findall(r'^    cause = "(\w+)"', text, re.MULTILINE)) - {"header"}  # a mistake of the writer
    assert refusals <= causes()


@pytest.mark.parametrize(("name", "block"), YAML, ids=[f"{name}-{n}" for n, (name, _) in enumerate(YAML)])
def test_yaml_loads(name: str, block: str, tmp_path: Path) -> None:
    path = tmp_path / "manthan.yaml"
    path.write_text(block, encoding="utf-8")
    assert name != "redis.md" or load_config(path, env={}).tiers.is_shared
    assert load_config(path, env={}).model_fields_set


def test_every_hint_is_explained_and_has_an_example() -> None:
    table = {row[0].strip("`"): row[1] for row in rows(HINTS, "hint")}
    assert set(table) == set(Hints.model_fields)
    assert f"-{HIGHEST_PRIORITY} to {HIGHEST_PRIORITY}" in table["priority"]
    assert f"up to {MOST_PREFETCHES}" in table["prefetch"]
    assert f"up to {LONGEST_NAME} printable characters" in HINTS
    for hint, _, example, _ in rows(HINTS, "hint"):
        assert set(parse_hints(json.loads(example.strip("`"))).given) == {hint.strip("`")}
    for example in re.findall(r'"kv_transfer_params": \{"manthan": (\{.*?\})\}', "".join(blocks(HINTS, "sh")) + README):
        assert parse_hints(json.loads(example)).given
    python = "".join(blocks(HINTS, "python"))
    calls = [ast.parse(call, mode="eval").body for call in re.findall(r"hints\([a-z_]+=.*?\)(?=\))", python)]
    given = {key.arg for call in calls if isinstance(call, ast.Call) for key in call.keywords}
    assert given
    assert given <= set(Hints.model_fields)


def test_tenants_are_explained(tmp_path: Path) -> None:
    path = tmp_path / "manthan.yaml"
    path.write_text("".join(blocks(HINTS, "yaml")), encoding="utf-8")
    config = load_config(path, env={})
    assert config.tenants.header == "X-Tenant-ID"
    names = set(GROUPS["tenants"].model_fields)
    assert config.tenants.model_fields_set == names  # each is in the example
    assert set(re.findall(r"`tenants\.(\w+)`", HINTS)) <= names


def anchors(path: Path) -> set[str]:
    """Return the headings of a document as links name them, by GitHub's rule."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w-]", "", heading.lower().replace(" ", "-")) for heading in headings}


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.relative_to(REPO).as_posix())
def test_links_lead_somewhere(path: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", path.read_text(encoding="utf-8")):
        file = path.parent / target if target else path
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), f"{target}#{anchor}"


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.relative_to(REPO).as_posix())
def test_tests_and_files_that_are_named_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    folders = "benchmarks|codec|configs|deploy|manager|policies|tests|vllm_hooks"
    for file, name in re.findall(rf"`((?:{folders})/[\w/.-]+?\.(?:py|yaml|cu|lua))(?:::(\w+))?`", text):
        source = (REPO / file).read_text(encoding="utf-8")
        assert not name or f"def {name}(" in source, f"{file}::{name}"


# -- quotes of the log ----------------------------------------------------------------------

QUOTING = ("troubleshooting.md", "deployment.md", "disk.md")
QUOTED = [
    line
    for name in QUOTING
    for block in blocks((REPO / "docs" / name).read_text(encoding="utf-8"), "text")
    for line in block.splitlines()
    if "…" in line or line.startswith("Manthan")
]


@pytest.mark.parametrize("line", QUOTED)
def test_what_is_quoted_from_the_log_is_in_the_code(line: str) -> None:
    pieces = [piece.strip(" .;") for piece in line.removeprefix("Manthan cannot be used here: ").split("…")]
    pieces = [piece for piece in pieces if len(piece) > 3]
    assert pieces
    whole = "\n".join(texts())
    assert [piece for piece in pieces if piece not in whole] == []


def test_nobody_has_to_read_too_much() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (REPO / "docs").glob("*.md")]
    assert len(README.splitlines()) <= MOST_OF_README
    assert sum(len(text.splitlines()) for text in [README, *texts]) <= MOST_LINES


def test_a_clone_is_small() -> None:
    """All files of the last commit, not compressed."""
    if not (REPO / ".git").exists():
        pytest.skip("this is not a clone")
    listed = subprocess.check_output(["git", "ls-tree", "-rl", "HEAD"], cwd=REPO, text=True).splitlines()
    sizes = [line.split(maxsplit=4)[3] for line in listed]
    assert sum(int(size) for size in sizes if size != "-") < MOST_BYTES


def test_each_guarantee_names_a_test() -> None:
    text = (REPO / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert all("::" in held_by or ".py`" in held_by for _, held_by in rows(text, "guarantee"))
