"""The threads next to the model's: where they may run, and that nothing breaks them."""

import os
import subprocess
import sys
import threading
from typing import Any

import pytest

from manthan.vllm_hooks.worker.engine import JobThreads, allowed_cpus

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs sched_setaffinity")

WORKER = """
import multiprocessing, os, sys, time

def work(bound):
    os.sched_setaffinity(0, bound)  # as vLLM binds a CPU worker
    from manthan.vllm_hooks.worker.engine import JobThreads, allowed_cpus
    threads, found = JobThreads(1, "test", allowed_cpus()), []
    threads.submit(lambda: found.append(sorted(os.sched_getaffinity(0))))
    threads.submit(lambda: found.append(sorted(os.sched_getaffinity(os.getpid()))))
    while len(found) < 2:
        time.sleep(0.01)
    threads.shutdown()
    print(*found)

if __name__ == "__main__":
    given, bound = (set(map(int, part.split(","))) for part in sys.argv[1:])
    os.sched_setaffinity(0, given)  # as taskset does
    process = multiprocessing.get_context("spawn").Process(target=work, args=(bound,))
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""


def affinities(given: set[int], bound: set[int], folder: Any) -> str:
    """Where a thread of a worker may run, and where the model does."""
    script = folder / "worker.py"
    script.write_text(WORKER)
    arguments = [",".join(map(str, sorted(cpus))) for cpus in (given, bound)]
    done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_threads_leave_the_models_cpus_and_keep_an_operators_affinity(tmp_path: Any) -> None:
    first, *others = sorted(os.sched_getaffinity(0))
    assert affinities({first, *others}, {first}, tmp_path) == f"{[first, *others]} [{first}]"
    assert affinities({first}, {first}, tmp_path) == f"[{first}] [{first}]"


@pytest.mark.parametrize("call", ["sched_setaffinity", "sched_getaffinity"])
def test_an_affinity_that_cannot_be_set_costs_nothing_else(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise PermissionError("no")

    monkeypatch.setattr(os, call, refused)
    threads, done = JobThreads(2, "test", allowed_cpus() or {0}), threading.Event()
    threads.submit(done.set)
    assert done.wait(10)
    threads.shutdown()


def test_a_job_that_raises_costs_that_job() -> None:
    threads, done = JobThreads(1, "test"), threading.Event()
    threads.submit(int, "no number")
    threads.submit(done.set)
    threads.wait()
    assert done.is_set()
    threads.shutdown()
    threads.wait()


def test_a_shutdown_waits_for_what_was_begun() -> None:
    threads, go, order = JobThreads(1, "test"), threading.Event(), []
    threads.submit(lambda: (go.wait(10), order.append(1)))
    while not threads._jobs.empty():  # until it is begun
        pass
    threading.Timer(0.01, go.set).start()
    threads.shutdown()
    assert order == [1]
    threads.submit(order.append, 2)  # nobody is there to do it, and nothing is raised
    assert order == [1]
