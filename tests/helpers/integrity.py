"""Whether books agree with each other: every total counted again, every link followed both ways.

It takes time linear in blocks and sessions.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from manthan.manager.sessions.manager import SessionMemoryManager
from manthan.manager.sessions.session import HOT_STATES, Block, CodeState, Session, SessionState
from manthan.manager.tiers.arena import GRANULE, Arena
from manthan.manager.tiers.arena_tier import ArenaTier
from manthan.manager.work import Name


class IntegrityError(AssertionError):
    """Says in one sentence what does not agree."""


Findings = Iterator[tuple[bool, str]]


def check_integrity(manager: SessionMemoryManager) -> None:
    """Raise IntegrityError for the first thing that is not as it must be."""
    for checks in (_budget, _totals, _blocks, _anchors, _sessions, _tips, _chains, _order):
        _raise_for(checks(manager))


def check_store(store: Arena | ArenaTier) -> None:
    """The same of a store's own books. Nothing may be under way there."""
    if isinstance(store, Arena):
        _raise_for(_holes(store))
        return
    with store._lock:
        _raise_for(_placed(store))


def _raise_for(findings: Findings) -> None:
    for right, sentence in findings:
        if not right:
            raise IntegrityError(sentence)


def _holes(arena: Arena) -> Findings:
    holes = sorted(arena._size_at.items())
    for (start, size), (following, _) in pairwise(holes):
        yield start + size < following, f"the hole of {size} bytes at {start} reaches the one at {following}"
    yield not holes or sum(holes[-1]) <= arena._end, f"a hole ends behind the arena's end at {arena._end}"
    whole = all(size > 0 and not (size % GRANULE or start % GRANULE) for start, size in holes)
    yield whole, f"a hole does not begin or end at a multiple of {GRANULE}"
    free = sum(size for _, size in holes)
    yield free == arena.available, f"{arena.available} bytes count as free, but the holes differ"
    by_size = sorted((start, size) for size, starts in arena._starts.items() for start in starts)
    by_end = sorted((start, end - start) for end, start in arena._start_before.items())
    same = by_size == by_end == holes and arena._sizes == sorted(arena._starts)
    yield same, "the holes by size, by start and by end are not the same"
    in_order = all(starts and starts == sorted(starts) for starts in arena._starts.values())
    yield in_order, "the holes of one size are not in order"


def _placed(store: ArenaTier) -> Findings:
    arena = store._arena
    yield from _holes(arena)
    extents = sorted(extent for placed in store._blocks.values() for extent in placed.extents)
    holes = arena._size_at.items()
    for (start, size), (following, _) in pairwise(sorted([*extents, *holes])):
        yield start + size <= following, f"what is at {start} reaches what is at {following}"
    taken = sum(extent.nbytes for extent in extents) + store._dropped_nbytes
    yield store._writing or taken == arena.used, f"{arena.used} bytes are taken, but blocks take {taken}"
    yield store.peak <= store.max_bytes, f"{store.peak} of {store.max_bytes} bytes were taken"


def _tips(manager: SessionMemoryManager) -> Findings:
    tips, sessions = manager.table.tips, set(manager.table.by_id.values())
    for session in sessions:
        for block in session.chain:
            origin = block.origin
            is_holder = origin is None or (origin in sessions and block in origin.chain[block.depth : block.depth + 1])
            yield is_holder, f"block {block.key.hex()} has an origin without it"
    yield set(tips._prompt_of) <= sessions, "a prompt is of a session that is gone"
    same = {name: session for session, name in tips._prompt_of.items() if tips._prompts.get(name) is session}
    yield tips._prompts == same, "prompts by name are not those by session"


def _budget(manager: SessionMemoryManager) -> Findings:
    blocks, budget = manager.blocks, manager.budget
    yield blocks.reserved <= max(budget.nbytes, 0), f"{blocks.reserved} bytes are reserved of {budget.nbytes}"
    for tenant, nbytes in blocks.reserved_of.items():
        share = budget.shares.of_tenant(tenant)
        within = share >= 1 or nbytes <= share * budget.nbytes
        yield within, f"tenant {tenant!r} has reserved {nbytes} bytes, of {share:g} of {budget.nbytes}"
    pinned, share = manager._pruning.pinned, budget.shares.pinned
    within = pinned.total <= share * budget.nbytes
    yield within, f"pinned sessions take {pinned.nbytes}, of {share:g} of {budget.nbytes}"
    sessions = manager.table.by_id
    named = {name for name, session in sessions.items() if session.pinned}
    yield set(pinned.nbytes) == named, f"pinned are {named}, and {set(pinned.nbytes)} are counted"
    own: Counter[str] = Counter()
    for name in named:
        own[sessions[name].tenant] += pinned.nbytes[name]
    agree = pinned.total == own.total() and pinned.of_tenant == +own
    yield agree, f"pinned sessions take {own}, and {pinned.of_tenant} are counted"


def _totals(manager: SessionMemoryManager) -> Findings:
    table, all_blocks = manager.blocks, list(manager.blocks)
    code = Counter(block.code for block in all_blocks)
    room = {block: block.encoding.nbytes + (block.old.nbytes if block.old else 0) for block in all_blocks}
    tenants: Counter[str] = Counter()
    moved: Counter[int] = Counter()
    for block in all_blocks:
        tenants[block.tenant] += room[block] * block.reserves
        for tier in range(len(manager.table.fronts)):
            moved[tier] += block.encoding.nbytes * (block.moved >> tier & 1)
    counted = {
        "hot": (table.hot, sum(block.hot > 0 for block in all_blocks)),
        "exposed": (table.exposed, sum(block.exposed for block in all_blocks)),
        "queued": (table.queued, code[CodeState.QUEUED]),
        "spilling": (table.spilling, code[CodeState.SPILLING]),
        "cold": (table.cold, code[CodeState.COLD]),
        "exact": (table.exact, sum(b.encoding.exact > 0 for b in all_blocks if b.code is CodeState.COLD)),
        "cold by group": (+table.cold_of, Counter(b.group for b in all_blocks if b.code is CodeState.COLD)),
        "reserved": (table.reserved, sum(room[block] for block in all_blocks if block.reserves)),
        "stored": (
            table.stored,
            sum(room[b] - (b.encoding.nbytes if b.code is CodeState.QUEUED else 0) for b in all_blocks),
        ),
        "moved": (+table.moved, +moved),
        "of tenants": (+table.reserved_of, +tenants),
        "states": (
            +manager.table.states,
            Counter(session.state for session in manager.table.by_id.values()),
        ),
    }
    for name, (kept, found) in counted.items():
        yield kept == found, f"{name} is kept as {kept}, but there are {found}"


def _blocks(manager: SessionMemoryManager) -> Findings:
    users: dict[bytes, list[Session]] = {}
    for session in manager.table.by_id.values():
        for depth, block in enumerate(session.chain):
            same = manager.blocks.get(block.key) is block and block.depth == depth
            yield same, f"{block.key!r} is not the block that {session.session_id} has at {depth}"
            users.setdefault(block.key, []).append(session)
    pins = Counter(block for blocks in manager._restores.under_way.values() for block in blocks)
    for block in manager.blocks:
        if block.group is not None:
            continue
        states = [session.state for session in users.get(block.key, [])]
        running = states.count(SessionState.HOT)
        counts = (block.users, block.running, block.hot, block.pins)
        found = (
            len(states),
            running,
            sum(state in HOT_STATES for state in states),
            pins[block],
        )
        yield counts == found, f"{block.key!r} counts {counts}, but there are {found}"
        yield from _leaks(manager, block)
    queued = {block for block in manager.blocks if block.code is CodeState.QUEUED}
    yield manager._orders.queued() == queued, f"{len(queued)} blocks are queued, and the queue disagrees"


def _anchors(manager: SessionMemoryManager) -> Findings:
    anchors, used = {}, Counter[Block]()
    for session in manager.table.by_id.values():
        depths = [anchor.depth for anchor in session.anchors]
        yield depths == sorted(set(depths)), f"{session.session_id} has anchors at {depths}"
        for anchor in session.anchors:
            anchors[anchor.key] = anchor
            inside = anchor.depth <= len(session.chain) and session.chain[anchor.depth - 1].key == anchor.key
            yield inside, f"{session.session_id} has an anchor at {anchor.depth} that is none of its chain's places"
            mutual = session in anchor.sessions and manager._anchors.at(anchor.key) is anchor
            yield mutual, f"the anchor of {session.session_id} at {anchor.depth} does not know it"
        if manager._anchors.is_needed and session.state is SessionState.COLD:
            last = session.anchors[-1].depth if session.anchors else 0
            yield last == len(session.chain), f"{session.session_id} is cold behind its last anchor, at {last}"
        stand = [anchor.depth for anchor in session.anchors if anchor.stands and anchor.depth != session.prompt_depth]
        yield len(stand) <= 2, f"{session.session_id} keeps anchors that a deeper one makes worthless, at {stand}"
    for anchor in anchors.values():
        used.update(anchor.parts)
    standing = {key for key, anchor in anchors.items() if anchor.stands}
    yield manager._anchors._standing == standing, f"{len(standing)} anchors stand, not {manager._anchors.standing}"
    yield len(anchors) == len(manager._anchors), f"{len(manager._anchors)} anchors are kept, and {len(anchors)} needed"
    pins = Counter(block for blocks in manager._restores.under_way.values() for block in blocks)
    for block in manager.blocks:
        if block.group is not None:
            name, found = f"{block.key!r} of group {block.group}", (used[block], pins[block])
            counts = block.users, block.pins
            yield counts == found, f"{name} has users and pins {counts}, not {found}"
            needed = block.users or block.pins or block.code is CodeState.SPILLING
            yield bool(needed), f"{name} is a record that nobody needs"


def _leaks(manager: SessionMemoryManager, block: Block) -> Findings:
    name, queued = f"{block.key!r}", block.code is CodeState.QUEUED
    needed = block.users or block.pins or block.code is CodeState.SPILLING
    yield bool(needed), f"{name} is a record that nobody needs"
    yield block.code is CodeState.COLD or not block.pins, f"{name} is read, but has no codes"
    yield block.code is CodeState.COLD or not block.moved, f"{name} has moved, but has no codes"
    yield bool(block.waiters) or not queued, f"{name} is queued, and nobody waits for it"
    yield block.in_flight or not block.waiters, f"{name} is waited for, but is {block.code}"
    yield block.in_flight or block.old is None, f"{name} has codes to be replaced, but is {block.code}"
    reserves = block.reserves and manager.shape.group is not None
    yield reserves == (block.encoding.nbytes > 0), f"{name} is {block.code}, with {block.encoding}"
    evicting = all(s.state is SessionState.EVICTING and s.chain[block.depth] is block for s in block.waiters)
    yield evicting, f"{name} is waited for by a session that is not being evicted"


def _sessions(manager: SessionMemoryManager) -> Findings:
    for session in manager.table.by_id.values():
        name = session.session_id
        hot = session.state is SessionState.HOT
        yield hot == bool(session.requests), f"{name} is {session.state} with requests {session.requests}"
        yield bool(session.chain or session.requests), f"{name} has neither blocks nor requests"
        waits = sum(session in block.waiters for block in session.chain)
        yield session.pending == waits, f"{name} waits for {waits} blocks, and {session.pending} are counted"
        evicting = session.state is SessionState.EVICTING
        yield evicting == bool(waits), f"{name} is {session.state} and waits for {waits} blocks"
        headless = session.state is SessionState.COLD and any(
            block.users and not block.reserves and not block.hot for block in session.chain
        )
        yield not headless, f"{name} keeps a tail without its head"
    asked = {session.session_id for session in manager.table.by_id.values() if session.requests}
    running = {session.session_id for session in manager._running.values()}
    yield running == asked, f"requests run for {running}, and sessions say {asked}"


def _chains(manager: SessionMemoryManager) -> Findings:
    table, tips = manager.table, manager.table.tips
    sessions = list(table.by_id.values())
    ends = {((s.tenant, s.chain[-1].key), s) for s in sessions if s.chain}
    found = {(place, session) for place, some in tips._ending.items() for session in some or [None]}
    yield ends == found, f"{len(ends)} chains end, and {len(found)} tips are kept"
    names = {((s.tenant, name), s) for s in sessions for name in {s.asked_id, None}}
    named = {(place, session) for place, some in tips._named.items() for session in some or [None]}
    yield names == named, f"{len(names)} names are in use, and {len(named)} are kept"
    for session in sessions:
        if session.chain:
            longest = tips.longest([block.key for block in session.chain], session.asked_id, session.tenant)
            same = longest is not None and longest.chain == session.chain
            yield same, f"{session.session_id} is not found by its keys"


def _order(manager: SessionMemoryManager) -> Findings:
    table = manager.table
    since = [session.idle_since for session in table.idle.values()]
    yield since == sorted(since), "idle sessions are not in the order in which they became so"
    idle = {s.session_id for s in table.by_id.values() if s.state is SessionState.IDLE}
    victims = {session.session_id for session in table.hot_victims()}
    off = {name for name in idle if name in table.put_off}
    kept = set(table.idle) | off
    yield kept == idle == victims, f"idle are {idle}; kept as idle {kept}, as victims {victims}"
    apart = len(off) == len(table.put_off) and off.isdisjoint(table.idle)
    yield apart, f"{len(table.put_off)} sessions are put off, and {off} of the idle ones"
    cold = {s.session_id for s in table.by_id.values() if s.state in (SessionState.COLD, SessionState.EVICTING)}
    free = {name for name in cold if not table.by_id[name].pinned}
    listed = {session.session_id for session in table.cold_victims()}
    yield free <= listed, f"{free - listed} have codes that nobody would drop"
    due = manager.next_deadline
    ends = [table.put_off.first] if table.put_off.first is not None else []
    soonest = min((*(when + manager.idle_after_s for when in since), *ends), default=None)
    yield soonest is None or (due is not None and due <= soonest), f"a session is due at {soonest}, the next at {due}"


def stored(manager: SessionMemoryManager) -> Iterator[Name]:
    """By group and key, the blocks that the cold store has."""
    group = manager.shape.group
    for block in manager.blocks:
        if block.has_codes and (named := group if block.group is None else block.group) is not None:
            yield named, block.key
