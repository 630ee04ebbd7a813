"""An engine whose tier other engines share, without a Redis: tests give the answers to its lookups."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from integrity import check_integrity
from talks import Talks

from manthan.manager.events import BlocksDropped
from manthan.manager.session.blocks import FrontTier
from manthan.manager.session.persist import RedisLink
from manthan.manager.tiers.redis_sessions import LookupResult, Needed, SessionRecord, StoredPoint

TTL_S = 1e4
FRONTS = [FrontTier(300, True)]


class GivenSessions:
    """Stands for RedisSessions. main: KV cache group of the blocks that are looked up."""

    is_up = True

    def __init__(self, main: int) -> None:
        self.main = main
        self.start = self.close = lambda: None
        self.answers: dict[str, LookupResult] = {}
        self.asked: dict[str, tuple[str, list[bytes], Needed | None]] = {}
        """By request id: session id, block hashes, and what returns the blocks of other groups."""
        self.records: list[SessionRecord] = []
        self.drops: list[BlocksDropped] = []

    @property
    def has_answers(self) -> bool:
        return bool(self.answers)

    def look_up(
        self, request_id: str, session_id: str, group: int, hashes: Sequence[bytes], needed: Needed | None
    ) -> bool:
        assert group == self.main
        self.asked[request_id] = session_id, list(hashes), needed
        return True

    def take(self) -> dict[str, LookupResult]:
        taken, self.answers = self.answers, {}
        return taken

    def tell(self, records: Iterable[SessionRecord], drops: Iterable[BlocksDropped]) -> None:
        self.records, self.drops = list(records), [*self.drops, *drops]


class SharedTalks(Talks):
    """needed: as `RedisLink` has it. The rest is as in Talks."""

    def __init__(self, needed: Callable[[int], Iterable[tuple[int, int]]] | None = None, **more: Any) -> None:
        super().__init__(is_shared=True, ttl_s=TTL_S, driver={"fronts": FRONTS}, **more)
        self.redis = GivenSessions(self.manager.shape.main)
        self.link = RedisLink(self.redis, self.manager, FRONTS, needed)  # type: ignore[arg-type]
        self.driver._redis = self.link

    def start(self, prompt: str, who: str | None = None, tenant: str = "", **hints: Any) -> str:
        """Have a request come, for which Redis has nothing, and be served at once."""
        request_id = self.ask(prompt, who, tenant, **hints)
        if request_id in self.redis.asked:
            self.find(request_id, 0)
        assert self.serve(request_id)
        return request_id

    def find(self, request_id: str, blocks: int, own: str = "", point: StoredPoint | None = None) -> None:
        """Let Redis have the first blocks of those that a request asked for.

        own: a sample of its session's blocks. point: a resume point that is there.
        """
        _, asked, _ = self.redis.asked[request_id]
        assert blocks <= len(asked)
        nbytes = self.manager.shape.cold_nbytes
        self.tier |= {(self.redis.main, block_hash): nbytes for block_hash in asked[:blocks]}
        self.redis.answers[request_id] = LookupResult([nbytes] * blocks, point, own)
        self.driver._redis.hear()
        check_integrity(self.manager)

    def match(self, request_id: str) -> int:
        """Return how many blocks can be loaded for a request that finds nothing in the pool."""
        request = self.manager.requests[request_id]
        return self.manager.match(request, 0, len(request.hashes))
