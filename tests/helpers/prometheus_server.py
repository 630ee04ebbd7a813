"""A real Prometheus on a free port of this machine, and promtool."""

import os
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import httpx
import pytest
import yaml
from redis_server import free_port

UP_S = 120.0
"""Next to all that other tests do."""


class PrometheusServer:
    """A server with this configuration, which asks its targets each second. folder: for its files."""

    def __init__(self, config: dict[str, Any], folder: Path) -> None:
        self.folder = folder
        self.url = f"http://127.0.0.1:{free_port()}"
        every = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config | {"global": every}))
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        command = [program("prometheus"), f"--config.file={self.folder}/prometheus.yaml"]
        command += [f"--storage.tsdb.path={self.folder}/data", f"--web.listen-address={self.url[7:]}"]
        with (self.folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=subprocess.STDOUT)
        with ExitStack() as stack:
            stack.callback(self.__exit__)
            self.wait_for(lambda: bool(self.query("up == 1")), "see its target")
            stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def ask(self, path: str, **params: str) -> Any:
        """What its API says."""
        response = httpx.get(f"{self.url}/api/v1/{path}", params=params)
        if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:  # it listens, and still reads what it has on disk
            raise httpx.ConnectError(response.text)
        answer = response.json()
        assert answer["status"] == "success", f"{params}: {answer['error']}"
        return answer["data"]

    def query(self, expression: str) -> list[float]:
        """The values of an instant vector."""
        return [float(series["value"][1]) for series in self.ask("query", query=expression)["result"]]

    def wait_for(self, done: Any, what: str) -> None:
        deadline = time.monotonic() + UP_S
        while True:
            try:
                if done():
                    return
            except httpx.TransportError:  # it is not up yet
                assert self._process is not None
                assert self._process.poll() is None, (self.folder / "prometheus.log").read_text()
            assert time.monotonic() < deadline, f"Prometheus did not {what} within {UP_S:.0f} s"
            time.sleep(0.2)


def program(name: str) -> str:
    """Where it is, next to this Python or on the PATH. A test that needs it fails where it is not: make installs it."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return shutil.which(name, path=path) or pytest.fail(f"{name} is not installed")


def promtool(*arguments: str | Path) -> None:
    """Run it; what it says is the failure."""
    done = subprocess.run([program("promtool"), *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
