"""The documents against what they are about: the ACL that is tested, hints, the configuration, metrics and causes."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from documents import REPO, documents
from loaded import load_config

from manthan.manager.config.model import GROUPS, RedisConfig
from manthan.manager.sessions.hints import HIGHEST_PRIORITY, LONGEST_NAME, MOST_PREFETCHES, Hints, parse_hints
from manthan.manager.sessions.session import DropCause

PACKAGES = ("codec", "manager", "vllm_hooks")
REDIS = (REPO / "docs" / "redis.md").read_text(encoding="utf-8")
HINTS = (REPO / "docs" / "hints.md").read_text(encoding="utf-8")
README = (REPO / "README.md").read_text(encoding="utf-8")
DOCUMENTS = pytest.mark.parametrize("text", [REDIS, HINTS, README], ids=["redis.md", "hints.md", "README.md"])


def blocks(text: str, language: str) -> list[str]:
    """What stands between fences of this language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


YAML = blocks(REDIS, "yaml")


def assigned(path: str) -> dict[str, ast.expr]:
    """The expressions that a file assigns to its names."""
    found: dict[str, ast.expr] = {}
    for node in ast.parse((REPO / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign):
            found |= {name.id: node.value for name in node.targets if isinstance(name, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            found[node.target.id] = node.value
    return found


def strings() -> Iterator[str]:
    """All string constants of the code."""
    for package in PACKAGES:
        for path in (REPO / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def rows(heading: str, text: str = REDIS) -> list[list[str]]:
    """The cells of the table whose first column has this heading."""
    _, _, rest = text.partition(f"| {heading} |")
    _, _, table = rest.partition("|\n|---")
    lines = table.partition("\n\n")[0].splitlines()[1:]
    assert lines, heading
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_all_keys_under_redis_are_named_and_no_others() -> None:
    assert set(re.findall(r"`redis\.(\w+)", REDIS)) == set(RedisConfig.model_fields)


@DOCUMENTS
def test_metrics_are_those_of_the_code(text: str) -> None:
    metrics = assigned("vllm_hooks/telemetry/metrics.py")["METRICS"]
    assert isinstance(metrics, ast.Dict)
    names = {ast.literal_eval(name) for name in metrics.keys if name is not None}
    named = {name.removesuffix("_total") for name in re.findall(r"vllm:manthan_(\w+)", text)}
    assert named
    assert named <= names


def test_causes_and_outcomes_are_those_of_the_code() -> None:
    known = set(strings())
    causes = {cause for row in rows("cause") for cause in re.findall(r"`(\w+)`", row[0])}
    assert {"store_down", "store_full", "missing", "checksum"} <= causes
    outcomes = set(re.findall(r'outcome="(\w+)"', REDIS)) | {"found", "nothing", "unanswered"}
    assert causes | outcomes <= known


def test_every_cause_of_a_refused_block_is_explained() -> None:
    text = (REPO / "codec" / "errors.py").read_text(encoding="utf-8")
    refusals = set(re.findall(r'^    cause = "(\w+)"', text, re.MULTILINE)) - {"header"}  # a mistake of the writer
    assert refusals <= {cause for row in rows("cause") for cause in re.findall(r"`(\w+)`", row[0])}


@pytest.mark.parametrize("block", YAML, ids=range(len(YAML)))
def test_yaml_loads(block: str, tmp_path: Path) -> None:
    path = tmp_path / "manthan.yaml"
    path.write_text(block, encoding="utf-8")
    assert load_config(path, env={}).cold_store.is_shared


def test_there_is_yaml() -> None:
    assert YAML


def test_every_hint_is_explained_and_has_an_example() -> None:
    table = {row[0].strip("`"): row[1] for row in rows("hint", HINTS)}
    assert set(table) == set(Hints.model_fields)
    assert f"-{HIGHEST_PRIORITY} to {HIGHEST_PRIORITY}" in table["priority"]
    assert f"up to {MOST_PREFETCHES}" in table["prefetch"]
    assert f"up to {LONGEST_NAME} printable characters" in HINTS
    examples = re.findall(
        r'"kv_transfer_params": \{"manthan": (\{.*?\})\}', "".join(blocks(HINTS, "sh") + blocks(HINTS, "text")) + README
    )
    assert {hint for example in examples for hint in parse_hints(json.loads(example)).given} == set(Hints.model_fields)
    python = "".join(blocks(HINTS, "python"))
    calls = [ast.parse(call, mode="eval").body for call in re.findall(r"hints\([a-z_]+=.*?\)(?=\))", python)]
    given = {key.arg for call in calls if isinstance(call, ast.Call) for key in call.keywords}
    assert given == set(Hints.model_fields)


def test_quotas_are_explained(tmp_path: Path) -> None:
    path = tmp_path / "manthan.yaml"
    path.write_text("".join(blocks(HINTS, "yaml")), encoding="utf-8")
    config = load_config(path, env={})
    assert config.quotas.header == "X-Tenant-ID"
    names = set(GROUPS["quotas"].model_fields)
    assert config.quotas.model_fields_set == names  # each is in the example
    assert set(re.findall(r"`quotas\.(\w+)`", HINTS)) <= names


def anchors(path: Path) -> set[str]:
    """What links into a document may name, by GitHub's rule."""
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


# -- what documents quote of the log ----------------------------------------------------------------------

QUOTING = ("troubleshooting.md", "getting-started.md")
PLACEHOLDER = re.compile(r"%[-.\d]*[a-z]")


def logged() -> str:
    """All texts of the code, one a line, with … for what is put into them."""
    texts: list[str] = []
    for package in (*PACKAGES, "policies"):
        for path in (REPO / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                    texts.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.append(PLACEHOLDER.sub("…", node.value))
    return "\n".join(texts)


LOGGED = logged()
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
    assert [piece for piece in pieces if piece not in LOGGED] == []


def test_causes_in_troubleshooting_are_those_of_the_code() -> None:
    text = (REPO / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    causes = {cause for row in rows("cause", text) for cause in re.findall(r"`(\w+)`", row[0])}
    dropped = set(re.findall(r'cause="(\w+)"', text))
    assert causes <= set(strings())
    assert dropped <= set(DropCause)
    assert {"store_full", "encode", "checksum"} <= causes


def test_each_guarantee_names_a_test() -> None:
    text = (REPO / "docs" / "guarantees.md").read_text(encoding="utf-8")
    assert all("::" in held_by or ".py`" in held_by for _, held_by in rows("guarantee", text))
