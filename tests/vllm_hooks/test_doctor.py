"""`manthan doctor` on set-ups that are broken, one way each, on one that is not, and on servers."""

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml
from documents import REPO
from redis_server import free_port
from typer.testing import CliRunner
from vllm_engine import MODEL

from manthan.benchmarks.chat_templates import DROPS_BEFORE_QUESTION, KEEPS
from manthan.benchmarks.server import VllmServer
from manthan.manager.cli import app
from manthan.manager.commands.sessions import ask


def examine(*words: object) -> tuple[int, dict[str, dict[str, str]]]:
    """The exit status, and what was found by what was looked at."""
    done = CliRunner().invoke(app, ["doctor", "--json", *map(str, words)])
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["healthy"] is (done.exit_code == 0)
    return done.exit_code, {one["check"]: one for one in found["findings"]}


def wrong(path: Path, *words: object, **options: object) -> dict[str, str]:
    """What is said to be wrong with such a configuration, by what was looked at."""
    file = path / "manthan.yaml"
    file.write_text(yaml.safe_dump(options))
    status, found = examine("--config", file, *words)
    said = {check: one["said"] for check, one in found.items() if one["mark"] == "wrong"}
    assert status == int(bool(said))
    return said


def test_nothing_is_wrong() -> None:
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[-1] == "Nothing is wrong."
    marks = {line[3:18].strip(): line[0] for line in lines[:-2]}
    assert marks["versions"] == marks["vLLM"] == "✓"
    assert marks["memlock"] == marks["Redis"] == marks["disk"] == marks["chat template"] == "–"


# -- broken, one way each ---------------------------------------------------------------------------------


def test_another_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "site" / "vllm-0.31.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.31.2\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert wrong(tmp_path, MODEL) == {
        "vLLM": "Manthan cannot be used here: vLLM is 0.31.2, but this version of Manthan was made for 0.32 and 0.33 "
        "and no other: install vllm>=0.32,<0.34."
    }


def test_a_template_that_drops_thinking(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(DROPS_BEFORE_QUESTION)
    said = wrong(tmp_path, MODEL, "--chat-template", template)
    assert set(said) == {"chat template"}
    assert said["chat template"].startswith("it rewrites history (case: thinking): the next prompt repeats ")
    assert "and goes on with 'The capital of France" in said["chat template"]
    template.write_text(KEEPS)
    assert wrong(tmp_path, MODEL, "--chat-template", template) == {}
    template.write_text("")
    [said] = wrong(tmp_path, MODEL, "--chat-template", template).values()
    assert said == f"--chat-template is {template}, which is empty: name a file with a Jinja template."


def host(url: str) -> tuple[str, str]:
    """Mark and sentence of the finding about a server's host name."""
    status, found = examine("--url", url)
    assert status == int(found["Host"]["mark"] != "ok")
    return found["Host"]["mark"], found["Host"]["said"]


def test_servers_with_manthan_without_and_none(manthan_server: VllmServer, plain_server: VllmServer) -> None:
    none = f"http://127.0.0.1:{free_port()}"
    assert host(manthan_server.url) == ("ok", f"Manthan answers at {manthan_server.url}.")
    _, found = examine("--url", manthan_server.url)
    assert {"memlock", "disk", "Redis"}.isdisjoint(found), "they would be of this machine's defaults"
    assert found["policy"]["said"] == "that server has lru; sessions are idle after 0.5 s."
    store = ask(manthan_server.url, "/state")["store"]  # other tests' sessions may have led to a verdict
    said = r"wht-5x measured on \d+ of 64 blocks; wht-4x until then\."
    if store["verdict"] == "faithful":
        said = r"that server has wht-5x; the guard's verdict: faithful\."
    elif store["measuring"] is None:
        assert store["verdict"] == "slow", "on a busy machine"
        said = rf"that server has wht-5x, which is slow, so it uses {store['codec']}\."
    assert re.fullmatch(said, found["codec"]["said"])
    assert re.fullmatch(r"that server has host with \S+ of 64\.0MiB\.", found["tiers"]["said"])
    assert "memlock" in examine("--url", manthan_server.url, "--config", REPO / "configs" / "demo.yaml")[1]
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
