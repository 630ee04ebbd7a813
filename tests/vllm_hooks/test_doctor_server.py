"""`manthan doctor` asks a server: with Manthan, without, none at all."""

import json
import socket
from typing import Any

import pytest
from redis_server import free_port
from typer.testing import CliRunner

from manthan.benchmarks.server import VllmServer
from manthan.manager.cli import app


def host(url: str) -> tuple[str, str]:
    """Mark and sentence of the finding about a server's host name."""
    done = CliRunner().invoke(app, ["doctor", "--json", "--url", url])
    [found] = [each for each in json.loads(done.stdout)["findings"] if each["check"] == "Host"]
    assert done.exit_code == int(found["mark"] != "ok")
    return found["mark"], found["said"]


def test_servers_with_manthan_without_and_none(manthan_server: VllmServer, plain_server: VllmServer) -> None:
    none = f"http://127.0.0.1:{free_port()}"
    assert host(manthan_server.url) == ("ok", f"Manthan answers at {manthan_server.url}.")
    for url, why in ((f"{plain_server.url}/v1", "has no /manthan"), (none, "cannot be reached: ")):
        mark, said = host(url)
        assert mark == "wrong"
        assert said.startswith(f"The server at {url} {why}")


def test_a_name_that_the_server_refuses(manthan_server: VllmServer, monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = socket.getaddrinfo

    def as_here(host: str, *args: Any, **more: Any) -> Any:
        return resolve("127.0.0.1" if host == "gpu7.example.org" else host, *args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", as_here)
    mark, said = host(manthan_server.url.replace("127.0.0.1", "gpu7.example.org"))
    assert mark == "wrong"
    assert said.endswith("set an --api-key, or name the host in api.hosts.")
