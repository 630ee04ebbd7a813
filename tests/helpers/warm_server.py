"""`vllm serve` forked from a process that has imported vLLM, for tests of what a server does, not of how it starts.

By itself it imports vLLM three times, one process after the other, which takes half a minute of a core.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_engine import fork_engines

from manthan.benchmarks.server import VllmServer

LOOKUP_WAIT = "TEST_LOOKUP_WAIT_S"
"""Environment variable: the seconds that a request waits for Redis, where a test must not depend on the machine."""
LOOKS = "TEST_LOOKS_S"
"""Environment variable: the seconds between two looks at what has changed, for a page that shows it."""
RECHECKS = "TEST_RECHECKS"
"""Environment variable: if set, each restore is rechecked, after so many seconds without a request."""


def warm_server(model: str, flags: Sequence[str], log: Path, env: dict[str, str] | None = None) -> VllmServer:
    """env: nothing that Python or the loader looks at as a process starts, such as PYTHONPATH.

    What tests let their own engines pickle, a server has to encode, as an operator's has.
    """
    strict = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "0"}
    return VllmServer(model, flags, log, strict | (env or {}), launch=_Forked)


class _Forked:
    """As much of subprocess.Popen as a server needs."""

    def __init__(self, arguments: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        fork_engines()
        context: Any = multiprocessing.get_context("forkserver")
        self._process = context.Process(target=_serve, args=(["vllm", *arguments], dict(env), str(log)))
        self._process.start()
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> None:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("vllm serve", timeout or 0)

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)


def _serve(command: Sequence[str], env: Mapping[str, str], log: str) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream, to in enumerate((os.open(os.devnull, os.O_RDONLY), output, output)):
        os.dup2(to, stream)
    import warm_vllm
    from vllm.entrypoints.cli.main import main
    from vllm.v1.engine import utils

    from manthan.manager.session import persist
    from manthan.vllm_hooks import rechecks
    from manthan.vllm_hooks.http import api

    utils.get_mp_context = warm_vllm.forking
    persist.WAIT_S = float(os.environ.get(LOOKUP_WAIT, persist.WAIT_S))
    api.EVERY_S = float(os.environ.get(LOOKS, api.EVERY_S))
    if quiet_s := os.environ.get(RECHECKS):
        rechecks.EVERY, rechecks.QUIET_S, rechecks.ASK_S = 1, float(quiet_s), 0.2
    sys.argv = list(command)
    main()
