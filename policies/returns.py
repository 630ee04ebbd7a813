"""Policy `returns`: it evicts the sessions least likely to return soon, or by lru if that keeps more useful KV.

A session returns when its client sends the next request. The KV that the request finds in the cache was useful. Each
policy has a shadow, which measures its useful KV. A shadow is a simulated cache for a sample of the sessions
(C. Waldspurger et al., "Cache Modeling and Optimization using Miniature Simulations", USENIX ATC 2017: if a hash
chooses some of the requests, and the cache is smaller by the same factor, the share that is found is about the same).
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Self
from zlib import crc32

from pydantic import Field

from manthan.policies.base import EvictionPolicy, PolicyOptions, SessionView, in_order
from manthan.policies.lru import LRU
from manthan.policies.ranking import Ranking
from manthan.policies.return_model import AGES, ReturnModel

DECAY = 0.5 ** (1 / 512)  # factor on the weight of earlier requests at each new request: 1/2 after 512 requests
SURE = 1.25
"""Number of standard deviations by which a policy must have found more bytes than the leader, to become the leader. It
is above 1, so that a single request does not change the leader."""
SAMPLE = 512  # intended number of sessions in a shadow. Above twice this number, the sample is halved
LOOK_EVERY = 8  # sampled requests between two choices of the leader
DRIFT = 0.02  # weight of the newest cache size in the moving average `Mixture._room`, at each call of `victims`


class ReturnsOptions(PolicyOptions):
    """Options of `ReturnModel`."""

    window: int = Field(
        default=4096, ge=64, le=1 << 20, description="the number of newest requests to learn from, 64 to 1048576"
    )
    refit_every: int = Field(
        default=64, ge=1, description="a number of requests between two estimates of the same piece, 1 or more"
    )
    prior: float = Field(default=8.0, gt=0, description="a weight above 0, in returns of sessions")


class Returns(EvictionPolicy):
    """Estimates when each session returns, and evicts the sessions with the lowest Gittins index first.

    From requests, a model (see return_model) learns which sessions return, and when. The Gittins index of a session is
    the chance that the session returns, divided by the expected seconds of waiting, if the wait ends at the best
    moment. It is not divided by the session's bytes. Superseded sessions are evicted first. Users choose the
    subclass `Mixture`, in which lru may lead instead.

    Age is the time since a session's last use, and is cut into pieces (AGES). A session has one index for each piece.
    `victims` ranks a session anew after the session has passed into another piece. With n sessions, each call of
    `used`, each victim and each new ranking takes O(log n) on average.
    """

    name: ClassVar[str] = "returns"
    Options: ClassVar[type[ReturnsOptions]] = ReturnsOptions
    options: ReturnsOptions

    def __init__(self, options: Any = None, model: ReturnModel | None = None) -> None:
        super().__init__(options)
        self.model = model or ReturnModel(self.options.window, self.options.refit_every, self.options.prior)
        self._now = 0.0
        self._index: dict[str, tuple[float, list[float]]] = {}  # time of last use, and index in each piece of age
        self._worth, self._passes = Ranking(), Ranking()
        """Sessions ranked by their index now; and sessions by the time at which they reach the next piece of age."""
        self._superseded: OrderedDict[str, None] = OrderedDict()
        """The first victims: sessions from whose middle another went on, as after an edit of an earlier message."""

    @classmethod
    def family(cls, options: Any = None) -> Callable[[], Self]:
        first = cls(options)
        return lambda: cls(options, first.model)

    def used(self, session: SessionView) -> None:
        session_id = session.session_id
        self._superseded.pop(session_id, None)
        self._now = max(self._now, session.last_used)
        self._index[session_id] = session.last_used, self.model.observe(session)
        self._rank(session_id)

    def forget(self, session_id: str) -> None:
        self._superseded.pop(session_id, None)
        self._index.pop(session_id, None)
        self._worth.discard(session_id)
        self._passes.discard(session_id)

    def superseded(self, session_id: str) -> None:
        if session_id in self._index:
            Returns.forget(self, session_id)  # not `self.forget`, because a subclass may override it
            self._superseded[session_id] = None

    def victims(self) -> Iterator[str]:
        yield from in_order(self._superseded)
        while (first := self._passes.first()) is not None and first.rank < self._now:
            self._rank(first.key)
        yield from self._worth.in_order()

    def _rank(self, session_id: str) -> None:
        """Rank a session by its index for the piece of age in which the session is now."""
        last_used, index = self._index[session_id]
        piece = 0
        while piece < len(AGES) and last_used + AGES[piece] < self._now:
            piece += 1
        self._worth.set(session_id, index[piece], last_used)
        if piece < len(AGES):
            self._passes.set(session_id, last_used + AGES[piece])
        else:
            self._passes.discard(session_id)


class Contest:
    """Choice of the leader, the better of two policies, by the bytes of KV that each found at the same requests.

    A leader stays until the other policy has surely found more. The bytes of one request depend on each other, so each
    request's difference counts as one random draw. The sum of the differences is compared with the root of the sum of
    their squares: the sum's standard deviation if both policies are equally good.
    """

    def __init__(self, names: tuple[str, str], leader: str) -> None:
        self.names, self.leader = names, leader
        self.found, self._squares = [0.0, 0.0], 0.0  # sums, with decay, of bytes found, and of squared differences

    def add(self, found: Sequence[float]) -> None:
        """Count the bytes found by each policy at a request, in the order of `names`."""
        self.found = [DECAY * before + now for before, now in zip(self.found, found, strict=True)]
        self._squares = DECAY**2 * self._squares + (found[0] - found[1]) ** 2

    def look(self) -> None:
        """Make the policy that found more the leader, if the difference is sure; see SURE."""
        lead = self.found[0] - self.found[1]
        if abs(lead) > SURE * self._squares**0.5:
            self.leader = self.names[0] if lead > 0 else self.names[1]


class ShadowCache:
    """Simulated cache, which has the number of bytes of each session, but no KV. `policy` names the victims.

    As in a real cache, a victim loses only as much of its tail as must go. If the victim is the session that needs the
    room, the session keeps the part that fits.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.kept: dict[str, int] = {}
        self.nbytes = 0

    def request(self, session: SessionView, known: float, capacity: float) -> float:
        """Simulate an ended request. Return the bytes that the request found, and enter all bytes of the session.

        known: bytes that an unlimited cache would have found. capacity: most bytes that the cache may hold.
        """
        found = min(self.kept.get(session.session_id, 0), known)
        self._keep(session.session_id, max(1, session.nbytes))
        self.policy.used(session)
        if self.nbytes > capacity:
            self._make_room(session.session_id, capacity)
        return found

    def forget(self, session_id: str) -> None:
        """Remove a session. Ignore unknown ids."""
        if session_id in self.kept:
            self._keep(session_id, 0)
            self.policy.forget(session_id)

    def inherit(self, session_id: str, origin: str) -> None:
        """Replace `origin` by a session that continued from its middle, because the end of `origin` is worthless."""
        if nbytes := self.kept.get(origin, 0):
            self.forget(origin)
            self._keep(session_id, nbytes)

    def _make_room(self, newcomer: str, capacity: float) -> None:
        for victim in self.policy.victims():
            left = self.kept[victim] - (self.nbytes - capacity)
            self._keep(victim, max(0, int(left)))
            if left < 1:
                self.policy.evicted(victim)
            if victim == newcomer or self.nbytes <= capacity:
                return

    def _keep(self, session_id: str, nbytes: int) -> None:
        self.nbytes += nbytes - self.kept.pop(session_id, 0)
        if nbytes:
            self.kept[session_id] = nbytes


class Mixture(Returns):
    """The session whose return is least likely, or the least recently used, whichever order finds more.

    `Returns` and lru are in a `Contest`: shadows as large as the real cache measure the bytes that each finds. lru
    leads at first. With many sessions, shadows see a sample of the sessions, chosen by a hash of the id. A shadow's
    capacity is then scaled down by the same factor. With n sessions, a call or a victim takes O(log n) on average.
    """

    def __init__(self, options: Any = None, model: ReturnModel | None = None) -> None:
        super().__init__(options, model)
        self._present: OrderedDict[str, int] = OrderedDict()  # bytes, at least 1, of the sessions in the cache, by LRU
        self._nbytes = 0
        self._shadows = [ShadowCache(Returns(self.options, self.model)), ShadowCache(LRU())]
        self._contest = Contest(("returns", "lru"), "lru")
        self._running: dict[str, SessionView] = {}  # sampled sessions whose newest request is not simulated yet
        self._told: dict[str, tuple[int, float]] = {}  # `uses` and `created` at a sampled session's last simulation
        self._origins: dict[float, str] = {}  # by `created`: superseded session, whose successor has the same `created`
        self._mask = 0  # bits of a session's hash that are 0 for sampled sessions
        self._room = 0.0  # bytes of all but the last used session in a full cache, a moving average
        self._looks = 0
        self._last = self._offered = ""  # ids of the session used last, and of the victim named last

    def used(self, session: SessionView) -> None:
        session_id = self._last = session.session_id
        self._offered = ""
        nbytes = max(1, session.nbytes)
        self._nbytes += nbytes - self._present.pop(session_id, 0)
        self._present[session_id] = nbytes
        super().used(session)
        if self._is_sampled(session_id):
            self._tell_shadows(session)

    def forget(self, session_id: str) -> None:
        if session_id in self._present:
            self._left(session_id)
            if session_id != self._offered:  # the real cache's victim stays in shadows, which choose victims themselves
                for shadow in self._shadows:
                    shadow.forget(session_id)

    def evicted(self, session_id: str) -> None:
        self._offered = ""
        self._left(session_id)

    def superseded(self, session_id: str) -> None:
        super().superseded(session_id)
        if session_id in self._told:
            self._origins[self._told[session_id][1]] = session_id
        for shadow in self._shadows:
            shadow.policy.superseded(session_id)

    def victims(self) -> Iterator[str]:
        room = self._nbytes - self._present.get(self._last, 0)
        self._room += (DRIFT if self._room else 1.0) * (room - self._room)
        try:
            for victim in in_order(self._present) if self._contest.leader == "lru" else super().victims():
                self._offered = victim
                yield victim
        finally:  # a session released later is no victim
            self._offered = ""

    def _left(self, session_id: str) -> None:
        self._nbytes -= self._present.pop(session_id, 0)
        super().forget(session_id)
        if (session := self._running.pop(session_id, None)) is not None:
            self._request(session)

    def _is_sampled(self, session_id: str) -> bool:
        return not self._mask or not crc32(session_id.encode()) & self._mask

    def _tell_shadows(self, session: SessionView) -> None:
        """Simulate a request in the shadows once, at its end, because its tokens are unknown before.

        If the caller reports each request only once, the session's next request stands for the end.
        """
        before = self._running.pop(session.session_id, None)
        is_end = before is not None and before.uses == session.uses
        if before is not None:
            self._request(session if is_end else before)
        if not is_end and self._told.get(session.session_id, (None,))[0] != session.uses:
            self._running[session.session_id] = session

    def _request(self, session: SessionView) -> None:
        """Simulate a sampled session's ended request in the shadows. Choose the leader every LOOK_EVERY requests."""
        if session.session_id not in self._told and (origin := self._origins.pop(session.created, None)) is not None:
            for shadow in self._shadows:
                shadow.inherit(session.session_id, origin)
        self._told[session.session_id] = session.uses, session.created
        new = session.added_tokens + session.answer_tokens
        known = session.nbytes * max(0.0, 1 - new / session.tokens) if session.uses > 1 and session.tokens else 0.0
        room = (self._room or self._nbytes) / (self._mask + 1)
        self._contest.add([shadow.request(session, known, room) for shadow in self._shadows])
        self._looks += 1
        if self._looks % LOOK_EVERY == 0:
            self._contest.look()
            self._keep_small()

    def _keep_small(self) -> None:
        """Halve the sample if shadows hold too many sessions. Then, or if `_told` is long, shorten `_told`."""
        most = max(len(shadow.kept) for shadow in self._shadows)
        if most <= 2 * SAMPLE and len(self._told) <= 4 * len(self._shadows) * most + SAMPLE:
            return
        if most > 2 * SAMPLE:
            self._mask = 2 * self._mask + 1
        sampled = {session_id for shadow in self._shadows for session_id in shadow.kept}
        for session_id in sampled:
            if not self._is_sampled(session_id):
                for shadow in self._shadows:
                    shadow.forget(session_id)
        self._told = {key: told for key, told in self._told.items() if key in sampled and self._is_sampled(key)}
        self._running = {key: session for key, session in self._running.items() if self._is_sampled(key)}
        self._origins = {created: origin for created, origin in self._origins.items() if origin in self._told}
