"""Progress of a long run: a bar on a terminal, otherwise a line at most every LINE_EVERY_S seconds."""

import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from manthan.benchmarks.arms import LINE_EVERY_S


class Bar:
    """Progress of a run called `what`. `begin` starts its next part, and the count of steps anew."""

    def __init__(self, console: Console, what: str) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        self._console, self._what = console, what
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task(what, total=None)
        self._said = -LINE_EVERY_S

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, text: str, total: int | None = None) -> None:
        self._progress.reset(self._task, description=f"{self._what}: {text}", total=total)
        self._say(text)

    def step(self) -> None:
        self._progress.advance(self._task)
        task = self._progress.tasks[0]
        self._say(f"{task.description.removeprefix(f'{self._what}: ')}, {task.completed:.0f} of {task.total or 0:.0f}")

    def _say(self, text: str) -> None:
        if not self._console.is_terminal and time.monotonic() - self._said >= LINE_EVERY_S:
            self._said = time.monotonic()
            self._console.print(f"  {self._what}: {text}", markup=False, soft_wrap=True)
