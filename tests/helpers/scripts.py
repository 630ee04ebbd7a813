"""Scripts of this folder that take a job as JSON on standard input and tell what they saw on standard output, each in a
process of its own: forked from the one that engines are forked from, where there is no GPU."""

import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_engine import fork_engines

HELPERS = Path(__file__).parent


def run_script(script: str, job: Any, **environment: str) -> tuple[Any, str]:
    """Return what a script says of a job, and its log. Its engine is in its own process."""
    from vllm.platforms import current_platform

    fork_engines()
    context: Any = multiprocessing.get_context("forkserver" if current_platform.is_cpu() else "spawn")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "stdin").write_text(json.dumps(job))
        given = dict(os.environ) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} | environment
        process = context.Process(target=_become, args=(str(HELPERS / script), folder, given))
        process.start()
        process.join()
        out, err = (Path(folder, stream).read_text() for stream in ("stdout", "stderr"))
    assert process.exitcode == 0, err[-4000:]
    return json.loads(out), err


def run_alone(script: str, job: Any) -> Any:
    """What a script says, also as JSON, that runs in an interpreter of its own."""
    env = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    command = [sys.executable, HELPERS / script]
    done = subprocess.run(command, input=json.dumps(job), env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def run_sessions(what: list[str], codec: dict[str, Any], cache: str = "", **more: Any) -> dict[str, Any]:
    """Return what sessions.py says of a growing session in this codec, and its log. cache: where profiles are."""
    manthan = {
        "idle.min_tokens": 64,
        "idle": 3600,
        "codec": {"sink_tokens": 4, "guard": False} | codec,
        "tiers": {"max_bytes": "64MiB"},
    }
    job = {"scenario": "growing", "what": what, "blocks": 131, "manthan": manthan} | more
    found, log = run_script("sessions.py", job, **({"XDG_CACHE_HOME": cache} if cache else {}))
    return found | {"log": log.splitlines()}


def answer(work: Callable[[Any], Any]) -> None:
    """What such a script does: say what comes of the job."""
    job = json.load(sys.stdin)
    with os.fdopen(os.dup(1), "w") as report:
        os.dup2(2, 1)  # vLLM prints
        json.dump(work(job), report)


def _become(script: str, folder: Path, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    for stream, fd in (("stdout", 1), ("stderr", 2)):
        with open(folder / stream, "w") as file:
            os.dup2(file.fileno(), fd)
    with open(folder / "stdin") as sys.stdin:
        runpy.run_path(script, run_name="__main__")
