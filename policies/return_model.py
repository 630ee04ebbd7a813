"""When does a session come back? Proportional hazards of its return, learned online.

The hazard of a session's return at age t (seconds since its last use) is modelled as base_k(t) · exp(Σ w_f[bucket]): a
curve over age, and a factor for what is known of the session, feature by feature. There are a few curves, for kinds k
of sessions by the pause before their last request: whoever was back after four seconds will be soon or not at all. All
are estimated from the last few thousand requests, recent ones counting more: events (it came back) over exposure (it
was waited for), as in Poisson regression with piecewise exponential lifetimes (Friedman, "Piecewise Exponential Models
for Survival Data with Covariates", Annals of Statistics 1982). Sessions that never return count as exposure, so the
model learns which do not.
"""

import math
from array import array
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
"""Seconds after which nobody is waited for."""
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
"""What is known of a session: the upper ends, included, of each feature's buckets but the last."""
_ENDS = tuple(FEATURES.values())
GAP = list(FEATURES).index("seconds between its last two requests")
SAID = list(FEATURES).index("seconds after which the client said it would be back")
KIND_OF_GAP = (0, 1, 1, 1, 2, 2, 3, 3, 3, 3)
"""Which curve a session's return follows, by the bucket of that feature: there was none, 10 s, a minute, or more."""
KIND_OF_SAID = (None, 4, 4, 4, 5, 5, 6, 6)
"""And where the client said when it would be back: in 10 s, a minute, or more."""
KINDS = 7
HALF_LIVES = 4
"""A request counts half as much after so many parts of the window."""
FITS = 16
"""As many estimates are made while the requests in the window are replaced."""


def kind_of(known: Sequence[int]) -> int:
    """Which curve the return follows of a session with these buckets."""
    said = KIND_OF_SAID[known[SAID]]
    return KIND_OF_GAP[known[GAP]] if said is None else said


_KIND_OF = np.array([[kind if kind is not None else gap for kind in KIND_OF_SAID] for gap in KIND_OF_GAP])


def said_s(session: SessionView) -> float | None:
    """For how long it said it would be away; None if it did not."""
    return None if session.expected is None else max(0.0, session.expected - session.last_used)


def buckets(session: SessionView, kept: float = -1.0) -> tuple[int, ...]:
    """The bucket of each feature. kept: the last pause in parts of what the client had said; -1 if it had not."""
    requests, added, answer, pause, tokens, left, said, held = _ENDS
    away = said_s(session)
    return (
        bisect_left(requests, session.uses),
        bisect_left(added, session.added_tokens),
        bisect_left(answer, session.answer_tokens),
        bisect_left(pause, -1.0 if session.gap is None else session.gap),
        bisect_left(tokens, session.tokens),
        bisect_left(left, session.left_tokens),
        bisect_left(said, -1.0 if away is None else away),
        bisect_left(held, kept),
    )


class _Last(NamedTuple):
    """A session's last request: its number, `uses` then, what the client said of the pause that follows, and how the
    pause before was to what had been said of that, as in `buckets`."""

    number: int
    uses: int
    said: float | None
    kept: float


NOBODY = _Last(-1, 0, None, -1.0)


class _Window:
    """The last requests in a ring of `size`: what was known [size, features], when each began and returned (NaN: not
    yet) and what it counts for [size]. Arrays of plain numbers, as these are written one by one."""

    def __init__(self, size: int) -> None:
        self._known = bytearray(size * len(FEATURES))
        self.began, self.weight = array("d", bytes(8 * size)), array("d", bytes(8 * size))
        self.returned = array("d", [math.nan]) * size

    def put(self, slot: int, known: tuple[int, ...], began: float, weight: float) -> None:
        self._known[slot * len(known) : (slot + 1) * len(known)] = bytes(known)
        self.began[slot], self.weight[slot], self.returned[slot] = began, weight, math.nan

    def first(self, n: int) -> tuple[NDArray[np.int64], Floats, Floats, Floats]:
        """Copies of the first `n` rows: known, began, returned, weight."""
        known = np.frombuffer(self._known, np.uint8).reshape(-1, len(FEATURES))[:n].astype(np.int64)
        return known, np.array(self.began[:n]), np.array(self.returned[:n]), np.array(self.weight[:n])


class ReturnModel:
    """Learns from requests as they come, and says how likely a return is.

    window: how many requests it learns from. refit_every: requests between two estimates, or a sixteenth of those that
    it learns from if that is more, so that an estimate costs a request the same however many there are. prior: events
    that each factor is taken to have seen at the average rate, which pulls what is rare towards 1.
    """

    def __init__(self, window: int, refit_every: int, prior: float) -> None:
        self._refit_every, self._prior = refit_every, prior
        self._window, self._size = _Window(window), window
        self._count = 0
        self._next_fit = refit_every
        self._open: dict[str, _Last] = {}
        self._begins = np.array((0.0, *AGES))
        self._widths = np.array((*AGES, HORIZON)) - self._begins
        self.base: Floats = np.tile(1 / np.array((*AGES, HORIZON)), (KINDS, 1))
        """Returns per second of a session whose factors are all 1, [kinds, pieces of age]."""
        self.weights = [np.zeros(len(ends) + 1) for ends in FEATURES.values()]
        """The logarithm of each bucket's factor."""
        self._logs: list[list[float]] = [weights.tolist() for weights in self.weights]  # plain numbers are read faster
        self.version = 0
        """How often it was estimated."""
        self._table: tuple[int, list[list[float]]] = -1, []

    def log_factor(self, known: tuple[int, ...]) -> float:
        """Σ w_f of a session."""
        total = 0.0
        for logs, bucket in zip(self._logs, known, strict=True):
            total += logs[bucket]
        return total

    def buckets(self, session: SessionView) -> tuple[int, ...]:
        """The bucket of each feature, with what the client said of earlier pauses."""
        return buckets(session, self._kept(session))

    def _kept(self, session: SessionView) -> float:
        last = self._open.get(session.session_id, NOBODY)
        if last.uses == session.uses:
            return last.kept
        return -1.0 if last.said is None or session.gap is None else session.gap / max(last.said, 1.0)

    def observe(self, session: SessionView, known: tuple[int, ...]) -> None:
        """A request of the session ended. What is told again of the same request only corrects what is known."""
        last = self._open.get(session.session_id, NOBODY)
        number, is_new = last.number, last.uses != session.uses
        if is_new and number >= self._count - self._size and session.gap is not None:
            slot = number % self._size
            self._window.returned[slot] = self._window.began[slot] + session.gap
        if is_new:
            number = self._count
            self._count += 1
        if is_new or session.expected is not None:
            self._open[session.session_id] = _Last(number, session.uses, said_s(session), self._kept(session))
            if len(self._open) > 2 * self._size:
                oldest = self._count - self._size
                self._open = {key: entry for key, entry in self._open.items() if entry.number >= oldest}
        if number < self._count - self._size:
            return
        slot = number % self._size
        weight = max(1, session.tokens) ** 0.5  # long ones matter more, but not as their size
        self._window.put(slot, known, session.last_used, weight)
        if is_new and self._count >= self._next_fit:
            self._fit(session.last_used)
            self._next_fit = self._count + max(self._refit_every, min(self._count, self._size) // FITS)

    def _fit(self, now: float) -> None:
        """Two rounds of: the curves given the factors, each factor given the curves and the others."""
        n, pieces = min(self._count, self._size), len(self._widths)
        known, began, returned, weight = self._window.first(n)
        ago = (self._count - 1 - np.arange(n)) % self._size
        weight *= 0.5 ** (ago * HALF_LIVES / self._size) / weight.mean()
        came = ~np.isnan(returned)
        age = np.where(came, returned, now) - began
        kind = _KIND_OF[known[:, GAP], known[:, SAID]]
        cell = kind[came] * pieces + np.searchsorted(AGES, age[came], side="left")
        events = np.bincount(cell, weight[came], KINDS * pieces).reshape(KINDS, pieces)
        exposure = np.clip(age[:, None] - self._begins, 0, self._widths) * weight[:, None]
        is_kind = np.equal.outer(np.arange(KINDS), kind).astype(float)
        log_factor = np.sum([weights[known[:, f]] for f, weights in enumerate(self.weights)], axis=0)
        for _ in range(2):
            waited = (is_kind * np.exp(log_factor)) @ exposure
            # As if two returns had been seen in each piece at the rate of one per age, which any scale of time has.
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

    def table(self, log_factors: Floats) -> list[list[float]]:
        """The index, row by row, smoothed so that it rises with age to one peak and then falls. All places share it."""
        if self._table[0] != self.version:
            self._table = self.version, _with_one_peak(self.index(log_factors)).reshape(-1, len(self._widths)).tolist()
        return self._table[1]

    def index(self, log_factors: Floats) -> Floats:
        """The Gittins index of waiting, [kinds, factors, pieces of age]: returns per second of room.

        That is, if one stops when it is best, max over τ of P(return within τ) / E[seconds until the return or τ], from
        where each piece begins (Gittins, "Bandit Processes and Dynamic Allocation Indices", JRSS B 1979).
        """
        hazard = self.base[:, None] * np.exp(log_factors)[:, None]
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
