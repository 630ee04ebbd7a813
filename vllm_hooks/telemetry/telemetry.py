"""Subscriber to an engine's events. Feeds metrics, the log and traces from the events, and subscribes histories."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

from vllm.v1.request import Request

from manthan.manager import events
from manthan.manager.events import FIRST_BLOCKS, Event, Evicted, Judged, Restored
from manthan.manager.histories import Histories
from manthan.manager.session.hints import Hints
from manthan.manager.session.manager import Outcome, SessionManager
from manthan.manager.session.persist import WAIT_S
from manthan.manager.sparing import Sparing
from manthan.vllm_hooks.telemetry.log import logger, printable, tell_eviction, tell_restore, tell_verdict
from manthan.vllm_hooks.telemetry.metrics import ManthanStats
from manthan.vllm_hooks.telemetry.traces import Traces

QUIET_S = 60.0
"""Least seconds between two log lines about stores that failed by the same cause."""
TOTALS = (
    *("evictions", "restores", "prefetches", "failures", "restore_ms"),
    *("prompt_tokens", "restored_tokens", "computed_tokens", "lossy_tokens"),
    *("returns", "return_resident_tokens", "return_restored_tokens", "return_recomputed_tokens"),
)


class Telemetry:
    """Metrics, log, traces and histories of an engine. Subscribes to the engine's stream of events.

    traces: None if tracing is off. histories: last events of each session; None if the HTTP API is off.
    """

    def __init__(
        self, manager: SessionManager, traces: Traces | None = None, histories: Histories | None = None
    ) -> None:
        self._manager, self.traces, self.histories = manager, traces, histories
        self.totals = dict.fromkeys(TOTALS, 0)
        """Sums since the start, by the names in TOTALS."""
        self.changed: set[str] = set()
        """Ids of sessions that may have gained or lost blocks since the scheduler half last took this set."""
        self.store_is_up = True
        self.passed: Callable[[], Sequence[float]] = tuple
        """Returns the seconds waited by each waiting request that a later request has passed."""
        self._known: dict[str, int] = {}
        """By id of a running request that continues a session, number of the prompt's tokens that the session had."""
        self._brought: Counter[str] = Counter()
        """By id of such a request, number of restored tokens."""
        self._judged: Judged | None = None
        self._measured: dict[int, int] = {}
        """By rank, number of blocks that the rank's guard, which measures codecs, has taken for the first verdict."""
        self._failures = Sparing(QUIET_S)
        self._counters: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._observations: defaultdict[str, list[float]] = defaultdict(list)
        self._sent_gauges: dict[str, dict[str, float]] = {}
        manager.events.subscribe(self)
        if histories is not None:
            manager.events.subscribe(histories)

    def count(self, name: str, by: int = 1, label: str = "") -> None:
        """Add to a counter of METRICS, and to the total of the same name, if any. label: the counter's label value."""
        self._counters[name][label] += by
        if name in self.totals:
            self.totals[name] += by

    # -- calls of the scheduler half ------------------------------------------------------------------

    def began(self, request: Request, hints: Hints, known: int | None) -> None:
        """Note a new request. known: number of the prompt's tokens that its session had; None for a new session."""
        if known is not None:
            self._known[request.request_id] = known
        if hints.given:
            self._counters["hints"].update(hints.given)
        if self.traces is not None:
            self.traces.began(request.request_id, request.trace_headers)

    def ended(self, request: Request, outcome: Outcome | None, found: int, computed: int) -> None:
        """Note a request's end. found, computed: numbers of its prompt's tokens resident or loaded, and computed."""
        self.totals["computed_tokens"] += computed
        self.totals["prompt_tokens"] += request.num_prompt_tokens
        known, brought = self._known.pop(request.request_id, None), self._brought.pop(request.request_id, 0)
        restored = min(brought, found)  # after a preemption it was loaded again
        if known is not None:
            self.totals["returns"] += 1
            self.totals["return_resident_tokens"] += found - restored
            self.totals["return_restored_tokens"] += restored
            self.totals["return_recomputed_tokens"] += min(computed, max(0, known - found))
        if self.traces is not None:
            self.traces.ended(request.request_id)
        if outcome is not None and outcome.refused:
            self.count("pins_refused")

    def measured(self, blocks: Mapping[int, int], configured: str, used: str) -> None:
        """Note the number of blocks that each rank's guard has taken for the first verdict, and log each quarter.

        configured, used: names of the configured codec, and of the codec in use until the verdict.
        """
        was = self.measured_blocks
        self._measured |= blocks
        done = self.measured_blocks
        if done * 4 // FIRST_BLOCKS > was * 4 // FIRST_BLOCKS and self._judged is None:
            logger.info(f"Manthan: codec {configured} measured on {done} of {FIRST_BLOCKS} blocks; {used} until then")

    def rechecked(self, divergence: float, is_same: bool) -> None:
        self.count("rechecks")
        self.count("recheck_same_token", int(is_same))
        self._observations["recheck_divergence"].append(divergence)

    # -- events ---------------------------------------------------------------------------------------

    def __call__(self, event: Event) -> None:
        if isinstance(event, events.Turn | Evicted | Restored | events.Lost):
            self.changed.add(event.session_id)
        match event:
            case events.Turn(lossy=lossy) if lossy:
                self.count("lossy_tokens", lossy)
            case Evicted():
                self.count("evictions")
                self._observations["encode_bytes"].append(event.stored_nbytes)
                tell_eviction(event)
                if self.traces is not None:
                    self.traces.evicted(event)
            case Restored():
                self._restored(event)
            case events.Lost(session_id, left=0, cause=events.DropCause.BUDGET):
                logger.info(f"Manthan: session {printable(session_id)} is dropped for want of room in the cold store")
            case events.EncodingBegins(marks):
                self._counters["encodings"].update(mark.name.lower() for mark in marks)
            case events.Loading(levels):
                self._counters["restored_levels"].update(map(str, levels))
            case events.BlocksSaved(block_hashes=hashes, seconds=seconds) if seconds is not None:
                self.count("encoded_blocks", len(hashes))
                self._observations["encode_seconds"] += [seconds] * len(hashes)
            case events.BlocksDropped(block_hashes=hashes, cause=cause):
                self.count("dropped_blocks", len(hashes), str(cause))
            case events.BlocksTrimmed(block_hashes=hashes, level=level):
                self.count("trimmed_blocks", len(hashes), str(level))
            case events.StoreFailed(causes):
                for why in causes:
                    self.count("failures", label=why)
                    if count := self._failures.due(why):
                        logger.warning("Manthan: blocks could not be stored (%s): %d", why, count)
            case events.Overwritten(blocks):
                self.count("overwritten_blocks", blocks)
            case events.GivenUp(session_id, blocks):
                self.count("given_up_blocks", blocks)
                logger.info(
                    f"Manthan: {blocks} blocks of session {printable(session_id)} are not saved, because the tiers "
                    "are full of blocks that the policy keeps; vLLM overwrites the unsaved blocks next"
                )
            case events.PrefetchHit():
                self.count("prefetch_hits")
            case events.LookedUp(session_id, outcome):
                self.count("lookups", label=outcome)
                if outcome == "found":
                    self.changed.add(session_id)
                if outcome == "unanswered" and (count := self._failures.due(outcome)):
                    said = "Manthan: lookups that Redis did not answer within %g ms, whose prompts are computed: %d"
                    logger.warning(said, 1e3 * WAIT_S, count)
            case events.StoreIsUp(is_up):
                self.store_is_up = is_up
            case Judged() | events.Unjudged():
                self._judged = event if isinstance(event, Judged) else None
                self._measured.clear()
                if self._judged is not None and self._judged.is_new:
                    tell_verdict(self._judged)

    def _restored(self, event: Restored) -> None:
        shape = self._manager.shape
        blocks = event.at_points + (event.good if shape.stores_main else 0)
        if event.request_id is None:
            self.count("prefetches")
            self.count("prefetched_blocks", blocks)
        else:
            self.count("restores", int(event.good > 0))
            self.count("restored_blocks", blocks)
            self._observations["restore_seconds"].append(event.seconds)
            self._observations["restore_bytes"].append(event.nbytes)
            self.totals["restored_tokens"] += event.good * shape.block_tokens
            if event.request_id in self._known:
                self._brought[event.request_id] += event.good * shape.block_tokens
            self.totals["restore_ms"] += round(1e3 * event.seconds)
        for why in event.causes:
            self.count("failures", label=why)
        tell_restore(event, shape)
        if self.traces is not None:
            self.traces.restored(event, shape)

    # -- values for /metrics --------------------------------------------------------------------------

    @property
    def verdict(self) -> str:
        """The guard's verdict on the configured codec: "none" (yet), "faithful", "slow", "unfaithful"."""
        found = self._judged
        if found is None:
            return "none"
        return "faithful" if not found.is_fallback else "slow" if found.is_slow else "unfaithful"

    @property
    def measured_blocks(self) -> int:
        """Least number of blocks, of FIRST_BLOCKS, taken for the first verdict by a rank that has reported any."""
        return min(self._measured.values(), default=0)

    def take(self) -> ManthanStats | None:
        """Return the metrics since the last call; None if no counter and no gauge has changed."""
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
        usage, shape, passed = self._manager.usage(), self._manager.shape, self.passed()
        ratio = usage.pool_nbytes / usage.saved_nbytes if usage.saved_nbytes else shape.ratio
        noise: dict[str, float] = {}
        if self._judged is not None:
            of = self._judged.verdict.measured[min(self._judged.choice, self._judged.configured)]
            worst = of.logit_noise.max()
            noise = {"logits": of.logit_noise.mean(), "worst_layer": worst, "values": of.value_noise.max()}
        return {
            "sessions": {str(state): count for state, count in usage.sessions.items()},
            "resume_points": {"": usage.points},
            "hot_bytes": {"": usage.unsaved_blocks * shape.pool_nbytes},
            "cold_bytes": {"": usage.saved_nbytes},
            "exact_blocks": {"": usage.exact_blocks},
            "cold_budget_bytes": {"": usage.budget_nbytes},
            "held_requests": {"": len(passed)},
            "held_seconds": {"": float(round(max(passed, default=0.0)))},
            "cold_store_up": {"": float(self.store_is_up)},
            "compression_ratio": {"": round(ratio, 4)},
            "codec_noise": {name: round(float(value), 6) for name, value in noise.items()},
            "codec_fallback": {"": float(self._judged is not None and self._judged.is_fallback)},
        }
