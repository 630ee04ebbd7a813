"""What happens, told to metrics, to the log, to sessions' lives, and to traces where these are on."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from manthan.manager.lives import Lives
from manthan.manager.observer import Judgement, Observer, Restored
from manthan.manager.sessions.hints import Hints
from manthan.manager.sessions.manager import SessionMemoryManager
from manthan.manager.sessions.marks import Mark
from manthan.manager.sessions.session import Drop, Eviction, News, Outcome
from manthan.manager.sparing import Sparing
from manthan.vllm_hooks.telemetry.log import logger, tell_eviction, tell_restore, tell_verdict
from manthan.vllm_hooks.telemetry.metrics import ManthanStats, StatsRecorder
from manthan.vllm_hooks.telemetry.traces import Traces

if TYPE_CHECKING:
    from vllm.v1.request import Request

QUIET_S = 60.0
"""Seconds for which nothing is said of a cause after it was."""
TOTALS = ("evictions", "restores", "prefetches", "failures", "restored_tokens", "computed_tokens")


class Telemetry(Observer):
    """One engine's. traces: None where tracing is off. lives: of its sessions, if somebody may ask."""

    def __init__(self, manager: SessionMemoryManager, traces: Traces | None = None, lives: Lives | None = None) -> None:
        self._manager, self.traces, self.lives = manager, traces, lives
        self.totals = dict.fromkeys(TOTALS, 0)
        """Since the start."""
        self._stats = StatsRecorder(manager)
        self._failures = Sparing(QUIET_S)
        self.changed: set[str] = set()
        """Ids of sessions whose blocks came or went since the scheduler half looked."""

    def take(self) -> ManthanStats | None:
        """Metrics since the last call, for vLLM to carry to where they are shown."""
        return self._stats.take()

    def began(self, request: "Request") -> None:
        """A request came."""
        if self.traces is not None:
            self.traces.began(request.request_id, request.trace_headers)

    def failed(self, call: str) -> None:
        """An exception was caught in this call of vLLM's."""
        self._stats.count("errors", label=call)

    def hinted(self, hints: Hints) -> None:
        """A request came with these hints."""
        if hints.given:
            self._stats.count_all("hints", hints.given)

    def ended(self, request: "Request", outcome: Outcome | None) -> None:
        """A request ended, and this came of its hints."""
        if self.traces is not None:
            self.traces.ended(request.request_id)
        if outcome is not None and outcome.refused:
            self._stats.count("pins_refused")

    def computed(self, tokens: int) -> None:
        """So many tokens of a prompt were neither hot nor restored."""
        self.totals["computed_tokens"] += tokens

    @property
    def store_is_up(self) -> bool:
        return self._stats.store_is_up

    def judged(self, judgement: Judgement | None) -> None:
        self._stats.judgement = judgement
        if judgement is not None and judgement.is_new:
            tell_verdict(judgement)

    @property
    def verdict(self) -> str:
        """Verdict of the guard on the configured codec: none (yet), faithful, slow or unfaithful."""
        found = self._stats.judgement
        if found is None:
            return "none"
        return "faithful" if not found.place else "slow" if found.is_slow else "unfaithful"

    def stored(self, blocks: int, seconds: float) -> None:
        self._stats.count("encoded_blocks", blocks)
        for _ in range(blocks):
            self._stats.observe("encode_seconds", seconds)

    def encodes(self, marks: Sequence[Mark]) -> None:
        self._stats.count_all("encodings", [mark.name.lower() for mark in marks])

    def served_lossy(self, tokens: int) -> None:
        if tokens:
            self._stats.count("lossy_tokens", tokens)

    def not_stored(self, causes: Collection[str]) -> None:
        self._stats.count_all("failures", causes)
        self.totals["failures"] += len(causes)
        for cause in causes:
            if count := self._failures.due(cause):
                logger.warning("Manthan: blocks could not be stored (%s): %d", cause, count)

    def overwritten(self, blocks: int) -> None:
        self._stats.count("overwritten_blocks", blocks)

    def evicted(self, eviction: Eviction) -> None:
        self.changed.add(eviction.session_id)
        self._stats.count("evictions")
        self._stats.observe("encode_bytes", eviction.encoded_nbytes)
        self.totals["evictions"] += 1
        tell_eviction(eviction)
        if self.traces is not None:
            self.traces.evicted(eviction)
        if self.lives is not None:
            self.lives.evicted(eviction)

    def happened(self, news: News) -> None:
        self.changed.add(news.session_id)
        if self.lives is not None:
            self.lives.happened(news)

    def dropped(self, drop: Drop) -> None:
        self._stats.count("dropped_blocks", len(drop.keys), str(drop.cause))

    def restored(self, restored: Restored) -> None:
        self.changed.add(restored.session_id)
        if restored.is_prefetch:
            self._stats.count("prefetches")
            self._stats.count("prefetched_blocks", restored.good + restored.beside)
        else:
            self._stats.count("restores")
            self._stats.count("restored_blocks", restored.good + restored.beside)
            self._stats.observe("restore_seconds", restored.seconds)
            self._stats.observe("restore_bytes", restored.nbytes)
            self.totals["restored_tokens"] += restored.good * self._manager.shape.block_tokens
        self.totals["prefetches" if restored.is_prefetch else "restores"] += 1
        self._stats.count_all("failures", restored.causes)
        self.totals["failures"] += len(restored.causes)
        tell_restore(restored, self._manager.shape)
        if self.traces is not None:
            self.traces.restored(restored, self._manager.shape)
        if self.lives is not None:
            self.lives.restored(restored)

    def prefetch_hit(self) -> None:
        self._stats.count("prefetch_hits")

    def looked_up(self, outcome: str) -> None:
        self._stats.count("lookups", label=outcome)

    def arrived(self, session_id: str) -> None:
        self.changed.add(session_id)

    def store_answers(self, is_up: bool) -> None:
        self._stats.store_is_up = is_up
