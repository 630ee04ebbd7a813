"""The `manthan` command."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from manthan.manager.cli import app
from manthan.manager.commands.sessions import _path


def test_config_check_prints_every_value_and_its_source(tmp_path: Path) -> None:
    folder = tmp_path / "a-long-name" / ("that-would-not-fit-on-a-line" * 4)
    folder.mkdir(parents=True)
    path = folder / "x.yaml"
    path.write_text("{idle: 60, tiers: {max_bytes: 1GiB}}")

    result = CliRunner().invoke(app, ["config", "check", str(path)], env={"MANTHAN_IDLE__MIN_TOKENS": "7"})

    assert result.exit_code == 0
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["idle.after_s", "60.0", str(path)] in rows
    assert ["tiers.max_bytes", "1.0GiB", str(path)] in rows
    assert ["idle.min_tokens", "7", "MANTHAN_IDLE__MIN_TOKENS"] in rows
    assert ["codec.name", "auto", "default"] in rows


def test_config_check_warns_of_unknown_variables_where_errors_go(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("")
    command = [str(Path(sys.executable).with_name("manthan")), "config", "check", "x.yaml"]
    env = os.environ | {"MANTHAN_MIN_TOKEN": "7", "MANTHAN_PORT": "tcp://10.0.0.1:80"}
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stderr == (
        "Manthan: the environment variable MANTHAN_MIN_TOKEN is unknown and ignored (did you mean "
        "'MANTHAN_IDLE__MIN_TOKENS'?)\n"
    )


def test_config_check_warns_of_a_codec_that_needs_a_profile(tmp_path: Path) -> None:
    path = tmp_path / "manthan.yaml"
    for codec, is_told in (("klt-8x", True), ("{name: klt-8x, profile: p}", False), ("wht-5x", False)):
        path.write_text(f"codec: {codec}\n")
        result = CliRunner().invoke(app, ["config", "check", str(path)])
        assert result.exit_code == 0
        assert ("`manthan calibrate MODEL`" in result.stderr) == is_told


def test_config_check_says_what_is_wrong_on_stderr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text("policy: lry")
    result = CliRunner().invoke(app, ["config", "check", "x.yaml"])
    sentence = "x.yaml: unknown policy 'lry' (did you mean 'lru'?)\n"
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", sentence)


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["simulate", "x.jsonl", "--pol"], ["--policy"]),
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


def test_a_tenants_slash_is_no_border_between_tenant_and_session() -> None:
    assert _path("bob", "acme/eu") == "/sessions/acme%252Feu%2Fbob"
    assert _path("acme/bob", "") == "/sessions/acme%2Fbob"


@pytest.mark.parametrize(("kind", "total", "is_told"), [("redis", 0, True), ("redis", 1, False), ("host", 0, False)])
def test_an_empty_list_says_that_redis_may_have_sessions(kind: str, total: int, is_told: bool) -> None:
    """The server is none of vLLM's: the answers are these."""
    store = {"kind": kind, "up": True, "codec": "exact", "verdict": "slow", "measuring": None, "tiers": []}

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"store": store} if "state" in self.path else {"sessions": [], "total": total})
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body.encode())

    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        result = CliRunner().invoke(app, ["sessions", "list", "--url", f"http://127.0.0.1:{server.server_port}"])
        server.shutdown()
    assert result.exit_code == 0, result.output
    assert ("listed from their first request" in result.output) == is_told
    assert "Codec: exact, because the configured one is slow on this model." in result.output
