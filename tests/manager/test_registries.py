"""A policy and its options in a configuration: checked when it is read, wherever they were written."""

from pathlib import Path

import pytest
from policy_package import another_package
from typer.testing import CliRunner

from manthan.manager.cli import app
from manthan.manager.config.model import PolicyConfig
from manthan.manager.config.resolve import ConfigError, check_registered, choose_policy, resolve_config
from manthan.policies import PolicyOptions, policy_names
from manthan.policies.returns import Mixture, ReturnsOptions

__all__ = ["another_package"]


def refusal(text: str, folder: Path, env: dict[str, str] | None = None, **flags: object) -> str:
    """The sentence about a YAML file, without its folder."""
    path = folder / "x.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        check_registered(resolve_config(path, env=env or {}, flags=flags))
    assert "\n" not in str(error.value)
    return str(error.value).replace(f"{folder}/", "")


def test_a_policy_is_chosen_with_its_options() -> None:
    chosen = choose_policy(PolicyConfig.model_validate({"name": "returns", "prior": "60"}))
    assert chosen.policy is Mixture
    assert chosen.options == ReturnsOptions(prior=60)
    assert choose_policy(PolicyConfig(name="returns")).options == ReturnsOptions()
    assert choose_policy(PolicyConfig()).options == PolicyOptions()


RIGHT = "policy.prior must be a weight above 0, in returns of sessions"


def test_a_refusal_names_the_source(tmp_path: Path) -> None:
    env = {"MANTHAN_POLICY__PRIOR": "soon"}
    assert refusal("policy: returns", tmp_path, env) == f"MANTHAN_POLICY__PRIOR: {RIGHT}, not 'soon'"
    assert refusal("policy: returns", tmp_path, policy={"prior": 0}) == f"argument: {RIGHT}, not 0"
    with pytest.raises(ConfigError) as error:
        choose_policy(PolicyConfig.model_validate({"name": "returns", "prior": 0}))
    assert str(error.value) == f"{RIGHT}, not 0"


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        *(
            (f"returns, prior: {value}", f"{RIGHT}, not {shown}")
            for value, shown in {"soon": "'soon'", "0": "0", "-1": "-1", "true": "True", "[1]": "[1]"}.items()
        ),
        *((f"returns, prior: {value}", f"{RIGHT}, not {value.strip('.')}") for value in (".nan", ".inf")),
        ("returns, prior: null", f"{RIGHT}, not empty"),
        ("lru, prior: 60", "policy.prior is no option of policy lru (there are none)"),
        ("returns, prio: 60", "policy.prio is no option of policy returns (did you mean 'prior'?)"),
        ("return, prior: 60", "unknown policy 'return' (did you mean 'returns'?)"),
        ("picky, round: 1", "policy.round is no option of policy picky (did you mean 'rounds'?)"),
        ("picky", "policy picky needs policy.rounds: a whole number of rounds, 1 or more"),
        ("picky, rounds: 1.5", "policy.rounds must be a whole number of rounds, 1 or more, not 1.5"),
        ("picky, rounds: true", "policy.rounds must be a whole number of rounds, 1 or more, not True"),
        ("picky, rounds: 1, is_strict: 3", "policy.is_strict must be true or false, not 3"),
        ("picky, rounds: 1, least: 3", "policy picky: least must not exceed most, but 3.0 is above 2"),
        (
            "picky, rounds: 1, most: x",
            "policy.most must be what picky takes (Input should be a valid number, unable to parse string as a number)"
            ", not 'x'",
        ),
        ("half", "policy 'half' of the package others-policies, others_policies:Half, must define forget, victims"),
    ],
)
@pytest.mark.usefixtures("another_package")
def test_policies_and_options_are_checked_with_the_configuration(policy: str, expected: str, tmp_path: Path) -> None:
    assert refusal(f"policy: {{name: {policy}}}", tmp_path) == f"x.yaml: {expected}"


@pytest.mark.usefixtures("another_package")
def test_another_package_that_is_broken_is_no_concern_of_those_who_do_not_use_it() -> None:
    check_registered(resolve_config(env={}, flags={"policy": "lru"}))
    check_registered(resolve_config(env={}, flags={"policy": {"name": "picky", "rounds": 1, "is_strict": True}}))


# -- the command ----------------------------------------------------------------------------------------


def rows(*arguments: str) -> list[str]:
    result = CliRunner().invoke(app, list(arguments))
    assert (result.exit_code, result.stderr) == (0, "")
    return [" ".join(line.split()) for line in result.stdout.splitlines()]


@pytest.mark.usefixtures("another_package")
def test_policies_are_listed_with_their_options() -> None:
    listed = rows("policies")
    assert [row.split()[0] for row in listed[1:]] == policy_names()
    assert "lru The session unused for longest." in listed
    assert any(row.startswith("returns ") and row.endswith(" prior=8.0") for row in listed)
    assert "newest The session used last goes first." in listed
    assert "picky rounds=(required) least=1 most=2 is_strict=False" in listed
    assert any(row.startswith("nowhere ") and "cannot be loaded" in row for row in listed)


def test_config_check_prints_the_policy_s_options(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("policy: {name: returns, prior: '60'}")
    assert f"policy.prior 60.0 {path}" in rows("config", "check", str(path))
    path.write_text("policy: returns")
    assert "policy.prior 8.0 default" in rows("config", "check", str(path))
