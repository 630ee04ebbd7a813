"""The `manthan` command."""

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from manthan.codec import registry
from manthan.codec.profile import PRESETS
from manthan.codec.registry import CENTRED, SPECS, TILED
from manthan.codec.wht import PRESETS as STEPPED
from manthan.manager.cli import app
from manthan.manager.commands.codecs import PURPOSE


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
    assert ["codec.name", "auto", "default"] in rows


def test_config_check_warns_of_unknown_variables_where_errors_go(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("")
    command = [str(Path(sys.executable).with_name("manthan")), "config", "check", "x.yaml"]
    env = os.environ | {"MANTHAN_MIN_TOKEN": "7", "MANTHAN_PORT": "tcp://10.0.0.1:80"}
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stderr == (
        "Manthan: the environment variable MANTHAN_MIN_TOKEN is unknown and ignored (did you mean "
        "'MANTHAN_MIN_TOKENS'?)\n"
    )


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
        ("codec: lloyd", "x.yaml: unknown codec 'lloyd' (did you mean 'wht-4x'?)"),
        ("cold_store: tape", "x.yaml: unknown cold store 'tape' (valid: device, disk, host, redis, tiered)"),
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


def rows(*args: str) -> dict[str, list[str]]:
    result = CliRunner().invoke(app, [*args])
    assert (result.exit_code, result.stderr) == (0, "")
    return {line.split()[0]: line.split() for line in result.stdout.splitlines()[1:]}


def test_codecs_are_listed_with_their_sizes() -> None:
    listed = rows("codecs")
    assert set(listed) == {*SPECS, *CENTRED, *TILED, *STEPPED, *PRESETS} == set(PURPOSE)
    assert listed["k3v3"][1:7] == ["3", "/", "3", "50,", "50", "5.12x"]
    assert listed["k3v3"][1:7] == ["4", "/", "3", "66,", "50", "4.41x"]
    assert listed["klt-8x"][1:7] == ["2", "on", "average", "64", "together", "8.00x"]
    assert listed["wht-5x"][1:7] == ["4", "/", "2", "70.19,", "33.06", "4.96x"]
    assert listed["wht-4x"][1:7] == ["4", "/", "4", "70.19,", "65.06", "3.79x"]
    assert listed["k3v3"][1:7] == ["4", "/", "2", "70.01,", "38.01", "4.74x"]


@pytest.fixture
def others_codecs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed distribution that registers a module that fails, and something that is no codec."""
    info = tmp_path / "others_codecs-1.dist-info"
    info.mkdir()
    (tmp_path / "others_broken_codec.py").write_text("raise RuntimeError('not\\ntoday')")
    (tmp_path / "others_codec.py").write_text("def none(head_dim, backend):\n    return 3\n")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: others-codecs\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[manthan.codecs]\nbroken = others_broken_codec:Codec\nnone = others_codec:none\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    registry._others.cache_clear()
    yield
    registry._others.cache_clear()


@pytest.mark.usefixtures("others_codecs")
def test_codecs_of_others_that_cannot_be_used_are_listed_too() -> None:
    listed = rows("codecs")
    assert "cannot be used: RuntimeError: not today" in " ".join(listed["broken"])
    assert "it must give a manthan.codec.Codec, not 3" in " ".join(listed["none"])
    assert "k3v3" in listed


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["simulate", "x.jsonl", "--policy", "lr"], ["lru"]),
        (["simulate", "x.jsonl", "--policy", "fifo,l"], ["fifo,lfu", "fifo,lru"]),
        (["simulate", "x.jsonl", "--pol"], ["--policy"]),
        (["bench", "capacity", "--arms", "plain,h"], ["plain,host"]),
        (["bench", "capacity", "--codecs", "k4"], ["k3v3", "k3v3", "wht-5x", "wht-4x", "k3v3"]),
        (["eval", "quality", "MODEL", "--codec", "k3v3,wht-4x"], ["k3v3,wht-4x"]),
        (["cod"], ["codecs"]),
        (["config", "ch"], ["check"]),
    ],
)
def test_the_shell_completes(words: list[str], offered: list[str]) -> None:
    """As the script does that `manthan --install-completion` puts into a shell."""
    typed = {"COMP_WORDS": " ".join(["manthan", *words]), "COMP_CWORD": str(len(words))}
    code = "from manthan.manager.cli import app; app(prog_name='manthan')"
    env = os.environ | typed | {"_MANTHAN_COMPLETE": "complete_bash"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == offered, done.stderr
