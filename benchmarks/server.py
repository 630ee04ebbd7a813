"""Real vLLM server in a separate process: start, watch the log, ask, stop.

with VllmServer("tests/data/tiny-llama", ["--block-size", "32"], log=Path("server.log")) as server:
    server.wait_until_ready(120)
    reply = server.chat([{"role": "user", "content": "Hello"}], max_tokens=4)
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, Self

from manthan.benchmarks.endpoint import POLL_S, Endpoint, Reply, ServerError
from manthan.benchmarks.ports import hold_port, port_of
from manthan.codec.cpu.exact import EXACT

__all__ = ["ENVIRONMENT", "Reply", "ServerError", "VllmServer"]

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # By default vLLM's CPU build pins threads and leaves one core free, or two with a KV connector. On a machine of two
    # cores, no core would be left. Compared servers must have equally many threads, with or without a connector.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) - 1)),
    "NO_COLOR": "1",  # the log is read by programs
}
"""Environment variables of the server, unless this process's environment has other values for them."""
STOP_WAIT_S = 10.0

CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""Chat template for the tests' model, without separators. The model's own template puts a newline before each message.
A next turn's prompt would then differ from the computed tokens where the answer begins, and lose the last block."""


BEGAN = re.compile(r"Manthan is on: .*?, codec ([^\s,]+)")
GUARD = re.compile(r"Manthan: codec (\S+) is used until")
VERDICT = re.compile(
    r"Manthan: codec (\S+) (is faithful|is not faithful|takes longer to decode)[^,:]*"
    r"(?:, and (\S+) (?:is used|tokens are))?"
)


def codec_used(log: Path) -> str:
    """Return a sentence on the codec in use at the end of an engine's log; empty for an engine without Manthan.

    The guard measures codecs, and replaces an unfaithful or slow codec. The sentence has the guard's last verdict.
    """
    text = log.read_text(errors="replace") if log.exists() else ""
    if not (began := BEGAN.findall(text)):
        return ""
    if verdicts := VERDICT.findall(text):
        codec, verdict, instead = verdicts[-1]
        used = {"": codec, "all": EXACT}.get(instead, instead)
        return f"codec {codec} {verdict}, {used} is used"
    if finest := GUARD.findall(text):
        return f"codec {finest[-1]} is used until {began[-1]} is measured on more blocks than there were in this run"
    return f"codec {began[-1]} is used, the guard is off"


class Process(Protocol):
    """Part of subprocess.Popen that VllmServer uses. The process leads a process group, which `stop` ends."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> object: ...
    def terminate(self) -> None: ...


Launch = Callable[[Sequence[str], Mapping[str, str], Path], Process]
"""Function that starts `vllm` with arguments and an environment, and has the output written into a file."""


def launch_vllm(arguments: Sequence[str], env: Mapping[str, str], log: Path) -> Process:
    """Start the `vllm` command, as a user would, in a new process group."""
    with log.open("wb") as output:
        return subprocess.Popen(
            [*_vllm_command(), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(env),
            start_new_session=True,
        )


class VllmServer(Endpoint):
    """`vllm serve MODEL` on a free port of this machine, with output in a file.

    flags: further arguments of `vllm serve`. env: variables on top of this process's. This process's variables named
    MANTHAN_… are not passed on, because the flags alone shall configure Manthan.
    """

    def __init__(
        self,
        model: str,
        flags: Sequence[str],
        log: Path,
        env: dict[str, str] | None = None,
        launch: Launch = launch_vllm,
    ) -> None:
        self.log = log
        self._holder = hold_port()
        self.port = port_of(self._holder)
        super().__init__(f"http://127.0.0.1:{self.port}", model)
        self._flags = list(flags)
        self._env = env or {}
        self._launch = launch
        self._process: Process | None = None
        self._read_to = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # -- the process ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the process. The server answers some seconds later."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("MANTHAN_")}
        arguments = ["serve", self.model, "--host", "127.0.0.1", "--port", str(self.port), *self._flags]
        self._process = self._launch(arguments, ENVIRONMENT | inherited | self._env, self.log)

    def wait_until_ready(self, timeout_s: float) -> None:
        """Return when the server answers; raises ServerError after the server's death or the timeout."""
        self.wait_for(self.is_healthy, timeout_s, "answer")

    def wait_for(self, done: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Call `done` until True; raises ServerError if the server dies or `timeout_s` passes."""
        deadline = time.monotonic() + timeout_s
        while not done():
            if not self.is_alive():
                raise ServerError(f"The server died (exit status {self.exit_status}).", self.log)
            if time.monotonic() > deadline:
                raise ServerError(f"The server did not {what} within {timeout_s:.0f} s.", self.log)
            time.sleep(POLL_S)

    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def exit_status(self) -> int | None:
        return self._process.returncode if self._process else None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def kill(self) -> None:
        """End all processes of the server with SIGKILL, without an orderly end."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """End the server with SIGTERM. After its end, or else after STOP_WAIT_S, kill all that is left with SIGKILL."""
        self.close()
        if self._process is None:
            return
        try:
            if self._process.poll() is None:
                self._process.terminate()
                self._process.wait(STOP_WAIT_S)
        except subprocess.TimeoutExpired:
            pass
        finally:  # also when a second Ctrl-C comes while we wait
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    # -- metrics and log --------------------------------------------------------------------------------

    def new_log_lines(self) -> list[str]:
        """Return the log's whole lines written since the last call."""
        with self.log.open("rb") as log:
            log.seek(self._read_to)
            text = log.read()
        text = text[: text.rfind(b"\n") + 1]  # the last line may be half written
        self._read_to += len(text)
        return text.decode(errors="replace").splitlines()

    def error(self, what: str) -> ServerError:
        return ServerError(what, self.log)

    def _what_happened(self) -> str:
        time.sleep(0.5)  # a process that drops a connection dies a moment later
        return "did not answer a request" if self.is_alive() else f"died (exit status {self.exit_status})"


def _vllm_command() -> list[str]:
    """Return the `vllm` command next to this Python, or else the command of vLLM's module in this Python."""
    sibling = Path(sys.executable).with_name("vllm")
    return [str(sibling)] if sibling.exists() else [sys.executable, "-m", "vllm.entrypoints.cli.main"]
