"""Many replays of one trace, in processes side by side, and what they come to."""

import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from ctypes import c_uint64
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from manthan.manager.integrity import IntegrityError
from manthan.manager.simulator.belady import belady
from manthan.manager.simulator.replay import Setup, Tally
from manthan.manager.simulator.run import replay, spare_collector
from manthan.manager.simulator.traces import Trace, TracedRequest, read_trace

LOOK_EVERY_S = 0.2


class Run(NamedTuple):
    """A replay that is asked for. label: the policy with its options, as it was written."""

    label: str
    setup: Setup


@dataclass(frozen=True)
class Result:
    """What a replay came to. Shares are of the asked blocks, partial ones included; times in seconds.

    best_share: what Belady's optimum finds in one cache of hot_blocks + cold_blocks. evictions: sessions gone cold.
    blocks_out, blocks_in: encoded, and restored; the bytes are those of their codes. replay_s: what the replay took.
    """

    policy: str
    hot_blocks: int
    cold_blocks: int
    hot_tokens: int
    cold_tokens: int
    requests: int
    asked_blocks: int
    hot_share: float
    restored_share: float
    recomputed_share: float
    best_share: float
    first_token_mean_s: float
    first_token_p99_s: float
    evictions: int
    blocks_out: int
    bytes_out: int
    blocks_in: int
    bytes_in: int
    dropped_blocks: int
    peak_hot_blocks: int
    peak_cold_blocks: int
    replay_s: float

    @property
    def found_share(self) -> float:
        return self.hot_share + self.restored_share


def result_of(run: Run, replayed: tuple[Tally, float], best: int) -> Result:
    """The figures of one replay, which took so many seconds; best: blocks that Belady's optimum finds."""
    setup, (tally, seconds) = run.setup, replayed
    served = [one for one in tally.served[setup.first_measured :] if one is not None]
    asked, hot, restored = (sum(column) for column in list(zip(*served, strict=True))[:3])
    first_token = np.array([one.first_token_s for one in served])
    code_nbytes = setup.cost.code_bytes_per_token * setup.block_tokens
    return Result(
        policy=run.label,
        hot_blocks=setup.hot_blocks,
        cold_blocks=setup.cold_blocks,
        hot_tokens=setup.hot_blocks * setup.block_tokens,
        cold_tokens=setup.cold_blocks * setup.block_tokens,
        requests=len(served),
        asked_blocks=asked,
        hot_share=hot / asked,
        restored_share=restored / asked,
        recomputed_share=(asked - hot - restored) / asked,
        best_share=best / asked,
        first_token_mean_s=float(first_token.mean()),
        first_token_p99_s=float(np.percentile(first_token, 99)),
        evictions=tally.evictions,
        blocks_out=tally.moved_out,
        bytes_out=round(tally.moved_out * code_nbytes),
        blocks_in=tally.moved_in,
        bytes_in=round(tally.moved_in * code_nbytes),
        dropped_blocks=tally.dropped,
        peak_hot_blocks=tally.peak_hot,
        peak_cold_blocks=tally.peak_cold,
        replay_s=seconds,
    )


def run_all(
    path: Path,
    trace: Trace,
    runs: Sequence[Run],
    jobs: int,
    progress: Callable[[int], None] = lambda _: None,
    check: bool = False,
) -> list[Result]:
    """The results in the order of the runs, which take place in up to `jobs` processes at a time.

    path: where the trace was read; each process reads it again. progress: called now and then with the number of
    requests replayed so far, of all runs together. check: as in `replay`; the IntegrityError names the run.
    """
    totals = {_total(run): run.setup for run in runs}
    spawn = multiprocessing.get_context("spawn")  # a progress bar's thread does not survive a fork
    counts = spawn.Array(c_uint64, len(runs))
    workers = min(jobs, len(runs))
    begin = partial(_begin, path, trace.block_tokens, counts)
    with (
        ThreadPoolExecutor(1, initializer=begin)
        if workers == 1
        else ProcessPoolExecutor(workers, spawn, initializer=begin) as executor
    ):
        replays = [executor.submit(_replay, number, run, check) for number, run in enumerate(runs)]
        best = {total: executor.submit(_best, total, setup) for total, setup in totals.items()}
        pending: set[Future[Any]] = {*replays, *best.values()}
        while pending:
            ended, pending = wait(pending, LOOK_EVERY_S, return_when=FIRST_EXCEPTION)
            progress(sum(counts[:]))
            for future in ended:
                if future.exception() is not None:
                    executor.shutdown(wait=False, cancel_futures=True)
                future.result()
    return [
        result_of(run, future.result(), best[_total(run)].result()) for run, future in zip(runs, replays, strict=True)
    ]


def _total(run: Run) -> int:
    return run.setup.hot_blocks + run.setup.cold_blocks


# -- in a process ---------------------------------------------------------------------------------------

_requests: list[TracedRequest] = []
_block_tokens = 0
_counts: Any = None


def _begin(path: Path, block_tokens: int, counts: Any) -> None:
    global _requests, _block_tokens, _counts
    _requests, _block_tokens, _counts = read_trace(path, block_tokens).requests, block_tokens, counts
    spare_collector()


def _replay(number: int, run: Run, check: bool) -> tuple[Tally, float]:
    began = time.monotonic()

    def progress(count: int) -> None:
        _counts[number] = count

    try:
        return replay(_requests, run.setup, progress, check=check), time.monotonic() - began
    except IntegrityError as error:
        setup = run.setup
        raise IntegrityError(
            f"{run.label} with {setup.hot_blocks} hot and {setup.cold_blocks} cold blocks, {error}"
        ) from None


def _best(total: int, setup: Setup) -> int:
    return belady(_requests, _block_tokens, total, setup.first_measured)
