"""Run of the agents' benchmark: each arm's server in turn, with the same agents, a few first and then more.

An arm is a system to measure, such as plain vLLM. `options` has the command's arguments; see agents.py.
"""

import json
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import typer
from pydantic import ByteSize
from rich.console import Console

from manthan.benchmarks import agents_report
from manthan.benchmarks.agents_trace import Scale, agents_of, as_weka, read_agents, sessions_of
from manthan.benchmarks.arms import leave_on_signals, machine, make_console, new_report, run_jobs, write_report
from manthan.benchmarks.capacity_arms import CapacityArm, Memory
from manthan.benchmarks.load_arms import CPU_ARMS, GPU_ARMS, ORDERED, WIDE
from manthan.benchmarks.load_chats import Chat
from manthan.benchmarks.load_run import choose_arms, forget, serving
from manthan.benchmarks.load_talk import StoppedError, Talk, Talker
from manthan.benchmarks.restore import SPARE_POSITIONS
from manthan.benchmarks.served import Served
from manthan.benchmarks.settle import until_settled
from manthan.benchmarks.shapes import DEFAULT, model_folder


class Sizes(NamedTuple):
    """Defaults of options that the command line leaves out. pool: bytes."""

    agents: str
    shrink: float
    faster: float
    seconds: float
    pool: int


GPU = Sizes("8,16,32,48", 4, 1.5, 150, 24 << 30)
CPU = Sizes("4,8,16", 64, 10, 30, 36 << 20)
RAMP_SHARE = 1 / 3


class Plan(NamedTuple):
    """Each agent's first session, by number of agents. All agents begin in the first ramp_s of `seconds`."""

    agents: dict[int, list[Chat]]
    seconds: float
    ramp_s: float


def read_counts(text: str) -> list[int]:
    """Return the different numbers of a text such as `16,32`, ascending. Raises BadParameter."""
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = [0]
    if found[0] < 1:
        raise typer.BadParameter(f"--agents must be whole numbers from 1 on, with commas between, not {text!r}")
    return found


def run(options: Namespace, arguments: dict[str, Any]) -> None:
    """Do the whole command. Raises Exit, with status 1 if an arm failed or the run was stopped, else with 0."""
    console = make_console()
    leave_on_signals()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        options.model = model_folder(options.model, Path(folder))
        report = run_arms(options, Path(folder), stack, arguments, console)
    path = options.out / "agents.json"
    console.print(f"  {path}", soft_wrap=True)
    agents_report.show(report, path.with_suffix(".png"), console)
    raise typer.Exit(1 if report["errors"] else 0)


def run_arms(
    options: Namespace, folder: Path, stack: ExitStack, arguments: dict[str, Any], console: Console
) -> dict[str, Any]:
    on_gpu = bool(machine()["gpu"])
    sizes = GPU if on_gpu else CPU
    counts = read_counts(options.agents or sizes.agents)
    options.arms = options.arms or ",".join(arm for arm in (GPU_ARMS if on_gpu else CPU_ARMS) if arm != WIDE)
    served = Served.choose(options.model, options.block_size, folder / f"{DEFAULT}-shape", on_gpu)
    trace, longest = read_agents(options.trace), served.shape.positions - SPARE_POSITIONS
    shrink, faster = options.shrink or sizes.shrink, options.faster or sizes.faster
    scale = Scale(shrink, faster, longest - SPARE_POSITIONS, served.shape.vocabulary)
    half = {"even": 0, "odd": 1}.get(str(options.half))
    seconds = options.seconds or sizes.seconds
    ramp_s = options.ramp or seconds * RAMP_SHARE
    sessions = sessions_of(trace, scale, half, options.copies)
    plan = Plan({n: agents_of(sessions, n, seconds, ramp_s, options.seed) for n in counts}, seconds, ramp_s)
    if options.weka:
        write_weka(options.weka, plan.agents[max(counts)], str(served.folder))
        raise typer.Exit
    blocks = (options.pool or sizes.pool) // served.block_nbytes
    if blocks * served.block_size < longest:
        least = ByteSize(-(-longest // served.block_size) * served.block_nbytes).human_readable()
        raise typer.BadParameter(f"--pool must have room for a prompt of {longest:,} tokens, which is {least}")
    pool = blocks * served.block_nbytes
    store = options.memory or pool
    memory = Memory(pool + store, blocks, pool, store)
    arms = choose_arms(options, served, memory, longest, max(counts), stack)
    left_out = {name: arm for name, arm in arms.items() if isinstance(arm, str)}
    for reason in left_out.values():
        console.print(f"  {reason}", soft_wrap=True)
    unfinished: list[dict[str, Any]] = []
    jobs = {
        name: partial(run_arm, options, served, plan, longest, arm, unfinished)
        for name, arm in arms.items()
        if isinstance(arm, CapacityArm)
    }
    about = {
        "trace": trace.name,
        "model": served.name,
        "memory": asdict(memory),
        "token_nbytes": served.shape.token_nbytes,
        "scale": {"shrink": shrink, "faster": faster, "copies": options.copies},
        "half": str(options.half),
        "bound_s": options.bound,
        "left_out_arms": left_out,
    }
    sizes_said = [ByteSize(nbytes).human_readable() for nbytes in (pool, store)]
    console.print(
        f"  {trace.name}: {len(sessions)} sessions, {', '.join(map(str, counts))} agents for {seconds:g} s each; a "
        f"pool of {sizes_said[0]}, {sizes_said[1]} outside",
        soft_wrap=True,
    )
    try:
        report = run_jobs("agents", jobs, about, arguments, options.out, console)
    except (KeyboardInterrupt, SystemExit):
        if not unfinished:
            raise
        [arm] = [run["arm"] for run in unfinished]
        console.print(f"  Stopped during {arm}: what was measured before follows.", markup=False, soft_wrap=True)
        report = new_report("agents", arguments, [], {}, {arm: "stopped"}) | about | {"runs": []}
    report["runs"] += unfinished
    write_report(report, options.out)
    return report


def write_weka(folder: Path, agents: Sequence[Chat], model: str) -> None:
    """Write each agent's first session as a JSON file in AIPerf's `weka_trace` format."""
    folder.mkdir(parents=True, exist_ok=True)
    for chat in agents:
        (folder / f"{chat.name.replace('/', '-')}.json").write_text(json.dumps(as_weka(chat, model)))


def run_arm(
    options: Namespace,
    served: Served,
    plan: Plan,
    longest: int,
    arm: CapacityArm,
    unfinished: list[dict[str, Any]],
    console: Console,
) -> dict[str, Any]:
    """Return the results of an arm for the report, by number of agents. Measure the fewest agents first.

    If Ctrl-C or a signal stops the run, what was measured before is added to `unfinished`.
    """
    points: dict[str, dict[str, Any]] = {}
    with serving(options, served, arm, longest, "agents", console) as (server, progress, about):
        run = about | {"seed": options.seed, "points": points}
        try:
            for count, agents in plan.agents.items():
                if points:
                    until_settled(server, options.idle_after + 1)
                    forget(server)
                progress.begin(f"{count} agents", _requests(agents))
                talker = Talker(server, progress.step, plan.seconds, arm.kind == ORDERED)
                try:
                    points[str(count)] = _point(plan, talker.run(agents))
                except StoppedError as stop:
                    points[str(count)] = _point(plan, stop.talk)
                    raise
                asked = len(points[str(count)]["requests"])
                console.print(f"  {arm.name}, {count} agents: {asked} requests", soft_wrap=True)
        except (KeyboardInterrupt, SystemExit):
            if points:
                unfinished.append(run)
            raise
    return run | about


def _point(plan: Plan, talk: Talk) -> dict[str, Any]:
    return {
        "seconds": plan.seconds,
        "ramp_s": plan.ramp_s,
        "wall_s": talk.wall_s,
        "stopped_s": talk.stopped_s,
        "requests": [asdict(one) | {"gaps_ms": []} for one in talk.asked],
        "samples": talk.samples,
        "counters": talk.counters,
    }


def _requests(agents: Sequence[Chat]) -> int:
    return sum(len(chat.turns) for chat in agents)
