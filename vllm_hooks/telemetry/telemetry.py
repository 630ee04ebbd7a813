"""Events of an engine, told to metrics, to the log, to histories of sessions, and to traces if these are on."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from manthan.manager.events import (
    BlocksDropped,
    BlocksSaved,
    EncodingBegins,
    Event,
    Evicted,
    Judged,
    LookedUp,
    Lost,
    Overwritten,
    PrefetchHit,
    Restored,
    StoreFailed,
    StoreIsUp,
    Turn,
    Unjudged,
)
from manthan.manager.lives import Lives
from manthan.manager.session.hints import Hints
from manthan.manager.session.manager import Outcome, SessionManager
from manthan.manager.sparing import Sparing
from manthan.vllm_hooks.telemetry.log import logger, tell_eviction, tell_restore, tell_verdict
from manthan.vllm_hooks.telemetry.metrics import ManthanStats
from manthan.vllm_hooks.telemetry.traces import Traces

if TYPE_CHECKING:
    from vllm.v1.request import Request

QUIET_S = 60.0
"""Seconds after a cause of failures was logged in which it is not logged again."""
TOTALS = ("evictions", "restores", "prefetches", "failures", "restored_tokens", "computed_tokens")


class Telemetry:
    """Metrics, log, traces and histories of one engine. Subscribes to its stream of events.

    Args:
        traces: None if tracing is off.
        lives: histories of sessions; None if nobody may ask for them.
    """

    def __init__(self, manager: SessionManager, traces: Traces | None = None, lives: Lives | None = None) -> None:
        self._manager, self.traces, self.lives = manager, traces, lives
        self.totals = dict.fromkeys(TOTALS, 0)
        """Numbers since the start."""
        self._stats = StatsRecorder(manager)
        self._failures = Sparing(QUIET_S)
        self.changed: set[str] = set()
        """Ids of sessions whose blocks came or went since the scheduler half looked."""
        manager.events.subscribe(self)
        if lives is not None:
            manager.events.subscribe(lives)

    def take(self) -> ManthanStats | None:
        """Return metrics since the last call, for vLLM to carry to where they are shown."""
        return self._stats.take()

    def watch(self, held: Callable[[], Sequence[float]]) -> None:
        """Show how many requests are held back. held: returns the seconds for which each has waited."""
        self._stats.held = held

    # -- calls of the scheduler half ------------------------------------------------------------------

    def began(self, request: "Request") -> None:
        """Note that a request came."""
        if self.traces is not None:
            self.traces.began(request.request_id, request.trace_headers)

    def failed(self, call: str) -> None:
        """Note that an exception was caught in this call of vLLM's."""
        self._stats.count("errors", label=call)

    def hinted(self, hints: Hints) -> None:
        """Note that a request came with these hints."""
        if hints.given:
            self._stats.count_all("hints", hints.given)

    def ended(self, request: "Request", outcome: Outcome | None) -> None:
        """Note that a request ended. outcome: answer to its hints."""
        if self.traces is not None:
            self.traces.ended(request.request_id)
        if outcome is not None and outcome.refused:
            self._stats.count("pins_refused")

    def computed(self, tokens: int) -> None:
        """Note a number of prompt tokens that were neither resident nor loaded."""
        self.totals["computed_tokens"] += tokens

    # -- events ---------------------------------------------------------------------------------------

    def __call__(self, event: Event) -> None:
        """Take an event of the stream."""
        stats = self._stats
        if isinstance(event, Turn | Evicted | Restored | Lost):
            self.changed.add(event.session_id)
        match event:
            case Turn(lossy=lossy) if lossy:
                stats.count("lossy_tokens", lossy)
            case Evicted():
                self._evicted(event)
            case Restored():
                self._restored(event)
            case EncodingBegins(marks):
                stats.count_all("encodings", [mark.name.lower() for mark in marks])
            case BlocksSaved(block_hashes=hashes, seconds=seconds) if seconds is not None:
                stats.count("encoded_blocks", len(hashes))
                for _ in hashes:
                    stats.observe("encode_seconds", seconds)
            case BlocksDropped(block_hashes=hashes, cause=cause):
                stats.count("dropped_blocks", len(hashes), str(cause))
            case StoreFailed(causes):
                stats.count_all("failures", causes)
                self.totals["failures"] += len(causes)
                for why in causes:
                    if count := self._failures.due(why):
                        logger.warning("Manthan: blocks could not be stored (%s): %d", why, count)
            case Overwritten(blocks):
                stats.count("overwritten_blocks", blocks)
            case PrefetchHit():
                stats.count("prefetch_hits")
            case LookedUp(session_id, outcome):
                stats.count("lookups", label=outcome)
                if outcome == "found":
                    self.changed.add(session_id)
            case StoreIsUp(is_up):
                stats.store_is_up = is_up
            case Judged():
                stats.judged = event
                if event.is_new:
                    tell_verdict(event)
            case Unjudged():
                stats.judged = None

    def _evicted(self, event: Evicted) -> None:
        self._stats.count("evictions")
        self._stats.observe("encode_bytes", event.stored_nbytes)
        self.totals["evictions"] += 1
        tell_eviction(event)
        if self.traces is not None:
            self.traces.evicted(event)

    def _restored(self, event: Restored) -> None:
        stats, shape = self._stats, self._manager.shape
        if event.request_id is None:
            stats.count("prefetches")
            stats.count("prefetched_blocks", event.good + event.beside)
            self.totals["prefetches"] += 1
        else:
            stats.count("restores")
            stats.count("restored_blocks", event.good + event.beside)
            stats.observe("restore_seconds", event.seconds)
            stats.observe("restore_bytes", event.nbytes)
            self.totals["restores"] += 1
            self.totals["restored_tokens"] += event.good * shape.block_tokens
        stats.count_all("failures", event.causes)
        self.totals["failures"] += len(event.causes)
        tell_restore(event, shape)
        if self.traces is not None:
            self.traces.restored(event, shape)

    # -- what the HTTP API asks -----------------------------------------------------------------------

    @property
    def store_is_up(self) -> bool:
        """True if the cold store answers."""
        return self._stats.store_is_up

    @property
    def verdict(self) -> str:
        """Verdict of the guard on the configured codec: none (yet), faithful, slow or unfaithful."""
        found = self._stats.judged
        if found is None:
            return "none"
        return "faithful" if not found.choice else "slow" if found.is_slow else "unfaithful"


class StatsRecorder:
    """Counters, gauges and observations of the scheduler half, until vLLM fetches them."""

    def __init__(self, manager: SessionManager) -> None:
        self._manager = manager
        self._counters: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._observations: defaultdict[str, list[float]] = defaultdict(list)
        self.store_is_up = True
        self.held: Callable[[], Sequence[float]] = tuple
        """Returns the seconds for which each request has waited that is held back."""
        self.judged: Judged | None = None
        """What the guard has decided last."""
        self._sent_gauges: dict[str, dict[str, float]] = {}

    def count(self, name: str, by: int = 1, label: str = "") -> None:
        """Add to a counter of METRICS."""
        self._counters[name][label] += by

    def count_all(self, name: str, labels: Iterable[str]) -> None:
        """Add 1 to a counter for each label."""
        self._counters[name].update(labels)

    def observe(self, name: str, value: float) -> None:
        """Add to a histogram of METRICS."""
        self._observations[name].append(value)

    def take(self) -> ManthanStats | None:
        """Return the statistics since the last call; None if nothing happened."""
        gauges = self._gauges()
        if not self._counters and gauges == self._sent_gauges:
            return None
        data = {
            "gauges": gauges,
            "counters": {name: dict(values) for name, values in self._counters.items() if values},
            "observations": dict(self._observations),
        }
        self._sent_gauges = gauges
        self._counters, self._observations = defaultdict(Counter), defaultdict(list)
        return ManthanStats(data=data)

    def _gauges(self) -> dict[str, dict[str, float]]:
        usage, shape = self._manager.usage(), self._manager.shape
        held = self.held()
        ratio = usage.pool_nbytes / usage.saved_nbytes if usage.saved_nbytes else shape.ratio
        return {
            "sessions": {str(state): count for state, count in usage.sessions.items()},
            "anchors": {"": usage.points},
            "hot_bytes": {"": usage.unsaved_blocks * shape.pool_nbytes},
            "cold_bytes": {"": usage.saved_nbytes},
            "exact_blocks": {"": usage.exact_blocks},
            "cold_budget_bytes": {"": usage.budget_nbytes},
            "held_requests": {"": len(held)},
            "held_seconds": {"": float(round(max(held, default=0.0)))},
            "cold_store_up": {"": float(self.store_is_up)},
            "compression_ratio": {"": round(ratio, 4)},
            "codec_noise": _noise(self.judged),
            "codec_fallback": {"": float(self.judged is not None and self.judged.choice > 0)},
        }


def _noise(judged: Judged | None) -> dict[str, float]:
    """Return the noise of the configured codec; nothing before it was measured."""
    if judged is None:
        return {}
    of = judged.verdict.measured[0]
    noise = {
        "logits": of.logit_noise.mean(),
        "worst_layer": of.logit_noise.max(),
        "values": of.value_noise.max(),
    }
    return {name: round(float(value), 6) for name, value in noise.items()}
