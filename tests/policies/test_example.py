"""The example of docs/policies.md, built and installed as its reader would."""

from pathlib import Path

import pytest
from example_package import EXAMPLES, MANTHAN, install, run

ORDER = """
from manthan.manager.config.resolve import resolve_config
from manthan.manager.config.resolve import choose_policy
from manthan.policies import SessionView

policy, options = choose_policy(resolve_config("x.yaml").config.policy)
largest = policy(options)
for session_id, tokens in (("long", 900), ("short", 100), ("longer", 1000), ("shorter", 10)):
    largest.used(SessionView(session_id, tokens=tokens))
print(*largest.victims())
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(EXAMPLES / "manthan-policy-largest", tmp_path_factory.mktemp("example"))


def test_it_is_used_by_its_name(site: Path, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("policy: {name: largest, spared_tokens: 500}")
    checked = run(site, tmp_path, MANTHAN, "config", "check", "x.yaml")
    assert checked.returncode == 0, checked.stderr
    rows = [line.split() for line in checked.stdout.splitlines()]
    assert ["policy.name", "largest", "x.yaml"] in rows
    assert ["policy.spared_tokens", "500", "x.yaml"] in rows
    assert run(site, tmp_path, ORDER).stdout.split() == ["longer", "long", "short", "shorter"]
