"""docs/policies.md and the README's table against the policies that there are."""

import re
from pathlib import Path

import pytest
import yaml
from documents import REPO, rows
from loaded import load_config

from manthan.manager.config.resolve import check_registered, resolve_config
from manthan.policies import BUILTIN, EvictionPolicy, SessionView

TEXT = (REPO / "docs" / "policies.md").read_text(encoding="utf-8")
README = (REPO / "README.md").read_text(encoding="utf-8")
EXAMPLE = REPO / "docs" / "examples" / "manthan-policy-largest"


def test_every_policy_has_a_row_a_section_and_a_word_in_the_readme() -> None:
    assert {row[0].strip("` ") for row in rows(TEXT, "policy")} >= set(BUILTIN)
    assert set(re.findall(r"^## (\S+)$", TEXT, re.MULTILINE)) >= set(BUILTIN)
    flag = next(line for line in README.splitlines() if line.startswith("| `--manthan-policy NAME` |"))
    assert set(re.findall(r"`(\w+)`", flag)) >= set(BUILTIN)
    assert "docs/policies.md" in README


def test_all_that_a_policy_is_told_is_explained() -> None:
    fields = [name for row in rows(TEXT, "field") for name in re.findall(r"`(\w+)`", row[0])]
    assert fields == list(SessionView._fields)
    calls = re.findall(r"^\| `(\w+)\(", TEXT, re.MULTILINE)
    assert set(calls) == {"used", "evicted", "forget", "superseded", "victims"}
    assert all(callable(getattr(EvictionPolicy, name)) for name in [*calls, "family"])


@pytest.mark.parametrize("block", re.findall(r"^```yaml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL))
def test_yaml_is_accepted(block: str, tmp_path: Path) -> None:
    path = tmp_path / "manthan.yaml"
    path.write_text(block, encoding="utf-8")
    check_registered(resolve_config(path, env={}))
    assert load_config(path, env={}).policy.options == {
        key: value for key, value in yaml.safe_load(block)["policy"].items() if key != "name"
    }


def test_the_example_is_the_one_that_is_installed() -> None:
    (module,) = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    assert module == (EXAMPLE / "manthan_policy_largest.py").read_text(encoding="utf-8")
    (project,) = re.findall(r"^```toml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    assert project == (EXAMPLE / "pyproject.toml").read_text(encoding="utf-8")
