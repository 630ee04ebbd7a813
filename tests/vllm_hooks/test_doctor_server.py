"""`manthan doctor` asks a server: with Manthan, without, none at all."""

import json

import pytest
from redis_server import free_port
from typer.testing import CliRunner

from manthan.benchmarks.server import VllmServer
from manthan.manager.cli import app


def asked(url: str) -> tuple[int, dict[str, tuple[str, str]]]:
    done = CliRunner().invoke(app, ["doctor", "--json", "--url", url])
    found = json.loads(done.stdout)["findings"]
    return done.exit_code, {one["check"]: (one["mark"], one["said"]) for one in found}


def test_a_server_with_manthan(manthan_server: VllmServer) -> None:
    status, found = asked(manthan_server.url)
    assert found["server's vLLM"][0] == "ok"
    assert found["server"][0] == "ok"
    assert found["server"][1].startswith(f"{manthan_server.url} runs with Manthan, and has ")
    assert found["cold store"][0] in ("ok", "warning")  # other tests' failures
    assert found["block hashes"][0] == "ok"
    assert found["chat template"][1].startswith("the next prompt repeats the turn before it")
    assert status == 0


def test_a_server_without(plain_server: VllmServer) -> None:
    status, found = asked(plain_server.url + "/v1")
    assert (status, found["server"][0]) == (1, "wrong")
    assert found["server"][1].endswith(
        "runs without Manthan: start it with a --manthan-… flag, such as --manthan-policy lru."
    )


@pytest.mark.parametrize("port", [0, None])
def test_no_server(port: int | None) -> None:
    url = f"http://127.0.0.1:{free_port() if port is None else port}"
    status, found = asked(url)
    assert status == 1
    assert found["server"][1].startswith(f"no server answers at {url} (")
    assert found["chat template"][0] == "wrong"
