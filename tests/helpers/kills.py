"""Engines on one disk, each killed at a random moment: `python tests/helpers/kills.py --times 200`, or `make kills`.

Guests come, are answered, go cold and return, until SIGKILL ends all processes of the engine. The next engine on the
disk is asked by all guests again. All tokens are kept exact, so that a wrong answer is not the codec's; whom the model
answers wrong without a store, too, is not counted. Exit status 1 if an answer was wrong or an engine failed, or if
less than ENOUGH of the blocks of cold sessions came back. A session may be lost that went cold milliseconds before the
kill.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import psutil
from vllm_engine import BLOCK, Answer, Engine, Table, process_of

from manthan.vllm_hooks.compat import ask_cores
from manthan.vllm_hooks.queries import METHOD

ENOUGH = 0.95
"""Share of the saved blocks that must come back."""
GUESTS, TOGETHER = 30, 6
"""Guests that are asked again, the last ones, and requests at a time."""
LONGEST_S = 4.0
"""Most seconds from when all guests were asked to the kill."""
LOOK_S = 0.1
POOL, BUDGET = 131, "256MiB"
EXACT = {"sink_tokens": 100_000}


@dataclass
class Kills:
    """What came of the kills so far.

    guests: numbers of those who were asked. wrong: those who got a wrong answer, as often as they did. held: by id of a
    cold session, number of its saved blocks when it was last looked. saved, back: these blocks before a kill, and those
    of them that were not computed after it.
    """

    folder: Path
    chance: random.Random
    guests: list[int] = field(default_factory=list)
    held: dict[str, int] = field(default_factory=dict)
    answers: int = 0
    wrong: list[int] = field(default_factory=list)
    saved: int = 0
    back: int = 0

    @property
    def share(self) -> float:
        return self.back / self.saved if self.saved else 1.0

    def one(self) -> None:
        """Start an engine, have all guests return, and kill it amid more of them."""
        disk = {"kind": "disk", "max_bytes": BUDGET, "disk": {"path": str(self.folder)}}
        engine = Engine(POOL, idle=0.2, tiers=disk, codec=EXACT)
        processes = [engine.llm.engine_core.resources.engine_manager.processes[0].pid]
        processes += engine.on_workers(process_of)
        try:
            self._return_all(engine)
            self._talk(engine, time.monotonic() + self.chance.random() * LONGEST_S)
        finally:
            for process in processes:
                os.kill(process, signal.SIGKILL)
            while not all(map(is_over, processes)):  # on a busy machine that takes a while, and the disk is in use
                time.sleep(LOOK_S)
            engine.stop()

    def _return_all(self, engine: Engine) -> None:
        for guest in self.guests:
            answer = engine.run(ask(engine, guest))
            self._check(guest, answer)
            held = min(self.held.get(name(guest), 0), (answer.prompt_tokens - 1) // BLOCK)
            self.saved += held
            self.back += min(held, answer.cached_tokens // BLOCK)

    def _talk(self, engine: Engine, until: float) -> None:
        """Have new guests and old ones ask until that time. What is under way then is lost."""
        running: dict[int, Future[Answer]] = {}
        while time.monotonic() < until:
            while len(running) < TOGETHER:
                guest = self._next(running)
                running[guest] = engine.start(ask(engine, guest))
            self.held = held_by(engine)
            time.sleep(LOOK_S * self.chance.random())
            for guest in [guest for guest, asked in running.items() if asked.done()]:
                self._check(guest, running.pop(guest).result())

    def _next(self, running: Iterable[int]) -> int:
        """Return a guest of whom no request runs: a new one, or one who returns."""
        old = [guest for guest in self.guests if guest not in running]
        if old and self.chance.random() < 0.5:
            return self.chance.choice(old)
        guest = max(self.guests, default=0) + 1
        self.guests = [*self.guests, guest][-GUESTS:]
        return guest

    def _check(self, guest: int, answer: Answer) -> None:
        self.answers += 1
        if answer.text != question(guest)[1]:
            self.wrong.append(guest)

    def excuse(self) -> None:
        """Forget the wrong answers that an engine gives, too, whose store is empty."""
        engine = Engine(POOL)
        try:
            asked = {guest: engine.run(ask(engine, guest)).text for guest in set(self.wrong)}
        finally:
            engine.stop()
        self.wrong = [guest for guest in self.wrong if asked[guest] == question(guest)[1]]


def is_over(process: int) -> bool:
    """True if all threads of a process have ended. The first one stays if the parent is no more."""
    try:
        return psutil.Process(process).status() == psutil.STATUS_ZOMBIE and len(os.listdir(f"/proc/{process}/task")) < 2
    except (psutil.NoSuchProcess, FileNotFoundError):
        return True


def question(guest: int) -> tuple[str, str]:
    return Table(guest).question(3)


def name(guest: int) -> str:
    return f"guest-{guest}"


def ask(engine: Engine, guest: int) -> Any:
    return engine.generate(question(guest)[0], name(guest))


def held_by(engine: Engine) -> dict[str, int]:
    """Return the number of saved blocks of each cold session, by its id."""
    told = engine.run(ask_cores(engine.llm, METHOD, "sessions", {"bound": None, "limit": 1000}))
    found = json.loads(told[0])["sessions"]
    return {session["id"]: session["cold_blocks"] for session in found if session["state"] == "cold"}


def kill(times: int, seed: int, folder: Path, progress: TextIO) -> Kills:
    """Kill so many engines, and ask one more."""
    kills, began = Kills(folder, random.Random(seed)), time.monotonic()
    for number in range(1, times + 2):
        kills.one()
        answers = f"{kills.answers} answers, {len(kills.wrong)} wrong"
        blocks = f"{kills.back} of {kills.saved} saved blocks came back ({kills.share:.1%})"
        print(
            f"engine {number} of {times + 1}: {answers}; {blocks}; {time.monotonic() - began:.0f} s",
            file=progress,
            flush=True,
        )
    if kills.wrong:
        kills.excuse()
        print(f"{len(kills.wrong)} of them are right without a store: {kills.wrong}", file=progress, flush=True)
    return kills


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, default=Path("build", "kills.log"), help="of all engines")
    args = parser.parse_args()
    args.log.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.dup(1), "w") as progress, args.log.open("w") as log, tempfile.TemporaryDirectory() as folder:
        errors = os.dup(2)
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
        try:
            kills = kill(args.times, args.seed, Path(folder), progress)
        finally:
            os.dup2(errors, 2)
    sys.exit(bool(kills.wrong) or kills.share < ENOUGH)


if __name__ == "__main__":
    main()
