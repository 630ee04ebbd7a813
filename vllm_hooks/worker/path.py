"""How a rank turns blocks into codes and back: what the ways of doing it have in common."""

import threading
from abc import ABC, abstractmethod

from manthan.vllm_hooks.messages import Load, LoadResult, ManthanMetadata, ManthanWorkerMetadata, SpillResult


class WorkerPath(ABC):
    """Takes a step's metadata, works in the background, and reports what has ended.

    The scheduler half holds a reference on every block that is named here until it is answered for, so no block is
    written to by anybody else meanwhile.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._report = ManthanWorkerMetadata()
        self._finished_loads: set[str] = set()
        self._failed_blocks: set[int] = set()

    @abstractmethod
    def submit(self, metadata: ManthanMetadata) -> None:
        """Begin what a step's metadata asks for; the caller is the model's thread and must not wait."""

    @abstractmethod
    def shutdown(self) -> None:
        """Wait for what is under way and let go of threads and memory."""

    def take_finished_loads(self) -> set[str]:
        with self._lock:
            taken, self._finished_loads = self._finished_loads, set()
            return taken

    def take_failed_blocks(self) -> set[int]:
        with self._lock:
            taken, self._failed_blocks = self._failed_blocks, set()
            return taken

    def take_report(self) -> ManthanWorkerMetadata | None:
        with self._lock:
            taken, self._report = self._report, ManthanWorkerMetadata()
            return taken if taken.spills or taken.loads else None

    def _spilled(self, results: list[SpillResult]) -> None:
        with self._lock:
            self._report.spills += results

    def _finished(self, load: Load, good: int) -> None:
        """vLLM may use the first so many blocks of a request's load; the others failed."""
        with self._lock:
            self._failed_blocks.update(load.block_ids[good:])
            self._finished_loads.add(load.request_id)

    def _loaded(self, result: LoadResult) -> None:
        """The codes of a load are not needed any more."""
        with self._lock:
            self._report.loads.append(result)
