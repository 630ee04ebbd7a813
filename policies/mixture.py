"""Our own: predicts who comes back, unless a simpler rule does better on the requests at hand."""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Self
from zlib import crc32

from manthan.policies.base import EvictionPolicy, SessionView, in_order
from manthan.policies.byte_queue import ByteQueue
from manthan.policies.contest import Contest
from manthan.policies.gdsf import GDSF
from manthan.policies.lru import LRU
from manthan.policies.return_model import ReturnModel
from manthan.policies.returns import Returns, ReturnsOptions
from manthan.policies.shadow import ShadowCache

SAMPLE = 512
"""Sessions in the fullest shadow, to twice as many."""
LOOK_EVERY = 8
"""Sampled requests between two choices."""
DRIFT = 0.02
"""How much of the difference the room that shadows have moves towards that of the place at each look for victims."""


class Mixture(EvictionPolicy):
    """Follows the best of three: the prediction of returns (see `Returns`), lru, and gdsf.

    What each would find is known from shadows: caches that hold no KV, as large as the place, in which each policy goes
    on undisturbed. gdsf is followed until another's shadow has surely found more (see `Contest`); then that one is. In
    a place of many sessions, shadows are caches of a sample of them, which a hash of the id chooses, scaled down alike;
    so they cost little. O(log n) an event.
    """

    name: ClassVar[str] = "returns"
    Options: ClassVar[type[ReturnsOptions]] = ReturnsOptions
    options: ReturnsOptions

    def __init__(self, options: Any = None, model: ReturnModel | None = None) -> None:
        super().__init__(options)
        self._returns = Returns(self.options, model)
        self.model = self._returns.model
        self._gdsf, gdsf = GDSF(), GDSF()
        self._gdsf_shadow = gdsf
        self._present = ByteQueue()
        """Who is there, the one unused for longest first."""
        policies: dict[str, EvictionPolicy] = {"returns": Returns(self.options, self.model), "lru": LRU(), "gdsf": gdsf}
        self._shadows = {name: ShadowCache(policy) for name, policy in policies.items()}
        self._contest = Contest(tuple(policies), "gdsf")
        self._running: dict[str, SessionView] = {}
        """Sampled sessions that were told of once with their present request."""
        self._told: dict[str, tuple[int, float]] = {}
        """Requests of sampled sessions when the shadows were told last, and when they began."""
        self._origins: dict[float, str] = {}
        """Superseded sessions by when they began, which is what whoever goes on from them has of them."""
        self._mask = 0
        """A session is sampled if these bits of its hash are 0."""
        self._room = 0.0
        """Bytes that the place holds."""
        self._looks = 0
        self._last = self._offered = ""

    @classmethod
    def family(cls, options: Any = None) -> Callable[[], Self]:
        first = cls(options)
        return lambda: cls(options, first.model)

    def used(self, session: SessionView) -> None:
        session_id = self._last = session.session_id
        self._offered = ""
        self._present.put_last(session_id, session.nbytes)
        if self._contest.leader != "gdsf":  # whoever goes then says nothing of how old gdsf would let them be
            self._gdsf.age = self._gdsf_shadow.age
        self._gdsf.used(session)
        self._returns.used(session)
        if self._is_sampled(session_id):
            self._tell_shadows(session)

    def forget(self, session_id: str) -> None:
        if session_id in self._present:
            self._left(session_id)
            if session_id != self._offered:  # it is over; else it was its own turn, which is this policy's choice alone
                for shadow in self._shadows.values():
                    shadow.forget(session_id)

    def evicted(self, session_id: str) -> None:
        self._offered = ""
        if self._contest.leader == "gdsf":
            self._gdsf.evicted(session_id)
        self._left(session_id)

    def superseded(self, session_id: str) -> None:
        self._returns.superseded(session_id)
        if session_id in self._told:
            self._origins[self._told[session_id][1]] = session_id
        for shadow in self._shadows.values():
            shadow.superseded(session_id)

    def victims(self) -> Iterator[str]:
        room = self._present.nbytes - self._present.size(self._last)
        self._room += (DRIFT if self._room else 1.0) * (room - self._room)
        for victim in self._order():
            self._offered = victim
            yield victim

    def _order(self) -> Iterator[str]:
        if self._contest.leader == "lru":
            return in_order(self._present)
        return (self._gdsf if self._contest.leader == "gdsf" else self._returns).victims()

    def _left(self, session_id: str) -> None:
        self._present.pop(session_id)
        self._gdsf.forget(session_id)
        self._returns.forget(session_id)
        if (session := self._running.pop(session_id, None)) is not None:
            self._request(session)

    # -- shadows --------------------------------------------------------------------------------------

    def _is_sampled(self, session_id: str) -> bool:
        return not self._mask or not crc32(session_id.encode()) & self._mask

    def _tell_shadows(self, session: SessionView) -> None:
        """Once for each request, when it ends: how much it could find is not known before. A place that is told of a
        request once learns of its end with the next one."""
        session_id = session.session_id
        before = self._running.pop(session_id, None)
        if before is not None and before.uses != session.uses:
            self._request(before)
            before = None
        if before is not None:
            self._request(session)
        elif session_id not in self._told or self._told[session_id][0] != session.uses:
            self._running[session_id] = session

    def _request(self, session: SessionView) -> None:
        """A request of a sampled session has ended."""
        if session.session_id not in self._told and (origin := self._origins.pop(session.created, None)) is not None:
            for shadow in self._shadows.values():
                shadow.inherit(session.session_id, origin)
        self._told[session.session_id] = session.uses, session.created
        new = session.added_tokens + session.answer_tokens
        known = session.nbytes * max(0.0, 1 - new / session.tokens) if session.uses > 1 and session.tokens else 0.0
        room = (self._room or self._present.nbytes) / (self._mask + 1)
        self._contest.add([shadow.request(session, known, room) for shadow in self._shadows.values()])
        self._looks += 1
        if self._looks % LOOK_EVERY == 0:
            self._contest.look()
            self._keep_small()

    def _keep_small(self) -> None:
        most = max(len(shadow.kept) for shadow in self._shadows.values())
        if most <= 2 * SAMPLE and len(self._told) <= 4 * len(self._shadows) * most + SAMPLE:
            return
        if most > 2 * SAMPLE:
            self._mask = 2 * self._mask + 1
        sampled = {session_id for shadow in self._shadows.values() for session_id in shadow.kept}
        for session_id in sampled:
            if not self._is_sampled(session_id):
                for shadow in self._shadows.values():
                    shadow.forget(session_id)
        self._told = {key: told for key, told in self._told.items() if key in sampled and self._is_sampled(key)}
        self._origins = {created: origin for created, origin in self._origins.items() if origin in self._told}
