"""Someone who types the commands of a document, in a folder that looks like the repository."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from documents import REPO
from redis_server import RedisServer, free_port

LINKED = ("Makefile", "README.md", "benchmarks", "configs", "tests")
MANTHAN = "import sys; from manthan.manager.cli import app; sys.argv[0] = 'manthan'; app(prog_name='manthan')"
REDIS_PORT, TLS_PORT = 6379, 6380
"""The ports in the documents."""
PATIENCE_S = 500.0
GOODBYE_S = 20.0


class Reader:
    """Leaves nothing in the repository. replace: words of the documents and what is typed instead.

    files: what the reader brings along, by name: a file of the repository, and how many of its lines.
    """

    def __init__(self, folder: Path, replace: Mapping[str, str], files: Mapping[str, tuple[str, int]]) -> None:
        self.folder = folder / "manthan"
        self.folder.mkdir(parents=True)
        self._replace = dict(replace)
        self._bin = folder / "bin"
        self._ports: dict[int, int] = {}
        self._servers: list[subprocess.Popen[bytes]] = []
        self._redis: RedisServer | None = None
        self._variables: list[str] = []
        for name in LINKED:
            (self.folder / name).symlink_to(REPO / name)
        for name in ("deploy", "docs"):  # `make docs` writes there
            shutil.copytree(REPO / name, self.folder / name)
        (self.folder / ".venv").mkdir()
        (self.folder / ".venv" / ".installed").touch()
        for name, (source, lines) in files.items():
            text = (REPO / source).read_text(encoding="utf-8")
            (self.folder / name).write_text("".join(text.splitlines(keepends=True)[:lines]), encoding="utf-8")

    def leave(self) -> None:
        """End what was started."""
        for server in self._servers:
            server.kill()
            server.wait()
        if self._redis:
            self._redis.kill()

    def use_redis(self, server: RedisServer) -> None:
        """Where the documents' Redis is, if not a server of this reader's own."""
        self._ports[REDIS_PORT] = server.port

    def typed(self, command: str, more: Mapping[str, str] | None = None) -> str:
        """The command as it is run here. more: further words to replace."""
        words = self._replace | (dict(more) if more else {})
        pattern = "|".join(rf"(?<![\w/.-]){re.escape(word)}(?![\w-])" for word in words)
        text = re.sub(pattern, lambda found: words[found[0]], command) if words else command
        for port in (REDIS_PORT, TLS_PORT):
            if re.search(rf"\b{port}\b", text):
                text = re.sub(rf"\b{port}\b", str(self._port(port)), text)
        return text.replace(".venv/bin/", "")

    def types(self, command: str, smaller: str = "", more: Mapping[str, str] | None = None) -> str:
        """Run a command and give its output; it must succeed. `redis-server` runs on until the reader leaves."""
        text = f"{self.typed(command, more)} {smaller}".strip()
        if re.fullmatch(r"[A-Za-z_]+=\S+", text):
            self._variables.append(text)
            return ""
        if text.startswith("redis-server"):
            self._serve(text)
            return ""
        if "redis-cli" in text:
            self._port(REDIS_PORT)
        script = "; ".join(["set -o pipefail", *self._variables, text])
        with subprocess.Popen(
            ["bash", "-c", script],
            cwd=self.folder,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a group of its own, so that all of it can be ended
        ) as process:
            try:
                output, complaints = process.communicate(timeout=PATIENCE_S)
            except subprocess.TimeoutExpired:
                _end(process)
                raise
        assert process.returncode == 0, f"{text}\nends with status {process.returncode}:\n{output}\n{complaints}"
        return output

    def _environment(self) -> dict[str, str]:
        self._bin.mkdir(exist_ok=True)
        self._tool("python", f'"{sys.executable}" "$@"')
        self._tool("manthan", f'"{sys.executable}" -c "{MANTHAN}" "$@"')
        redis_cli = shutil.which("redis-cli")
        if redis_cli and REDIS_PORT in self._ports:
            self._tool("redis-cli", f'{redis_cli} -p {self._ports[REDIS_PORT]} "$@"')
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("MANTHAN_")}
        return inherited | {"BIN": str(self._bin), "PATH": f"{self._bin}{os.pathsep}{os.environ['PATH']}"}

    def _tool(self, name: str, command: str) -> None:
        (self._bin / name).write_text(f"#!/bin/sh\nexec {command}\n")
        (self._bin / name).chmod(0o755)

    def _port(self, documented: int) -> int:
        if documented not in self._ports:
            if documented == REDIS_PORT:
                self._redis = RedisServer(self.folder.parent)
                self._redis.start()
                self._ports[documented] = self._redis.port
            else:
                self._ports[documented] = free_port()
        return self._ports[documented]

    def _serve(self, text: str) -> None:
        """A redis-server of its own, next to that of the other commands unless it speaks TLS."""
        RedisServer.program()
        port = self._ports.get(TLS_PORT) if "--tls-port" in text else None
        if port is None:
            port = free_port()
            text += f" --port {port}"
        with (self.folder.parent / f"redis-{port}.log").open("wb") as log:
            server = subprocess.Popen(["bash", "-c", f"exec {text}"], cwd=self.folder, stdout=log, stderr=log)
        self._servers.append(server)
        deadline = time.monotonic() + 20
        while server.poll() is None and time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                return
            except OSError:
                time.sleep(0.02)
        raise AssertionError(f"{text}\ndoes not come up: {Path(log.name).read_text()}")


def _end(process: "subprocess.Popen[str]") -> None:
    """End a command and all that it started: politely first, so that it can stop its servers."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(GOODBYE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
