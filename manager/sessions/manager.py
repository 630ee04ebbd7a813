"""The session memory manager: events and the time in, actions out.

It does no I/O, starts no thread, reads no clock and knows neither torch nor vLLM. Whoever drives it calls the
event methods from one thread and carries out, in this order, `take_drops`, `take_releases`, `take_spills`.
"""

from collections.abc import Iterable, Sequence

from manthan.manager.sessions.attribution import attribute, begin, find
from manthan.manager.sessions.chains import common_prefix
from manthan.manager.sessions.cold_side import Fast, Shares
from manthan.manager.sessions.hinted_side import HintedSide, prefetch_id
from manthan.manager.sessions.hints import NO_HINTS, Hints
from manthan.manager.sessions.session import (
    Block,
    CodeState,
    Drop,
    DropCause,
    Eviction,
    Outcome,
    Prefetch,
    Session,
    SessionState,
)
from manthan.manager.sessions.table import MemoryShape
from manthan.policies import EvictionPolicy, PolicyOptions

PATIENCE = 2.0
"""A session that a request named is worth a prefetch for so many idle times: what is idle now has made room by then."""


class SessionMemoryManager(HintedSide):
    """Decides which sessions are evicted, restored and dropped.

    policy: instances of it order the hot pool, the cold store, and the fast tier in front of a slower one.
    capacity_nbytes: the cold store's hard budget; a block is only ordered to be encoded while it fits.
    idle_after_s: seconds without a request after which a sweep evicts a session.
    min_tokens: shorter sessions are not tracked.
    label: stands in the ids of sessions without a name.
    options: of the policy; None for its defaults.
    shares: of the budget, for pinned sessions and for tenants.
    fast: the tier that new codes go to, where a slower one is behind it.
    prefetch_lead_s: an expected session is restored so many seconds before; None for never.
    sink_tokens, window_tokens: of each session, which have exact copies; whole blocks do.
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
        fast: Fast | None = None,
        prefetch_lead_s: float | None = None,
        sink_tokens: int = 0,
        window_tokens: int = 0,
    ) -> None:
        make_policy = policy.family(options)
        super().__init__(make_policy, shape, capacity_nbytes, label, shares, fast, sink_tokens, window_tokens)
        self.idle_after_s = idle_after_s
        self.prefetch_lead_s = prefetch_lead_s
        self.min_blocks = max(1, -(-min_tokens // shape.block_tokens))
        self._hints: dict[str, Hints] = {}  # by request id
        self._stale: set[bytes] = set()  # being encoded since before a reset
        self._evictions: list[Eviction] = []

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
    ) -> str:
        """A request with these prompt block keys came in; returns the id of the session it belongs to.

        tokens: of its prompt; those of its blocks if it is not said.
        """
        known = self.blocks.known(keys) * self.shape.block_tokens
        self._enter_tenant(tenant)
        session = attribute(self.table, keys, asked_id, tenant, now)
        self._begin_use(session, request_id, now, self._tokens(keys, tokens), known)
        self._running[request_id] = session
        if hints is not NO_HINTS:
            self._hints[request_id] = hints
            if self.prefetch_lead_s is not None:
                self._prefetch_named(hints.prefetch, tenant, late=now + PATIENCE * self.idle_after_s)
        return session.session_id

    def request_finished(
        self, request_id: str, keys: Sequence[bytes], now: float, *, tokens: int | None = None
    ) -> Outcome | None:
        """A request ended, however it did; `keys` are the blocks whose KV was computed, prompt and output.

        tokens: of prompt and output. Returns what came of the request's hints.
        """
        session = self._running.pop(request_id, None)
        hints = self._hints.pop(request_id, NO_HINTS)
        self._restored.pop(request_id, None)
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
        refused = self._take_hints(session, hints, now)
        self._end_use(session, request_id, now)
        if hints.release and session.chain and not session.requests:
            self._forget_session(session, DropCause.RELEASED)
        return Outcome(session.told_id, session.pinned, refused)

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
            self._unwait(session, session.chain)
        begin(session, tokens, known_tokens, now)
        session.requests.add(request_id)
        if session.state is not SessionState.HOT:
            self.table.set_state(session, SessionState.HOT, now)
        self.table.used(session, now)
        self.copies.used(session)

    def _end_use(self, session: Session, request_id: str, now: float) -> None:
        session.requests.discard(request_id)
        self.table.used(session, now)
        if session.requests:
            return
        if len(session.chain) < self.min_blocks:
            self._cut(session, 0, DropCause.ABANDONED)
        else:
            self.table.set_state(session, SessionState.IDLE, now)
            self.table.remember(session)
            session.left_tokens = 0

    # -- prefetch -------------------------------------------------------------------------------------

    def take_prefetches(self, room: int, now: float, limit: int | None = None) -> list[Prefetch]:
        """Cold sessions, up to `limit`, that are expected and fit into so many blocks together; answer each with
        prefetch_finished.

        Their codes are not dropped until then. Those that do not fit wait until they are late.
        """
        taken: list[Prefetch] = []
        for session in self._awaited(now):
            if len(taken) == limit:
                break
            if len(session.chain) <= room:
                del self._to_prefetch[session.session_id]
                room -= len(session.chain)
                keys = [block.key for block in session.chain]
                self.restore_started(prefetch_id(session.session_id), keys)
                taken.append(Prefetch(session.session_id, keys))
        return taken

    def prefetch_finished(
        self, session_id: str, complete: bool, failed: Iterable[bytes], now: float, spoiled: Iterable[bytes] = ()
    ) -> None:
        """All blocks of the session are hot now, or not all; see restore_finished."""
        self.restore_finished(prefetch_id(session_id), failed, spoiled)
        session = self.table.by_id.get(session_id)
        if complete and session is not None and session.state is SessionState.COLD:
            self.table.set_state(session, SessionState.IDLE, now)

    # -- restore --------------------------------------------------------------------------------------

    def match(self, keys: Iterable[bytes]) -> int:
        """How many of these keys, from the first on without a gap, can be restored."""
        count, find, cold = 0, self.blocks.get, CodeState.COLD
        for key in keys:
            block = find(key)
            if block is None or block.code is not cold:
                break
            count += 1
        return count

    def restore_started(self, request_id: str, keys: Sequence[bytes]) -> None:
        """These codes, which matched, are being read for the request; they are not dropped until it ends."""
        blocks = [block for key in keys if (block := self.blocks.get(key)) is not None]
        self.blocks.pin(blocks, +1)
        self._restoring[request_id] = blocks

    def restore_finished(self, request_id: str, failed: Iterable[bytes] = (), spoiled: Iterable[bytes] = ()) -> None:
        """The restore ended; codes in `failed`, and exact copies in `spoiled`, could not be read and are dropped."""
        blocks = self._restoring.pop(request_id, [])
        self.blocks.pin(blocks, -1)
        if request_id in self._running:
            self._restored[request_id] = blocks
        keys = set(failed)
        unreadable = [block for block in blocks if block.key in keys]
        self._drop(unreadable, DropCause.FAILED)
        self._drop([block for block in blocks if not block.users], DropCause.ABANDONED)
        self._bury(unreadable)
        if self.table.front is not None:
            self.table.front.read(blocks)
        self.copies.spoiled({block.key for block in blocks} & set(spoiled))
        self.copies.review(blocks)

    # -- eviction -------------------------------------------------------------------------------------

    @property
    def next_deadline(self) -> float | None:
        """When the session that is idle for longest is due, or something else is; None if nothing is."""
        first = next(iter(self.table.idle.values()), None)
        idle = None if first is None else first.idle_since + self.idle_after_s
        return min((when for when in (idle, self._ttls.first, self._expected.first) if when is not None), default=None)

    def sweep(self, now: float) -> None:
        """Start to evict every session that is idle for long enough, and forget those whose time to live is over."""
        self._expire(now)
        while (first := next(iter(self.table.idle.values()), None)) and first.idle_since + self.idle_after_s <= now:
            self._evict(first, now)

    def relieve(self, wanted: int, now: float) -> bool:
        """Memory is short: evict idle sessions in policy order until `wanted` exposed blocks are under way.

        Returns whether any session was chosen.
        """
        goal = max(0, self.blocks.exposed - wanted)
        chosen = False
        if self.blocks.exposed > goal:
            for session in self.table.hot_victims():
                if session.retry_after <= now and any(block.exposed for block in reversed(session.chain)):
                    self.table.hot.evicted(session.session_id)
                    self._evict(session, now)
                    chosen = True
                    if self.blocks.exposed <= goal:
                        break
        return chosen

    def spilled(self, key: bytes, now: float, copied: bool = True) -> None:
        """Every rank has put the codes of this block into its tier, and the exact copy that it should have."""
        if key in self._stale:
            self.spill_failed(key, now)
        if (block := self._spilling(key)) is None:
            return
        self.blocks.change(block, code=CodeState.COLD)
        if block.exact:
            self.copies.made(block, copied)
        if not block.hot:
            self._releases.append(key)
        for session in self._waiters_of(block):
            self.table.touch(session)
            session.evict_encoded += 1
            self._finish_eviction(session, now)
        if not block.users:
            self._drop([block], DropCause.ABANDONED)

    def spill_failed(self, key: bytes, now: float) -> None:
        """A rank could not store this block: its sessions stay hot; pressure leaves them be for a while."""
        if (block := self._spilling(key)) is None:
            return
        cause = DropCause.RESET if key in self._stale else DropCause.FAILED
        self._stale.discard(key)
        self._forget_codes([block], cause)  # some rank may have stored its shard
        for session in self._waiters_of(block):
            self._unwait(session, session.chain)
            session.retry_after = now + self.idle_after_s
            self.table.set_state(session, SessionState.IDLE, now)
        self._bury([block])

    def lost(self, key: bytes, now: float) -> None:
        """A block that was to be encoded is not in the pool any more: what follows it is of no use."""
        if (block := self._spilling(key)) is None:
            return
        self._stale.discard(key)
        self.blocks.change(block, code=CodeState.NONE)
        for session in self._waiters_of(block):
            self._cut(session, block.depth, DropCause.ABANDONED)
            self._finish_eviction(session, now)
        self._bury([block])

    def reset(self) -> None:
        """Forget all KV, hot and cold: the weights changed, or somebody asked for it."""
        for request_id in list(self._restoring):  # they read from a store that is being emptied
            self.restore_finished(request_id)
        for session in list(self.table.by_id.values()):
            self._cut(session, 0, DropCause.RESET)
        self._stale.update(block.key for block in self.blocks)  # what is left is being encoded
        self._releases.clear()

    def _evict(self, session: Session, now: float) -> None:
        """Queue what has no codes yet, tail first, so that the head stays hot for longest."""
        self.table.set_state(session, SessionState.EVICTING, now)
        session.evict_began, session.evict_encoded = now, 0
        self.copies.move_window(session)
        needed = [block for block in session.chain if block.code is CodeState.NONE]
        granted = self._make_room(len(needed), session)
        if granted < len(needed):
            self._cut(session, needed[granted].depth, DropCause.BUDGET)
        for block in reversed(needed[:granted]):
            block.tenant = session.tenant  # who has it stored pays for it
            self.blocks.change(block, code=CodeState.QUEUED)
            self._queue[block.key] = None
        self.copies.order(session, self._free, self._left(session.tenant))
        for block in session.chain:
            if block.in_flight:
                block.waiters[session] = None
                session.pending += 1
            elif not block.hot:
                self._releases.append(block.key)
        self._finish_eviction(session, now)

    def _finish_eviction(self, session: Session, now: float) -> None:
        if session.pending or not session.chain:
            return
        self.table.set_state(session, SessionState.COLD, now)
        self._bury(session.chain)
        if not session.chain:
            return
        self._evictions.append(
            Eviction(
                session_id=session.session_id,
                blocks=len(session.chain),
                tokens=len(session.chain) * self.shape.block_tokens,
                encoded=session.evict_encoded,
                idle_s=session.evict_began - session.last_used,
                took_s=now - session.evict_began,
                exact=self.copies.count(session),
            )
        )

    def _spilling(self, key: bytes) -> Block | None:
        block = self.blocks.get(key)
        return block if block is not None and block.code is CodeState.SPILLING else None

    def _waiters_of(self, block: Block) -> list[Session]:
        """The sessions that waited for a block, which is answered for now."""
        sessions = list(block.waiters)
        block.waiters.clear()
        for session in sessions:
            session.pending -= 1
        return sessions

    # -- what is to be done ---------------------------------------------------------------------------

    def take_drops(self) -> list[Drop]:
        """Codes to remove, before any spill taken later is begun."""
        taken, self._drops = self._drops, []
        return taken

    def take_releases(self) -> list[bytes]:
        """Blocks whose bf16 copy nobody needs any more."""
        keys, self._releases = self._releases, []
        return [key for key in keys if (b := self.blocks.get(key)) is None or not (b.hot or b.in_flight)]

    def take_spills(self, limit: int) -> list[bytes]:
        """Up to `limit` blocks to encode now; each must be answered by spilled, spill_failed or lost."""
        taken: list[bytes] = []
        while self._queue and len(taken) < limit:
            key, _ = self._queue.popitem(last=False)
            taken.append(key)
            block = self.blocks.get(key)
            assert block is not None
            self.blocks.change(block, code=CodeState.SPILLING)
        return taken

    def take_moves(self) -> list[bytes]:
        """Blocks that are to leave the fast tier first, if it gets too small for the spills that were taken."""
        return self.table.front.choose(self.table.by_id) if self.table.front is not None else []

    def take_evictions(self) -> list[Eviction]:
        """Evictions that ended since the last call, for logs and metrics."""
        taken, self._evictions = self._evictions, []
        return taken

    @property
    def has_work(self) -> bool:
        """Whether something is to be taken, or an answer to a taken spill is outstanding."""
        return bool(self._queue or self._releases or self._drops or self.blocks.spilling or self.copies.has_drops)
