"""The session memory manager: events and the time in, actions out.

It does no I/O, starts no thread, reads no clock and knows neither torch nor vLLM. Whoever drives it (`manthan.manager.
driver`) calls the event methods from one thread and carries out, in this order, `take_drops`, `take_releases`,
`take_spill_runs`.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import NamedTuple

from manthan.manager.sessions.adoption import Adoption
from manthan.manager.sessions.anchors import Anchors
from manthan.manager.sessions.attribution import attribute, begin, find, kept
from manthan.manager.sessions.budget import ColdBudget, Shares
from manthan.manager.sessions.deadlines import earliest
from manthan.manager.sessions.evictions import Evictions
from manthan.manager.sessions.exact import ExactTokens
from manthan.manager.sessions.fast_tier import Fast
from manthan.manager.sessions.hints import NO_HINTS, Hints, Quality
from manthan.manager.sessions.marks import Mark, Owner
from manthan.manager.sessions.orders import Orders
from manthan.manager.sessions.pruning import Pruning
from manthan.manager.sessions.remote import RemoteBlocks
from manthan.manager.sessions.restores import Restores
from manthan.manager.sessions.session import (
    HOT_STATES,
    BlockName,
    CodeState,
    Drop,
    DropCause,
    Encoding,
    MemoryShape,
    News,
    NewsKind,
    Outcome,
    Place,
    Session,
    SessionState,
    common_prefix,
)
from manthan.manager.sessions.table import SessionTable
from manthan.manager.sessions.wishes import Wishes
from manthan.policies import EvictionPolicy, PolicyOptions

PATIENCE = 2.0
"""A session that a request named is worth a prefetch for so many idle times: what is idle now has made room by then."""
AFTERWARDS = {"evict": "go cold", "expect": "be expected back", "release": "be released"}
"""What an operator may ask of a session only while no request of it runs."""

_GROUP_AND_TENANT = attrgetter("group", "tenant")


class SpillRun(NamedTuple):
    """Orders for several blocks of one group and one tenant: key, place of the first token in the chain, and what the
    codes are to be, of each."""

    keys: list[bytes]
    first_tokens: list[int]
    encodings: list[Encoding]
    group: int | None
    tenant: str

    def without(self, places: Collection[int]) -> "SpillRun":
        """The run but for the blocks at these places."""
        if not places:
            return self
        keep = [at for at in range(len(self.keys)) if at not in places]
        keys, first_tokens = [self.keys[at] for at in keep], [self.first_tokens[at] for at in keep]
        return SpillRun(keys, first_tokens, [self.encodings[at] for at in keep], self.group, self.tenant)


class Usage(NamedTuple):
    """What is where: sessions by state, chains' blocks that are hot, and what is in the cold store.

    anchors: places that chains can be gone on from, for models with several KV cache groups. cold_blocks, exact_blocks,
    cold_nbytes: of all groups. pool_nbytes: what cold_blocks took in the pool.
    """

    sessions: dict[SessionState, int]
    anchors: int
    hot_blocks: int
    cold_blocks: int
    exact_blocks: int
    pool_nbytes: int
    cold_nbytes: int
    budget_nbytes: int


class SessionMemoryManager:
    """Decides which sessions are evicted, restored and dropped.

    policy: instances of it order the hot pool and the cold store.
    capacity_nbytes: the cold store's hard budget, of all ranks together.
    idle_after_s: seconds without a request after which a sweep evicts a session.
    min_tokens: shorter sessions are not tracked.
    label: stands in the ids of sessions without a name.
    options: of the policy; None for its defaults.
    shares: of the budget, for pinned sessions and for tenants.
    fast: the tiers in front of the last one, the fastest first.
    prefetch_lead_s: an expected session is restored so many seconds before; None for never.
    sink_tokens: how many of each session's first tokens are kept exact.
    shared_ttl_s: seconds that blocks live in a store which engines share; None for one of this engine's own.
    quality: of requests that do not say it.
    mark: returns the mark of the block that the pool has under a name; None if it has none. A driver sets it.
    """

    def __init__(
        self,
        policy: type[EvictionPolicy],
        shape: MemoryShape,
        capacity_nbytes: int,
        idle_after_s: float,
        min_tokens: int = 0,
        label: str = "",
        options: PolicyOptions | None = None,
        shares: Shares = Shares(),  # noqa: B008
        fast: Sequence[Fast] = (),
        prefetch_lead_s: float | None = None,
        sink_tokens: int = 0,
        shared_ttl_s: float | None = None,
        quality: Quality = "any",
        mark: Callable[[BlockName], Mark | None] = lambda name: Mark.EXACT,
    ) -> None:
        make_policy = policy.family(options)
        self._quality = quality
        self.mark = mark
        self.idle_after_s, self._is_shared = idle_after_s, shared_ttl_s is not None
        self.min_blocks = max(1, -(-min_tokens // shape.block_tokens))
        self.table = SessionTable(make_policy, shape, label, fast)
        self.blocks = self.table.blocks
        self._running: dict[str, Session] = {}  # by request id
        self._hints: dict[str, Hints] = {}  # by request id
        self._orders = Orders(self.blocks, shape.group)
        self._main_group = shape.main_group if shape.group is None else None  # as `blocks` has it
        self._anchors = Anchors(self.blocks, self._orders, bool(shape.beside), self.table.touch)
        self._exact = exact = ExactTokens(shape, sink_tokens)
        self._pruning = Pruning(self.table, self._orders, self._anchors, lambda name: self.mark(name))
        self.remote = RemoteBlocks(self.table, self._anchors, self._running)
        if self._is_shared:
            self.table.changed = {}
        self._restores = Restores(self.table, self._pruning, self._anchors, self._running)
        self.budget = ColdBudget(self.table, self._pruning, exact, make_policy, capacity_nbytes, shares)
        self._evictions = Evictions(
            self.table,
            self._orders,
            self._pruning,
            self.budget,
            exact,
            self._anchors,
            idle_after_s,
        )
        self._wishes = Wishes(
            self.table,
            self._pruning,
            self.budget,
            self._restores,
            self._anchors,
            self._orders,
            prefetch_lead_s,
            shared_ttl_s,
        )
        self._adoption = Adoption(self.table, self._anchors, self.budget, self._wishes)

        # Methods of the parts, for the driver.
        self.adopt = self._adoption.adopt
        self.match, self.restore_finished = self._restores.match, self._restores.finished
        self.prefetch_blocks, self.take_prefetch = self._wishes.prefetch_blocks, self._wishes.take_prefetch
        self.prefetch_finished = self._wishes.prefetched
        self.relieve = self._evictions.relieve
        self.all_spilled, self.spill_failed = self._evictions.spilled, self._evictions.failed
        self.lost = self._evictions.lost
        self.take_drops, self.take_releases = self._orders.take_drops, self._orders.take_releases
        self.take_evictions, self.take_news = self._orders.take_evictions, self._orders.take_news
        self.safe = self.blocks.safe

    @property
    def shape(self) -> MemoryShape:
        """What a block is worth, in the codec that blocks are encoded in now."""
        return self.table.shape

    def recode(self, shape: MemoryShape, capacity_nbytes: int, all_exact: bool = False) -> None:
        """From now on blocks are encoded in another codec, of which the cold store holds so much; what is queued, or
        cold, stays as it was ordered.

        all_exact: every token is kept exact.
        """
        self.table.shape, self.budget.nbytes = shape, capacity_nbytes
        self._exact.keep_all(all_exact)

    # -- what was there before ------------------------------------------------------------------------

    def disown(self, names: Iterable[tuple[int, bytes]]) -> None:
        """These blocks, by group and key, are in the cold store, and no session needs them: they are to be dropped."""
        by_group = groupby(sorted(names), key=itemgetter(0))
        self._orders.drops += [Drop(group, [key for _, key in some], DropCause.ABANDONED) for group, some in by_group]

    # -- requests -------------------------------------------------------------------------------------

    def request_started(
        self,
        request_id: str,
        keys: Sequence[bytes],
        asked_id: str | None,
        now: float,
        *,
        tokens: int | None = None,
        hints: Hints = NO_HINTS,
        tenant: str = "",
        tail: bytes | None = None,
    ) -> str:
        """A request with these prompt block keys came in; returns the id of the session it belongs to.

        tokens: of its prompt; those of its blocks if it is not said. tail: the prompt's tokens behind its full blocks.
        """
        known = self.blocks.known(keys) * self.shape.block_tokens
        self.budget.enter_tenant(tenant)
        session = attribute(self.table, keys, asked_id, tenant, now)
        prompt = self._tokens(keys, tokens)
        length = kept(session, keys, asked_id, prompt)
        if left := (len(session.chain) - length) * self.shape.block_tokens:
            session.left_tokens = left
        self._begin_use(session, request_id, now, prompt, known)
        if left:  # nobody asks for the old answer any more
            self._pruning.cut(session, length, DropCause.ABANDONED)
        self._running[request_id] = session
        self._restores.own[request_id] = self._own_blocks(session, keys, tail, hints.quality or self._quality)
        session.prompt_end = _end(keys, tail)
        self.table.tips.asks(session, keys)
        if hints is not NO_HINTS:
            self._hints[request_id] = hints
            self._wishes.expect(hints.prefetch, tenant, late=now + PATIENCE * self.idle_after_s)
        return session.session_id

    def request_finished(
        self,
        request_id: str,
        keys: Sequence[bytes],
        now: float,
        *,
        tokens: int | None = None,
        places: Sequence[Place] = (),
        found: int = 0,
        lossy: int = 0,
    ) -> Outcome | None:
        """A request ended, however it did; `keys` are the blocks whose KV was computed, prompt and output.

        tokens: of prompt and output. found: of the prompt's, those that were hot or restored. lossy: of those, the ones
        that were decoded, or computed behind such. beside: what other groups need to go on from there: group, key and
        place in its group of each block. Returns what came of the request's hints.
        """
        session = self._running.pop(request_id, None)
        hints = self._hints.pop(request_id, NO_HINTS)
        self._restores.own.pop(request_id, None)
        if session is None:
            return None
        total = self._tokens(keys, tokens)
        if common_prefix(session.chain, keys) < len(keys):
            home = self._home(session, keys, now)
            if home is not session:
                self._begin_use(home, request_id, now, session.tokens, len(home.chain) * self.shape.block_tokens)
                self._end_use(session, request_id, now)
            self.table.extend(home, keys[len(home.chain) :])
            session = home
        session.answer_tokens = max(0, total - session.tokens)
        session.tokens = max(session.tokens, total)
        session.lossy_tokens = lossy
        if len(session.chain) == len(keys):
            self._anchor(session, places)  # before it may be pinned, which counts it
        self._orders.news.append(
            News(
                session.session_id,
                NewsKind.TURN,
                tokens=session.tokens,
                blocks=len(session.chain),
                seconds=now - session.last_used,
                found=found,
            )
        )
        refused = self._wishes.take(session, hints, now)
        if hints.release and session.chain and session.requests == {request_id}:
            session.requests.clear()
            self._pruning.forget_session(session, DropCause.RELEASED)
        else:
            self._end_use(session, request_id, now)
            self._orders.keep(session.chain)
        return Outcome(session.told_id, session.pinned, refused, lossy)

    def _own_blocks(self, session: Session, keys: Sequence[bytes], tail: bytes | None, quality: Quality) -> int:
        """Number of blocks at the beginning of a prompt that its session, or another of the same name, has. Who has no
        name and asks somebody's whole prompt again is taken for the same."""
        if quality == "exact":
            return 0
        if session.asked_id is None:
            if not session.chain:
                origin = self.table.tips.asked(keys, _end(keys, tail), session.tenant)
                if origin is not None:
                    session.kin = origin.owner
                    return len(keys)
            return common_prefix(session.chain, keys)
        return self.table.tips.nearest(keys[: self.blocks.known(keys)], session.asked_id, session.tenant)[0]

    def served_elsewhere(self, request_id: str, blocks: int) -> None:
        """Another engine has served the request's session, which has so many blocks of its prompt from there."""
        session = self._running.get(request_id)
        if session is not None and session.asked_id is not None and self.asker(request_id) is not None:
            self._restores.own[request_id] = max(self._restores.own[request_id], blocks)

    def asker(self, request_id: str) -> Owner | None:
        """Owner of a running request's session; None if the request wants exact KV only, or is not known."""
        session = self._running.get(request_id)
        if session is None or (self._hints.get(request_id, NO_HINTS).quality or self._quality) == "exact":
            return None
        return session.owner

    def owner(self, request_id: str) -> Owner | None:
        """Owner of a running request's session."""
        session = self._running.get(request_id)
        return None if session is None else session.owner

    def session_owner(self, session_id: str) -> Owner | None:
        """Owner of a session; None if it is gone."""
        session = self.table.by_id.get(session_id)
        return None if session is None else session.owner

    def stored_marks(self, keys: Sequence[bytes], group: int | None = None) -> list[Mark]:
        """Marks of resident blocks after their compressed blocks are loaded into them.

        Another engine may have replaced a block that is shared by one of another codec.
        """
        if self._is_shared:
            return [Mark.DECODED] * len(keys)
        blocks = self.blocks.of(keys, group)
        encodings = {block.encoding for block in blocks if block is not None}
        exact = {encoding for encoding in encodings if self.shape.is_exact(group, encoding)}
        return [block.mark if block is not None and block.encoding in exact else Mark.DECODED for block in blocks]

    def is_saved(self, key: bytes) -> bool:
        """True if the cold store has a block of the chains' group, or of the one that stands for it."""
        block = self.blocks.get(key, self._main_group)
        return block is not None and block.code is CodeState.COLD

    def encodes(self, key: bytes, group: int | None, mark: Mark) -> None:
        """A block of this mark is about to be encoded. Another engine may replace what is shared by a lossy one."""
        block = self.blocks.get(key, group)
        if block is not None:
            block.mark = Mark.DERIVED if self._is_shared else mark

    def _anchor(self, session: Session, places: Sequence[Place]) -> None:
        wanted = [place for place in places if place.parts and place.depth >= self.min_blocks]
        if not wanted:
            return
        session.prompt_depth = wanted[1].depth if wanted[1:] else 0
        self._anchors.tidy(session)
        for place in wanted:
            self._evictions.anchor(session, *place)

    def _tokens(self, keys: Sequence[bytes], tokens: int | None) -> int:
        return len(keys) * self.shape.block_tokens if tokens is None else tokens

    def _home(self, session: Session, keys: Sequence[bytes], now: float) -> Session:
        """Which session these keys extend, now that others may have grown, or that the answer is known."""
        found = find(self.table, keys, session.asked_id, session.tenant)
        if found is None:
            if not session.chain:
                return session
            found = self.table.create(session.asked_id, session.tenant, now)
        return found

    def _begin_use(self, session: Session, request_id: str, now: float, tokens: int, known_tokens: int) -> None:
        if session.state is SessionState.EVICTING:
            self._pruning.unwait(session, session.chain)
        if not session.requests:
            self._wishes.returned(session, now)
        begin(session, tokens, known_tokens, now)
        session.requests.add(request_id)
        if session.state is not SessionState.HOT:
            self.table.set_state(session, SessionState.HOT, now)
        self.table.used(session, now)

    def _end_use(self, session: Session, request_id: str, now: float) -> None:
        session.requests.discard(request_id)
        self.table.used(session, now)
        if session.requests:
            return
        if len(session.chain) < self.min_blocks:
            self._pruning.cut(session, 0, DropCause.ABANDONED)
        else:
            self.table.set_state(session, SessionState.IDLE, now)
            self.table.remember(session)
            session.left_tokens = 0

    # -- restore --------------------------------------------------------------------------------------

    def restore_started(self, request_id: str, keys: Sequence[bytes]) -> str:
        """These codes, which matched, and those of the anchor behind them are being read for the request; they are not
        dropped until it ends. Returns whose request it is."""
        self._restores.started(request_id, keys)
        session = self._running.get(request_id)
        return "" if session is None else session.tenant

    # -- eviction -------------------------------------------------------------------------------------

    @property
    def next_deadline(self) -> float | None:
        """When the session that is idle for longest is due, or something else is; None if nothing is."""
        first = next(iter(self.table.idle.values()), None)
        idle = None if first is None else first.idle_since + self.idle_after_s
        return earliest(idle, self.table.put_off.first, self._wishes.next_deadline)

    def sweep(self, now: float) -> None:
        """Start to evict every session that is idle for long enough, and forget those whose time to live is over."""
        self._wishes.expire(now)
        self._evictions.try_again(now)
        while (first := next(iter(self.table.idle.values()), None)) and first.idle_since + self.idle_after_s <= now:
            self._evictions.evict(first, now)

    def save(self, names: Iterable[BlockName | None], walked: int, most: int) -> None:
        """Encode up to `most` of those free blocks, of which the first `walked` are looked at, that exist nowhere else.
        Their sessions stay as they are."""
        if most > 0:
            self._evictions.save(names, walked, most, dict.fromkeys(self._running.values()))

    def reset(self) -> None:
        """Forget all KV, hot and cold: the weights changed, or somebody asked for it."""
        for request_id in list(self._restores.under_way):  # they read from a store that is being emptied
            self._restores.finished(request_id, ())
        for session in list(self.table.by_id.values()):
            if session.session_id in self.table.by_id:  # one before may have taken it along
                self._pruning.cut(session, 0, DropCause.RESET)
        self._evictions.reset()  # what is left is being encoded
        self._orders.releases.clear()
        if self.table.changed is not None:
            self.table.changed = {}

    def forget_hot(self, now: float) -> None:
        """Nothing is hot any more, and what is cold is as good as ever: sessions keep the head of their chain that has
        codes."""
        for session in self.table.by_id.values():
            if session.state is SessionState.EVICTING:
                self._pruning.unwait(session, session.chain)
                self.table.set_state(session, SessionState.IDLE, now)
        for session in list(self.table.by_id.values()):
            if session.session_id not in self.table.by_id:  # one before may have taken it along
                continue
            lost = next((block for block in session.chain if block.code is not CodeState.COLD), None)
            if lost is not None:
                self._pruning.cut(session, lost.depth, DropCause.ABANDONED)
            if session.chain and session.state is SessionState.IDLE:
                self._evictions.evict(session, now, is_hot=False)
        self._orders.releases.clear()

    # -- what an operator asks for --------------------------------------------------------------------

    def steer(self, what: str, session: Session, now: float, seconds: float | None = None, tool: str = "") -> str:
        """Do at once what a hint or the time would do. Return in a sentence why not, if so.

        Args:
            what: evict, prefetch, expect, pin, unpin or release.
            seconds: from `now` to the end of a pin, None for good; or to the client's return, None if it waits for the
                tool.
        """
        if session.requests and what in AFTERWARDS:
            return f"a request of it runs; it can {AFTERWARDS[what]} when that has ended"
        match what:
            case "evict" if session.state is SessionState.IDLE:
                self._evictions.evict(session, now)
            case "prefetch" if not self._wishes.may_prefetch:
                return "sessions of this model cannot be prefetched"
            case "prefetch":
                self._wishes.expect([session.told_id], session.tenant, now + PATIENCE * self.idle_after_s)
            case "expect":
                self._wishes.await_return(session, seconds, tool, session.last_used if seconds is None else now)
                self.table.told(session)
            case "pin":
                return self._wishes.pin(session, None if seconds is None else now + seconds)
            case "unpin":
                self._wishes.unpin(session)
            case "release":
                self._pruning.forget_session(session, DropCause.RELEASED)
        return ""

    # -- what is to be done ---------------------------------------------------------------------------

    def take_spill_runs(self, limit: int) -> list[SpillRun]:
        """Up to `limit` blocks to encode now; each must be answered by all_spilled, spill_failed or lost."""
        runs = []
        for (group, tenant), some in groupby(self._orders.take_spills(limit), _GROUP_AND_TENANT):
            blocks, tokens = list(some), self.shape.tokens_of(group)
            first_tokens = [block.depth * tokens for block in blocks]
            encodings = [block.encoding for block in blocks]
            runs.append(SpillRun([block.key for block in blocks], first_tokens, encodings, group, tenant))
        return runs

    def settle_tiers(self) -> None:
        """Reckon what leaves the fast tiers for what is being encoded."""
        self.table.fronts.settle(self.table.by_id)

    @property
    def has_orders(self) -> bool:
        """Whether there are drops or releases to be taken."""
        return bool(self._orders.drops or self._orders.releases)

    @property
    def has_work(self) -> bool:
        """Whether something is to be taken, or told, or an answer to a taken spill is outstanding."""
        return bool(self._orders or self.table.changed)

    # -- what others may look at ----------------------------------------------------------------------

    def unsaved(self, keys: Sequence[bytes]) -> int:
        """How many of these blocks of chains are known and have no codes, nor will have."""
        return sum(block.code is CodeState.NONE for block in self.blocks.run(keys))

    def is_missed(self, name: BlockName) -> bool:
        """Whether somebody would miss a block's bf16 copy."""
        block = self.blocks.named(name)
        return block is not None and (block.hot > 0 or block.in_flight or self._anchors.is_hot(block))

    def is_used(self, key: bytes) -> bool:
        """Whether a session's chain has the block."""
        block = self.blocks.get(key)
        return block is not None and block.users > 0

    def tier_of(self, key: bytes, group: int) -> int:
        """The number of the fastest tier that has a block's codes."""
        block = self.blocks.get(key, None if group == self.shape.group else group)
        return 0 if block is None else block.tier

    def is_hot(self, session_id: str) -> bool:
        """Whether there is such a session, and its KV is in the pool."""
        session = self.table.by_id.get(session_id)
        return session is not None and session.state in HOT_STATES

    @property
    def may_lose(self) -> bool:
        """Whether any block may be at risk, see `safe`."""
        return bool(self.blocks.hot or self.blocks.queued)

    @property
    def on_their_way(self) -> int:
        """Blocks that are queued or being encoded."""
        return self.blocks.queued + self.blocks.spilling

    @property
    def usage(self) -> Usage:
        blocks, states = self.blocks, self.table.states
        return Usage(
            {state: states[state] for state in SessionState},
            self._anchors.standing,
            blocks.hot,
            blocks.cold,
            blocks.exact,
            sum(count * self.shape.pool_nbytes(group) for group, count in blocks.cold_of.items()),
            blocks.cold_nbytes,
            self.budget.nbytes,
        )


def _end(keys: Sequence[bytes], tail: bytes | None) -> str:
    """What tells a prompt from others with the same full blocks; see `Session.prompt_end`."""
    return "" if tail is None else f"{len(keys)}:{tail.hex()}"
