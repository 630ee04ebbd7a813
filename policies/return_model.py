"""Model of when sessions return: proportional hazards, learned online.

The hazard of a session's return at age t (seconds since its last use) is base_k(t) · exp(Σ w_f[bucket]): a curve over
age, and a factor for each known feature of the session. There are a few curves, for kinds k of sessions by the pause
before their last request: a session that returned after four seconds returns soon or not at all. All are estimated
from the last few thousand requests, of which recent ones count more. An estimate is events (returns) over exposure
(waiting time), as in Poisson regression with piecewise exponential lifetimes (Friedman, "Piecewise Exponential Models
for Survival Data with Covariates", Annals of Statistics 1982). Sessions that never return count as exposure, so that
the model learns to recognize them.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from manthan.policies.base import SessionView

Floats = NDArray[np.float64]

AGES = (2, 5, 8, 12, 20, 30, 40, 50, 60, 75, 90, 105, 120, 150, 180, 240, 300, 400, 520, 690, 1100, 2000)
"""Seconds at which one piece of the base curve ends and the next begins."""
HORIZON = 4 * 3600.0
"""Age in seconds after which the model no longer waits for a session."""
FEATURES: dict[str, tuple[float, ...]] = {
    "requests so far": (1, 2, 3, 4, 6, 9, 14, 24),
    "tokens that its last request added": (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768),
    "tokens of the last answer": (2, 6, 20, 60, 150, 300, 500, 700, 1000),
    "seconds between its last two requests": (-1, 2, 5, 10, 30, 60, 120, 240, 480),
    "tokens": (1024, 2048, 4096, 8192, 16384, 32768, 65536),
    "tokens of earlier turns that its last request changed": (0,),
    "seconds after which the client said it would be back": (-1, 2, 5, 10, 30, 60, 300),
    "its last pause, in parts of what the client had said": (-1, 0.5, 2),
}
"""Features of a session: the upper ends, included, of each feature's buckets but the last."""
GAP = list(FEATURES).index("seconds between its last two requests")
SAID = list(FEATURES).index("seconds after which the client said it would be back")
KIND_OF_GAP = (0, 1, 1, 1, 2, 2, 3, 3, 3, 3)
"""Curve by the bucket of the gap: none, up to 10 s, up to a minute, longer."""
KIND_OF_SAID = (None, 4, 4, 4, 5, 5, 6, 6)
"""Curve by the bucket of the announced return, where there is one: up to 10 s, up to a minute, later."""
KINDS = 7
STEP, LEVELS = 0.5, 17
LOG_FACTORS: Floats = STEP * np.arange(-(LEVELS // 2), LEVELS // 2 + 1, dtype=np.float64)
"""Levels that sessions are kept by: logarithms of their factor, in steps."""
HALF_LIVES = 4
"""A request counts half as much after this part of the window."""
FITS = 16
"""Estimates while all requests in the window are replaced, at most."""
_KIND_OF = np.array([[gap if said is None else said for said in KIND_OF_SAID] for gap in KIND_OF_GAP])


def kind_of(known: Sequence[int]) -> int:
    """Curve of a session with these buckets."""
    return int(_KIND_OF[known[GAP], known[SAID]])


def said_s(session: SessionView) -> float | None:
    """Seconds for which the client said it would be away; None if it said nothing."""
    return None if session.expected is None else max(0.0, session.expected - session.last_used)


class LastRequest(NamedTuple):
    """A session's last request: its number, the session's `uses`, the announced pause behind it, and the kept part.

    kept: the pause before it in parts of the announced one; -1 if none was announced.
    """

    number: int
    uses: int
    said: float | None
    kept: float


NO_REQUEST = LastRequest(-1, 0, None, -1.0)


class ReturnModel:
    """Chance of a return, learned from requests as they come.

    Args:
        window: number of requests to learn from.
        refit_every: requests between two estimates, or a sixteenth of the requests in the window if that is more.
            An estimate so costs a request the same in any window.
        prior: events at the average rate that are added to each factor, which pulls rare ones towards 1.
    """

    def __init__(self, window: int, refit_every: int, prior: float) -> None:
        self._refit_every, self._prior, self._size = refit_every, prior, window
        self._known = np.zeros((window, len(FEATURES)), np.uint8)
        self._began, self._returned, self._weight = np.zeros(window), np.full(window, np.nan), np.zeros(window)
        """Requests in a ring: buckets, begin, time of the return (NaN: none yet), and weight."""
        self._count = 0
        self._next_fit = refit_every
        self._open: dict[str, LastRequest] = {}
        self._begins = np.array((0.0, *AGES))
        self._widths = np.array((*AGES, HORIZON)) - self._begins
        self.base: Floats = np.tile(1 / np.array((*AGES, HORIZON)), (KINDS, 1))
        """Returns per second of a session whose factors are all 1, [kinds, pieces of age]."""
        self.weights = [np.zeros(len(ends) + 1) for ends in FEATURES.values()]
        """Logarithm of each bucket's factor."""
        self._logs: list[list[float]] = [weights.tolist() for weights in self.weights]  # plain numbers are read faster
        self.version = 0
        """Number of estimates so far."""
        self._table: tuple[int, list[list[float]]] = -1, []

    def log_factor(self, known: tuple[int, ...]) -> float:
        """Σ w_f of a session with these buckets."""
        return sum(logs[bucket] for logs, bucket in zip(self._logs, known, strict=True))

    def buckets(self, session: SessionView) -> tuple[int, ...]:
        """Bucket of each feature of a session."""
        away = said_s(session)
        values = (
            session.uses,
            session.added_tokens,
            session.answer_tokens,
            -1.0 if session.gap is None else session.gap,
            session.tokens,
            session.left_tokens,
            -1.0 if away is None else away,
            self._kept(session),
        )
        return tuple(map(bisect_left, FEATURES.values(), values))

    def _kept(self, session: SessionView) -> float:
        last = self._open.get(session.session_id, NO_REQUEST)
        if last.uses == session.uses:
            return last.kept
        return -1.0 if last.said is None or session.gap is None else session.gap / max(last.said, 1.0)

    def observe(self, session: SessionView, known: tuple[int, ...]) -> None:
        """Learn from a request that ended. A second call for the same request only corrects its facts."""
        last = self._open.get(session.session_id, NO_REQUEST)
        number, is_new = last.number, last.uses != session.uses
        if is_new and number >= self._count - self._size and session.gap is not None:
            self._returned[number % self._size] = self._began[number % self._size] + session.gap
        if is_new:
            number = self._count
            self._count += 1
        if is_new or session.expected is not None:
            self._open[session.session_id] = LastRequest(number, session.uses, said_s(session), self._kept(session))
            if len(self._open) > 2 * self._size:
                oldest = self._count - self._size
                self._open = {key: entry for key, entry in self._open.items() if entry.number >= oldest}
        if number < self._count - self._size:
            return
        slot = number % self._size
        self._known[slot], self._began[slot], self._returned[slot] = known, session.last_used, np.nan
        self._weight[slot] = max(1, session.tokens) ** 0.5  # long ones matter more, but not as their size
        if is_new and self._count >= self._next_fit:
            self._fit(session.last_used)
            self._next_fit = self._count + max(self._refit_every, min(self._count, self._size) // FITS)

    def _fit(self, now: float) -> None:
        """Estimate twice: the curves given the factors, then each factor given the curves and the others."""
        n, pieces = min(self._count, self._size), len(self._widths)
        known, returned = self._known[:n].astype(np.int64), self._returned[:n]
        ago = (self._count - 1 - np.arange(n)) % self._size
        weight = self._weight[:n] * (0.5 ** (ago * HALF_LIVES / self._size) / self._weight[:n].mean())
        came = ~np.isnan(returned)
        age = np.where(came, returned, now) - self._began[:n]
        kind = _KIND_OF[known[:, GAP], known[:, SAID]]
        cell = kind[came] * pieces + np.searchsorted(AGES, age[came], side="left")
        events = np.bincount(cell, weight[came], KINDS * pieces).reshape(KINDS, pieces)
        exposure = np.clip(age[:, None] - self._begins, 0, self._widths) * weight[:, None]
        is_kind = np.equal.outer(np.arange(KINDS), kind).astype(float)
        log_factor = np.sum([weights[known[:, f]] for f, weights in enumerate(self.weights)], axis=0)
        for _ in range(2):
            waited = (is_kind * np.exp(log_factor)) @ exposure
            # Two returns in each piece at the rate of one per age, which any scale of time has.
            prior = 2 * (self._begins + self._widths).clip(30)
            mean = (events.sum(axis=0) + 2) / (waited.sum(axis=0) + prior)
            self.base = mean * (events + self._prior) / (mean * waited + self._prior)
            expected = (exposure @ self.base.T)[np.arange(n), kind]
            for f, weights in enumerate(self.weights):
                others = np.exp(log_factor - weights[known[:, f]]) * expected
                seen = np.bincount(known[came, f], weight[came], len(weights))
                due = np.bincount(known[:, f], others, len(weights))
                new = np.log((seen + self._prior) / (due + self._prior))
                log_factor += (new - weights)[known[:, f]]
                self.weights[f] = new
        self._logs = [weights.tolist() for weights in self.weights]
        self.version += 1

    def table(self) -> list[list[float]]:
        """Index by kind and level, in pieces of age, smoothed to one peak. All places share it."""
        if self._table[0] != self.version:
            self._table = self.version, _with_one_peak(self.index()).reshape(-1, len(self._widths)).tolist()
        return self._table[1]

    def index(self) -> Floats:
        """Gittins index of waiting from the begin of each piece of age, [kinds, levels, pieces].

        Returns per second of room, if waiting stops at the best moment: max over τ of P(return within τ) /
        E[seconds until the return or τ] (Gittins, "Bandit Processes and Dynamic Allocation Indices", JRSS B 1979).
        """
        hazard = self.base[:, None] * np.exp(LOG_FACTORS)[:, None]
        returns = 1 - np.exp(-hazard * self._widths)
        waited = returns / hazard
        index: Floats = np.zeros_like(hazard)
        for begin in range(len(self._widths)):
            waiting = np.ones_like(returns[..., begin:])
            np.cumprod(1 - returns[..., begin:-1], axis=-1, out=waiting[..., 1:])
            gain = np.cumsum(waiting * returns[..., begin:], axis=-1)
            cost = np.cumsum(waiting * waited[..., begin:], axis=-1)
            index[..., begin] = (gain / cost).max(axis=-1)
        return index


def _with_one_peak(index: Floats) -> Floats:
    is_behind = np.arange(index.shape[-1]) >= index.argmax(axis=-1)[..., None]
    falling = np.minimum.accumulate(np.where(is_behind, index, np.inf), axis=-1)
    return np.where(is_behind, falling, np.maximum.accumulate(index, axis=-1))
