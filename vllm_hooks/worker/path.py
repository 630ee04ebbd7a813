"""How a rank turns blocks into codes and back: what the ways of doing it have in common."""

import sys
import threading
from collections.abc import Iterable, Mapping, Sequence

from manthan.manager.work import FailedBlock, Load, LoadResult, SpillBlock, SpillResult
from manthan.vllm_hooks.messages import ManthanMetadata, ManthanWorkerMetadata

REST_S = sys.getswitchinterval()
"""So long, at most, the model's thread stands aside for a restore in a step in which nothing is computed: as long as
any thread of Python may keep it waiting. Steps that follow each other at once would have half of the interpreter's
time, of which the thread that restores has need."""


class WorkerPath:
    """Takes a step's metadata, works in the background, and reports what has ended.

    This class itself does nothing. It serves until there is a KV cache.

    The scheduler half holds a reference on every block that is named here until it is answered for, or copied, so no
    block is written to by anybody else meanwhile. The caller is the model's thread: nothing here raises, and nothing
    waits but what says so.

    fails_whole: a load of which anything fails has failed as a whole; otherwise only its blocks from the first one on
    that failed.
    """

    def __init__(self, fails_whole: bool = False) -> None:
        self.fails_whole = fails_whole
        self.decode_s: Mapping[str, float] | None = None
        """Seconds to decode a token by codec, on a GPU; None where the CPU decodes."""
        self.begun: list[Load | SpillBlock] = []
        """What of the last step's metadata will be answered, should submitting it raise."""
        self._lock = threading.Condition()
        self._awaited = 0
        """Loads that threads work on and requests wait for."""
        self._report = ManthanWorkerMetadata()
        self._finished_loads: set[str] = set()
        self._failed_loads: set[str] = set()
        self._failed_blocks: set[int] = set()

    def submit_loads(self, metadata: ManthanMetadata) -> None:
        """Begin all that a step's metadata asks for but spills."""

    def submit_spills(self, metadata: ManthanMetadata) -> None:
        """Begin the spills, once what the model computes in this step was begun: they come after it."""

    def wait(self) -> None:
        """Until nothing that was begun reads or writes the paged cache."""

    def shutdown(self) -> None:
        """Wait for what is under way and let go of threads and memory."""

    def rest(self) -> None:
        """The model computes nothing in this step, so the caller's thread stands aside for a moment, if threads load
        what a request waits for."""
        with self._lock:
            if self._awaited:
                self._lock.wait_for(lambda: bool(self._finished_loads), REST_S)

    def take_finished_loads(self) -> set[str]:
        """The requests whose load has ended, in whatever way."""
        with self._lock:
            taken, self._finished_loads = self._finished_loads, set()
            return taken

    def take_failed_loads(self) -> set[str]:
        """Those of which vLLM may use nothing."""
        with self._lock:
            taken, self._failed_loads = self._failed_loads, set()
            return taken

    def take_failed_blocks(self) -> set[int]:
        """The blocks that vLLM may not use; those of loads that failed whole are not among them."""
        with self._lock:
            taken, self._failed_blocks = self._failed_blocks, set()
            return taken

    def take_report(self) -> ManthanWorkerMetadata | None:
        with self._lock:
            taken, self._report = self._report, ManthanWorkerMetadata()
            return taken if taken.spills or taken.loads or taken.copied else None

    def fail_loads(self, loads: Iterable[Load]) -> None:
        """Answer loads that were not begun, so that vLLM computes what they were to bring."""
        for load in loads:
            names = [(part.group, key) for part in load.parts for key in part.keys]
            if names:  # the scheduler half knows of it
                failed = [FailedBlock(*names[0], "internal")]
                self._loaded(LoadResult(load.request_id, failed, 0, 0.0, load.is_prefetch))
            if not load.is_prefetch:
                self._finished(load, 0)

    def fail_spills(self, spills: Sequence[SpillBlock]) -> None:
        """Answer blocks to be encoded that were not begun."""
        self._copied(spills)
        self._spilled([SpillResult(spill.key, spill.group, "internal", 0.0) for spill in spills])

    def _copied(self, spills: Iterable[SpillBlock]) -> None:
        """These blocks of the pool are not read any more. Each is to be named once, before its answer."""
        with self._lock:
            self._report.copied += [(spill.group, spill.key) for spill in spills]

    def _spilled(self, results: list[SpillResult]) -> None:
        with self._lock:
            self._report.spills += results

    def _finished(self, load: Load, good: int) -> None:
        """vLLM may use the first so many blocks of a request's load, counted through its parts; the others failed."""
        bad = [block_id for part in load.parts for block_id in part.block_ids][good:]
        with self._lock:
            if bad and self.fails_whole:
                self._failed_loads.add(load.request_id)
            else:
                self._failed_blocks.update(bad)
            self._finished_loads.add(load.request_id)
            self._lock.notify_all()

    def _loaded(self, result: LoadResult) -> None:
        """The codes of a load are not needed any more."""
        with self._lock:
            self._report.loads.append(result)
