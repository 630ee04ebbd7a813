"""Count the handoffs of a block's way: pairs of files of Manthan one of which calls the other, on a real engine.

    make handoffs

A profiler notes each call whose caller and callee are functions of Manthan in different files, on all threads, while
one session of a real CPU engine goes cold, and while it comes back. Constructors and properties count as calls.
"""

import os
import random
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the profiler sees this process only

from stepped_engine import ClockedEngine

import manthan.manager
from manthan.manager.events import Restored

ROOT = str(Path(next(iter(manthan.manager.__path__))).resolve().parent) + "/"
LIMITS = {"evict": (45, 20), "restore": (40, 20)}
"""The most handoffs, and the most files that they come from or go to."""
BLOCKS = 12

Function = tuple[str, str]
"""File, and name in that file."""


class Profiler:
    """Notes pairs of caller and callee while `is_on`."""

    def __init__(self) -> None:
        self.is_on = False
        self.pairs: dict[tuple[Function, Function], None] = {}
        threading.setprofile(self._note)  # for threads that are yet to begin
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if self.is_on and event == "call" and frame.f_back is not None:
            caller, callee = _function(frame.f_back), _function(frame)
            if caller is not None and callee is not None and caller[0] != callee[0]:
                self.pairs[caller, callee] = None

    def count(self, act: Callable[[], object]) -> list[tuple[Function, Function]]:
        """Return the handoffs while `act` runs."""
        self.pairs = {}
        self.is_on = True
        act()
        self.is_on = False
        return sorted(self.pairs)


@cache
def _file(name: str) -> str | None:
    """Return a file of Manthan's packages as it is named there; None for another."""
    path = os.path.realpath(name)
    is_ours = (
        not name.startswith("<") and path.startswith(ROOT) and not path.startswith((f"{ROOT}tests/", f"{ROOT}.venv/"))
    )
    return path.removeprefix(ROOT) if is_ours else None


def _function(frame: FrameType) -> Function | None:
    file = _file(frame.f_code.co_filename)
    return None if file is None else (file, frame.f_code.co_qualname)


def main() -> None:
    """Print the handoffs of one eviction and one restore. Exit with 1 if they are more than LIMITS."""
    profiler = Profiler()
    engine = ClockedEngine(80, idle={"after_s": 1.0, "min_tokens": 1}, codec={"guard": False}, api=False)
    rng = random.Random(5)
    warm, tokens = ([rng.randrange(100, 200) for _ in range(32 * BLOCKS)] for _ in range(2))
    engine.ask(warm, "warm", 4)
    engine.rest(2.0)
    tokens += engine.ask(tokens, "counted", 4)
    found = {"evict": profiler.count(lambda: engine.rest(2.0))}
    assert engine.half.manager.table.by_id["counted"].is_cold
    engine.engine.reset_prefix_cache()
    begin = engine.half.new_request

    def without_begin(request: Any) -> None:
        """Leave out what every request costs before it is looked up."""
        profiler.is_on = False
        begin(request)
        profiler.is_on = True

    def until_loaded(event: object) -> None:
        """Leave out the answer."""
        if isinstance(event, Restored):
            profiler.is_on = False

    engine.half.new_request = without_begin
    engine.half.manager.events.subscribe(until_loaded)
    found["restore"] = profiler.count(lambda: engine.ask(tokens, "counted", 4))
    is_over = False
    for name, pairs in found.items():
        most, most_files = LIMITS[name]
        files = {function[0] for pair in pairs for function in pair}
        handoffs = {(caller[0], callee[0]) for caller, callee in pairs}
        is_over |= len(handoffs) > most or len(files) > most_files
        print(f"{name}: {len(handoffs)} handoffs (at most {most}) in {len(files)} files (at most {most_files})")
        for caller, callee in pairs:
            print(f"    {caller[0]}:{caller[1]} -> {callee[0]}:{callee[1]}")
    sys.exit(is_over)


if __name__ == "__main__":
    main()
