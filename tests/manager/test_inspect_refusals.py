"""How `manthan inspect` is let in, and its one sentence when it is not."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from certificates import Authority
from inspect_command import PASSWORD, refusal, session_ids
from redis_data import Engine, keys_of, redis_config
from redis_server import RedisServer, free_port, running


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    yield from running(tmp_path)


@pytest.fixture
def engine(server: RedisServer) -> Engine:
    engine = Engine(redis_config(server.url))
    engine.attach()
    engine.save("alice", keys_of("a", 5), last_used=2000)
    engine.save("bob", keys_of("b", 7), last_used=1000)
    return engine


def test_unknown_names_are_answered_with_the_nearest(engine: Engine, server: RedisServer) -> None:
    at = f"Redis at {server.url} has no"
    assert refusal(server.url, "--session", "alcie") == f"{at} session 'alcie' (did you mean 'alice'?)"
    assert refusal(server.url, "--session", "x") == f"{at} session 'x' (valid: alice, bob)"
    assert refusal(server.url, "--session", "\x1b\n") == f"{at} session '\\x1b\\n' (valid: alice, bob)"
    wrong = engine.name.replace("tiny", "tini")
    assert refusal(server.url, "--namespace", wrong) == f"{at} namespace '{wrong}' (did you mean '{engine.name}'?)"
    for number in range(30):
        engine.save(f"session-{number}", keys_of("many", 1))
    assert refusal(server.url, "--session", "x") == f"{at} session 'x'"


@pytest.mark.parametrize(
    "args",
    [
        (f"redis://:{PASSWORD}@127.0.0.1",),
        ("http://127.0.0.1",),
        ("redis://127.0.0.1:0x1",),
        ("redis+sentinel://127.0.0.1",),
        ("redis://127.0.0.1", "--prefix", "[x]"),
        ("redis://127.0.0.1", "--timeout", "0"),
        ("redis://127.0.0.1", "--password-env", "NOT A NAME"),
        ("redis://127.0.0.1", "--password-file", "/none"),
        ("rediss://127.0.0.1", "--tls-ca-file", "/none"),
    ],
    ids=" ".join,
)
def test_mistakes_are_told_in_terms_of_the_command_line(args: tuple[str, ...]) -> None:
    sentence = refusal(*args)
    assert (args[1] if len(args) > 1 else "URL") in sentence
    assert "redis." not in sentence
    assert "argument:" not in sentence


def test_a_server_that_is_not_there() -> None:
    url = f"redis://redis.localhost:{free_port()}/0"
    sentence = refusal(url)
    assert sentence.startswith(f"Redis at {url} cannot be used (")
    assert sentence.endswith("): correct URL, or start the server.")


def test_a_server_that_does_not_answer(tmp_path: Path) -> None:
    for server in running(tmp_path):
        server.pause()
        assert "Timeout" in refusal(server.url, "--timeout", "0.2")


@pytest.fixture
def guarded(engine: Engine, server: RedisServer) -> RedisServer:
    """Where only the user manthan is let in."""
    with server.client as client:
        client.execute_command("ACL", "SETUSER", "manthan", "on", f">{PASSWORD}", "~*", "+@all")
        client.execute_command("ACL", "SETUSER", "default", "off")
    return server


def test_users_and_passwords(guarded: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "password"
    path.write_text(f"{PASSWORD}\n")
    who = ("--username", "manthan")
    assert session_ids(guarded.url, *who, "--password-file", path) == ["alice", "bob"]
    monkeypatch.setenv("MANTHAN_REDIS_PASSWORD", PASSWORD)
    assert session_ids(guarded.url, *who) == ["alice", "bob"]
    monkeypatch.setenv("OTHER", PASSWORD)
    monkeypatch.setenv("MANTHAN_REDIS_PASSWORD", "wrong")
    assert session_ids(guarded.url, *who, "--password-env", "OTHER") == ["alice", "bob"]


def test_a_wrong_password(guarded: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANTHAN_REDIS_PASSWORD", f"{PASSWORD}-but-wrong")
    assert refusal(guarded.url, "--username", "manthan") == (
        f"Redis at {guarded.url} refuses user manthan (invalid username-password pair or user is disabled.): set "
        "--username, and the password in --password-file or in the environment variable MANTHAN_REDIS_PASSWORD."
    )


# -- how it is reached --------------------------------------------------------------------------------


def test_tls(tmp_path: Path) -> None:
    ca, port = Authority(tmp_path, "ca"), free_port()
    files, mine = ca.sign("server"), ca.sign("client")
    flags = ["--tls-port", str(port), "--tls-ca-cert-file", ca.files.cert, "--tls-cert-file", files.cert]
    for server in running(tmp_path, *flags, "--tls-key-file", files.key):
        engine = Engine(redis_config(server.url))
        engine.attach()
        engine.save("alice", keys_of("a", 1))
        url = f"rediss://localhost:{port}"
        options = ("--tls-ca-file", ca.files.cert, "--tls-cert-file", mine.cert, "--tls-key-file", mine.key)
        assert session_ids(url, *options) == ["alice"]
        assert "certificate verify failed" in refusal(url)


def test_it_needs_neither_vllm_nor_torch(engine: Engine, server: RedisServer, tmp_path: Path) -> None:
    for name in ("vllm", "torch"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name} is not to be imported')")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from manthan.manager.cli import app; app()"
    result = subprocess.run(
        [sys.executable, "-c", code, "inspect", server.url], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert "alice" in result.stdout
