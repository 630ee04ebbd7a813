"""`manthan doctor` asks a server: with Manthan, without, none at all."""

import json
import socket
from typing import Any

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
    assert found["Host"] == ("ok", f"Manthan answers at {manthan_server.url}.")
    assert status == 0


def test_a_name_that_the_server_refuses(manthan_server: VllmServer, monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = socket.getaddrinfo

    def as_here(host: str, *args: Any, **more: Any) -> Any:
        return resolve("127.0.0.1" if host == "gpu7.example.org" else host, *args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", as_here)
    status, found = asked(manthan_server.url.replace("127.0.0.1", "gpu7.example.org"))
    assert (status, found["Host"][0]) == (1, "wrong")
    assert found["Host"][1].endswith("set an --api-key, or name the host in api.hosts.")


def test_a_server_without(plain_server: VllmServer) -> None:
    status, found = asked(plain_server.url + "/v1")
    assert (status, found["Host"][0]) == (1, "wrong")
    assert found["Host"][1].startswith(f"The server at {plain_server.url}/v1 has no /manthan")


def test_no_server() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    status, found = asked(url)
    assert status == 1
    assert found["Host"][1].startswith(f"The server at {url} cannot be reached: ")
