"""Model of the time until a session returns: a piecewise exponential regression, learned online.

A session (conversation) returns when its next request comes. Its age is the seconds since its last use. The hazard at
an age is the rate of returns, per second, among the sessions still away at that age. AGES cuts age into pieces, and the
hazard is constant in each piece. In piece p the hazard is exp(β_p · x) for a session with the features x. Each piece
has coefficients of its own, because a feature tells less with age: an awaited tool mostly answers within seconds. Each
piece is a Poisson regression of the returns, with the seconds waited in the piece as exposure (Friedman, "Piecewise
Exponential Models for Survival Data with Covariates", Annals of Statistics 1982). Sessions that never return add
exposure only, so that the model learns to recognize such sessions.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import log1p
from typing import TypeAlias
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from manthan.policies.base import SessionView

Floats: TypeAlias = NDArray[np.float64]

AGES = (5, 8, 10, 12, 15, 18, 22, 27, 33, 40, 50, 60, 75, 90, 105, 120, 150, 180, 240, 300, 400, 520, 690, 1100, 2000)
"""Ages in seconds at which one piece ends and the next begins."""
HORIZON = 4 * 3600.0  # age in seconds at which the model stops waiting for a session
PIECES = len(AGES) + 1
_ENDS = np.array((*AGES, HORIZON))
SAID = (10, 60)  # seconds until an announced return: bounds between soon, in a while, and later
KEPT = (0.5, 2)  # last pause as a multiple of the announced pause: bounds between too early, as announced, and too late
ENDINGS = 8  # feature columns for `SessionView.ending`, chosen by a hash (Weinberger et al., ICML 2009)
SWITCH = 3.0  # value of the chosen column of a one-hot feature; with 1, the penalty would shrink coefficients too much
USUAL = 3.0  # assumed logarithm of the pause in seconds, for a session that has had no pause
RECENT, LASTING = 0.3, 0.06  # least weights of a new pause in a session's two moving averages; first pauses have more
HALF_LIVES = 2  # number of times that a request's weight halves until the request leaves the window
YOUNG_S = 30.0  # assumed for the first piece, in addition to what was seen: one return in this many seconds of waiting
ROUNDS = 32  # most estimates of one piece in the time in which newer requests replace the whole window
LARGEST_STEP = 1.5  # largest change of a coefficient in a step of Newton's method


@dataclass(slots=True)
class History:
    """Facts about a session's requests until now. A pause is the time between the last use and the next request."""

    number: int = -1  # of the newest request, counted over all sessions
    uses: int = 0  # `SessionView.uses` at that request
    pauses: int = 0  # number of pauses
    last: float = USUAL  # logarithm of the last pause's seconds
    recent: float = USUAL  # moving average of the pauses' logarithms
    lasting: float = USUAL  # slower moving average of the pauses' logarithms
    longest: float = USUAL  # maximum of the pauses' logarithms, which slowly falls to `lasting`
    said: float | None = None  # seconds from the last use to the announced return; None without an announcement
    kept: float = -1.0  # last pause divided by the pause announced for it; -1 without an announcement

    def add(self, pause: float) -> None:
        """Note a pause of `pause` seconds."""
        self.pauses += 1
        self.last = log = log1p(pause)
        self.recent += max(RECENT, 1 / self.pauses) * (log - self.recent)
        self.lasting += max(LASTING, 1 / (1 + self.pauses)) * (log - self.lasting)
        self.longest = log if self.pauses == 1 else max(log, self.longest + 0.1 * (self.lasting - self.longest))
        self.kept = -1.0 if self.said is None else pause / max(self.said, 1.0)


def said_s(session: SessionView) -> float | None:
    """Return the seconds from the last use to the announced return; None without an announcement."""
    return None if session.expected is None else max(0.0, session.expected - session.last_used)


def features_of(session: SessionView, history: History) -> list[float]:
    """Return the features x of a session: first the constant 1.

    A numeric feature has a mean of about 0 and a standard deviation of about 1. A feature that is true or false is 1 or
    0. The columns of a one-hot feature are 0, and SWITCH for the value that the session has.
    """
    answer, added = log1p(session.answer_tokens) / 2 - 2.5, log1p(session.added_tokens) / 2 - 3.5
    recent, tokens = history.recent - USUAL, log1p(session.tokens) / 2 - 5
    away, kept = said_s(session), history.kept
    return [
        1.0,
        answer,
        added,
        tokens,
        history.last - USUAL,
        recent,
        history.lasting - USUAL,
        history.longest - USUAL - 1,
        float(history.pauses > 0),
        log1p(session.uses) / 2 - 1.5,
        log1p(max(0.0, session.last_used - session.created)) / 2 - 3,
        answer * answer - 0.5,
        recent * recent - 0.5,
        answer * recent,
        max(0.0, added) * answer,
        float(session.left_tokens > 0),
        *_one_of(4, 0 if away is None else 1 + bisect_left(SAID, away)),
        *_one_of(4, 0 if kept < 0 else 1 + bisect_left(KEPT, kept)),
        *_one_of(ENDINGS + 1, 1 + crc32(session.ending.encode()) % ENDINGS if session.ending else 0),
    ]


def _one_of(choices: int, chosen: int) -> Sequence[float]:
    """Return a column for each choice but choice 0: SWITCH for the choice number `chosen`, 0 for the rest."""
    return [SWITCH * (choice == chosen) for choice in range(1, choices)]


class ReturnModel:
    """Hazard of a session's return, learned from requests in the order of arrival.

    Args:
        window: number of newest requests to learn from.
        refit_every: requests between two estimates of the same piece, but at least 1 / ROUNDS of those in the window,
            so that the average cost of a request does not grow with the window. The first estimate is of all pieces.
            Later the pieces take turns, so that no request waits long.
        prior: strength of the penalty. After `prior` returns with a feature of value 1, the feature's coefficient is
            about half of what it would be without the penalty.
    """

    def __init__(self, window: int, refit_every: int, prior: float) -> None:
        self._refit_every, self._prior, self._size = refit_every, prior, window
        width = len(features_of(SessionView(""), History()))
        self._x = np.zeros((window, width))
        self._began, self._returned, self._weight = np.zeros(window), np.full(window, np.nan), np.zeros(window)
        """Requests of the window, by number modulo `window`: features, time of the last use, time of the session's
        return (NaN: none yet), and weight."""
        self.count = 0  # number of requests until now
        self._open: dict[str, History] = {}
        self._begins = np.array((0.0, *AGES))
        self._widths = _ENDS - self._begins
        self.coefficients = np.zeros((PIECES, width))
        self.coefficients[:, 0] = -np.log(_ENDS)
        """Coefficients by piece. Before the first estimate, a piece's hazard is 1 / (age at its end)."""
        self._due, self._next = float(refit_every), 0  # `count` at the next estimate, and the piece to estimate
        self._last: tuple[SessionView, list[float]] = SessionView(""), []

    def observe(self, session: SessionView) -> list[float]:
        """Learn from the begin or the end of a request. Return the session's `index` in each piece of age."""
        if session == self._last[0]:  # several policies share the model, and are told of the same request
            return self._last[1]
        history = self._open.setdefault(session.session_id, History())
        if session.uses < history.uses:  # a shadow (simulated cache) may be told of a request late
            return self.index(features_of(session, history))
        if session.uses > history.uses:
            self._begin(session, history)
        if session.expected is not None:
            history.said = said_s(session)
        x = features_of(session, history)
        if history.number >= self.count - self._size:
            slot = history.number % self._size
            self._x[slot], self._began[slot], self._returned[slot] = x, session.last_used, np.nan
            self._weight[slot] = max(1, session.tokens) ** 0.5  # a long session matters more, by the root of its length
        while self.count >= self._due:
            self._estimate(session.last_used)
        self._last = session, self.index(x)
        return self._last[1]

    def _begin(self, session: SessionView, history: History) -> None:
        """Note a session's return, unless this is its first request, and number the new request."""
        if session.gap is not None:
            if history.number >= max(0, self.count - self._size):
                slot = history.number % self._size
                self._returned[slot] = self._began[slot] + session.gap
            history.add(session.gap)
        history.number, history.uses, history.said = self.count, session.uses, None
        self.count += 1
        if len(self._open) > 2 * self._size:
            oldest = self.count - self._size
            self._open = {key: one for key, one in self._open.items() if one.number >= oldest}

    def _estimate(self, now: float) -> None:
        """Take a step of Newton's method for the next piece in turn; in the first call, for all pieces."""
        is_first, n = self._due == self._refit_every, min(self.count, self._size)
        ago = (self.count - 1 - np.arange(n)) % self._size
        weight = self._weight[:n] * (0.5 ** (ago * HALF_LIVES / self._size) / self._weight[:n].mean())
        came = ~np.isnan(self._returned[:n])
        age = np.where(came, self._returned[:n], now) - self._began[:n]
        for piece in range(PIECES) if is_first else (self._next,):
            begin, width = self._begins[piece], self._widths[piece]
            at_risk = np.nonzero(age > begin if piece else age >= begin)[0]
            x, waited = self._x[at_risk], np.minimum(age[at_risk] - begin, width) * weight[at_risk]
            events = weight[at_risk] * (came[at_risk] & (age[at_risk] <= begin + width))
            self.coefficients[piece] += self._step(piece, x, events, waited)
        self._next = (self._next + 1) % PIECES
        self._due += max(self._refit_every, n // ROUNDS) / (1 if is_first else PIECES)

    def _step(self, piece: int, x: Floats, events: Floats, waited: Floats) -> Floats:
        """Return Newton's step towards the greatest penalized likelihood of a piece.

        The penalty pulls each coefficient towards 0, except the constant's. The first piece's constant is pulled
        towards the logarithm of the rate of returns seen in that piece. A later piece's constant is pulled towards the
        previous piece's, lowered as for a hazard that falls as 1/age. So a piece that few sessions of the window have
        reached takes its hazard from the previous piece, and the features hardly count.

        Args:
            x: features of the requests after which the wait reached the piece: [requests, features].
            events: for each request, its weight if the session returned in the piece; else 0.
            waited: for each request, the seconds waited in the piece, times its weight.
        """
        b, penalty, mean = self.coefficients[piece], np.full(x.shape[1], self._prior), np.zeros(x.shape[1])
        penalty[0] = 1.0
        if piece:
            mean[0] = self.coefficients[piece - 1, 0] + np.log(_ENDS[piece - 1] / _ENDS[piece])
        else:
            mean[0] = np.log((events.sum() + 1) / (waited.sum() + YOUNG_S))
        expected = waited * np.exp(np.clip(x @ b, -20, 3))
        gradient = x.T @ (events - expected) - penalty * (b - mean)
        step: Floats = np.linalg.solve((x * expected[:, None]).T @ x + np.diag(penalty), gradient)
        return step * min(1.0, LARGEST_STEP / max(1e-9, float(np.abs(step).max())))

    def hazard(self, x: Sequence[float]) -> Floats:
        """Return the hazard, returns per second, in each piece of age for a session with features `x`."""
        hazard: Floats = np.exp(np.clip(self.coefficients @ np.array(x), -18, 1))
        return hazard

    def index(self, x: Sequence[float]) -> list[float]:
        """Return the Gittins index of a session at the begin of each piece of age, if it has not returned by then.

        The index is the returns per second of keeping the session, if the wait ends at the best moment: the maximum
        over τ of P(return within τ) / E[min(seconds until the return, τ)] (Gittins, "Bandit Processes and Dynamic
        Allocation Indices", JRSS B 1979). With growing age, (expected seconds waited, chance that the session has
        returned) draws a curve. The index is the steepest slope from the piece's begin to a later point of the curve.
        """
        hazard = self.hazard(x)
        stays = np.exp(-hazard * self._widths)
        waiting = np.concatenate([[1.0], np.cumprod(stays)])
        seconds = np.concatenate([[0.0], np.cumsum(waiting[:-1] * (1 - stays) / hazard)])
        rise, run = waiting[:-1, None] - waiting, seconds - seconds[:-1, None]
        slopes = np.divide(rise, run, out=np.zeros_like(rise), where=_LATER & (run > 0))
        best: list[float] = np.maximum(slopes.max(axis=1), hazard).tolist()  # hazard: where `waiting` is nearly 0
        return best


_LATER = np.triu(np.ones((PIECES, PIECES + 1), np.bool_), 1)
