"""The `manthan` command."""

from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from manthan.manager.cli import app


def test_version() -> None:
    result = CliRunner().invoke(app, ["version"])
    assert result.exit_code == 0
    assert result.output == f"{version('manthan-kv')}\n"


def test_config_check_prints_every_value_and_its_source(tmp_path: Path) -> None:
    folder = tmp_path / "a-long-name" / ("that-would-not-fit-on-a-line" * 4)
    folder.mkdir(parents=True)
    path = folder / "x.yaml"
    path.write_text("{idle_after_s: 60, cold_store: {max_bytes: 1GiB}}")

    result = CliRunner().invoke(app, ["config", "check", str(path)], env={"MANTHAN_MIN_TOKENS": "7"})

    assert result.exit_code == 0
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["idle_after_s", "60.0", str(path)] in rows
    assert ["cold_store.max_bytes", "1.0GiB", str(path)] in rows
    assert ["min_tokens", "7", "MANTHAN_MIN_TOKENS"] in rows
    assert ["codec.name", "lloyd3", "default"] in rows


def test_config_check_says_what_is_wrong_on_stderr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text("idle_after: 3")

    result = CliRunner().invoke(app, ["config", "check", "x.yaml"])

    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == "x.yaml: unknown key 'idle_after' (did you mean 'idle_after_s'?)\n"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("policy: lry", "x.yaml: unknown policy 'lry' (did you mean 'lru'?)"),
        ("policy: {name: lru, half_life_s: 60}", "x.yaml: unknown lru option 'half_life_s' (there are none)"),
        ("codec: lloyd", "x.yaml: unknown codec 'lloyd' (did you mean 'lloyd4'?)"),
        ("cold_store: tape", "x.yaml: unknown cold store 'tape' (valid: device, host, redis, tiered)"),
    ],
)
def test_config_check_knows_the_names(
    text: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(text)

    result = CliRunner().invoke(app, ["config", "check", "x.yaml"])

    assert result.exit_code == 1
    assert result.stderr.strip() == sentence
