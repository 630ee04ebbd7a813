"""A real redis-server on a free port of this machine, to be stopped, killed, paused and started again."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import pytest
import redis

from manthan.benchmarks.ports import hold_port, port_of

_held: list[socket.socket] = []


def free_port() -> int:
    """A port that is nobody else's as long as this process runs."""
    _held.append(hold_port())
    return port_of(_held[-1])


class RedisServer:
    """A server whose files are in `folder`. flags: as redis-server takes them, such as ("--maxmemory", "10mb")."""

    def __init__(self, folder: Path, flags: Sequence[str] = ()) -> None:
        self.folder, self.flags = folder, list(flags)
        self._holder = hold_port()
        self.port = port_of(self._holder)
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def client(self) -> redis.Redis:
        """As whoever may do everything; on flags that forbid that, use your own."""
        return redis.Redis(port=self.port, socket_timeout=20, decode_responses=True)

    @property
    def binary_client(self) -> redis.Redis:
        return redis.Redis(port=self.port, socket_timeout=20)

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def admin(self, password: str, decode_responses: bool = True) -> redis.Redis:
        """As the default user of a server that asks for a password."""
        return redis.Redis(port=self.port, password=password, socket_timeout=20, decode_responses=decode_responses)

    def start(self) -> None:
        with (self.folder / f"redis-{self.port}.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command(),
                cwd=self.folder,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._wait_until_up()

    def _command(self) -> list[str]:
        return [self.program(), "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", *self.flags]

    @staticmethod
    def program() -> str:
        """Where redis-server is. A test that needs it fails where it is not: make installs it."""
        return shutil.which("redis-server") or pytest.fail("redis-server is not installed")

    def _wait_until_up(self) -> None:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            assert self._process is not None
            assert self._process.poll() is None, f"redis-server ended: see {self.folder}/redis-{self.port}.log"
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            time.sleep(0.02)
        raise AssertionError("redis-server did not come up")

    def kill(self) -> None:
        if self._process is not None:
            self.resume()
            self._process.kill()
            self._process.wait(20)
            self._process = None

    def pause(self) -> None:
        """It answers nothing, and no connection is closed."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGCONT)


def running(folder: Path, *flags: str) -> Iterator[RedisServer]:
    """The body of a fixture that gives a server."""
    with RedisServer(folder, flags) as server:
        yield server
