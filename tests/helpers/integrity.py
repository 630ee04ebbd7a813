"""Checks of the manager's books: every total is counted again, and every link is followed both ways.

They take time linear in blocks and sessions.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from math import inf
from typing import Any

import numpy as np

from manthan.manager.driver import Driver
from manthan.manager.pool import BlockName
from manthan.manager.session.blocks import NO_GROUP, SAVED, STORING
from manthan.manager.session.manager import SessionManager
from manthan.manager.session.resume_points import MOST_SPARE, SPARE_SHARE
from manthan.manager.session.table import MOST_RELATIVES, Order, ResumePoint, qualified
from manthan.manager.tiers.arena import GRANULE, Arena
from manthan.manager.tiers.arena_tier import ArenaTier
from manthan.policies.ranking import Ranking


class IntegrityError(AssertionError):
    """Says in one sentence what does not agree."""


Findings = Iterator[tuple[bool, str]]


def check_integrity(manager: SessionManager, driver: Driver | None = None) -> None:
    """Raise IntegrityError for the first thing that is not as it must be.

    driver: its books are checked as well. No call of it may be under way.
    """
    for checks in (_rows, _totals, _sessions, _links, _points, _orders, _budget, _deadlines):
        _raise_for(checks(manager))
    if driver is not None:
        _raise_for(_under_way(manager, driver))


def check_store(store: Arena | ArenaTier) -> None:
    """Raise IntegrityError if a tier's books do not agree. Nothing may be under way there."""
    if isinstance(store, Arena):
        _raise_for(_holes(store))
        return
    with store._lock:
        _raise_for(_placed(store))


def check_erased(slab: Any, step: int = 1) -> None:
    """Raise IntegrityError if a byte of a tier next to a GPU is not zero that is no stored block's.

    step: an encoder may write up to a multiple of it.
    """
    bytes_ = slab.buffer.cpu().numpy().copy()
    for block in slab.blocks().values():
        left = -(-block.nbytes // step) * step
        for start, nbytes in block.extents:
            bytes_[start : start + min(left, nbytes)] = 0
            left -= min(left, nbytes)
    if bytes_.any():
        [found] = bytes_.nonzero()
        raise IntegrityError(f"of {len(bytes_)} bytes, {len(found)} are not erased, that at {found[0]} first")


def stored(manager: SessionManager) -> Iterator[BlockName]:
    """Yield the names of the blocks that the tiers have."""
    blocks = manager.blocks
    for row in blocks.rows().tolist():
        if blocks.status[row] & SAVED and blocks.group[row] != NO_GROUP:
            yield blocks.name(row)


def _raise_for(findings: Findings) -> None:
    for right, sentence in findings:
        if not right:
            raise IntegrityError(sentence)


# -- blocks -----------------------------------------------------------------------------------------------


def _rows(manager: SessionManager) -> Findings:
    """Users, holds, pins and status of every row, and the index."""
    blocks, sessions = manager.blocks, manager.table.by_id.values()
    rows = blocks.rows()
    free = blocks._free[: blocks._free_count].tolist()
    yield len(set(free)) == len(free), "a row is free twice"
    for name in ("users", "holds", "pins", "status", "nbytes", "reserved", "inner", "moved"):
        yield not getattr(blocks, name)[free].any(), f"a free row has {name}, and a new block would inherit it"
    users, holds, pins = Counter[int](), Counter[int](), Counter[int]()
    for session in sessions:
        users.update(session.rows.tolist())
    for point in manager.points.at.values():
        users.update(point.rows.tolist())
    for request in manager.requests.values():
        holds.update(request.rows.tolist())
    for loaded in manager._loading.values():
        pins.update(loaded.tolist())
    for name, found in (("users", users), ("holds", holds), ("pins", pins)):
        kept = Counter(dict(zip(rows.tolist(), getattr(blocks, name)[rows].tolist(), strict=True)))
        yield +kept == found and min(kept.values(), default=0) >= 0, f"{name} are {+kept}, but there are {found}"
    status, group = blocks.status[rows], blocks.group[rows]
    saved, storing = (status & SAVED) > 0, (status & STORING) > 0
    needed = (blocks.users[rows] > 0) | (blocks.holds[rows] > 0) | (blocks.pins[rows] > 0) | (status > 0)
    yield bool(needed.all()), f"rows {rows[~needed].tolist()} are needed by nobody"
    beside = group >= 0 if manager.shape.stores_main else group == NO_GROUP
    yield (
        bool(((blocks.nbytes[rows] > 0) == (saved & (group != NO_GROUP))).all()),
        "bytes are not those of saved blocks",
    )
    known = blocks.inner[rows] > 0
    yield bool((known[:, :-1] | ~known[:, 1:]).all()), "a block has a size with more parts and none with fewer"
    yield bool((blocks.inner[rows] <= blocks.nbytes[rows, None]).all()), "a block is smaller with more parts"
    is_told = ~known.any(axis=1) | (known.sum(axis=1) == blocks.level[rows])
    yield bool(is_told.all()), "a block has another level than refinements"
    yield bool(((blocks.reserved[rows] > 0) == storing).all()), "bytes are reserved for what is not being stored"
    yield bool((saved | (blocks.moved[rows] == 0)).all()), "a block has moved that is not saved"
    yield bool((saved | (blocks.pins[rows] == 0)).all()), "a block is read that is not saved"
    yield bool((saved | beside | (group != NO_GROUP)).all()), "a block that is never stored does not count as saved"
    for number in np.unique(group).tolist():
        of_group = rows[group == number]
        same = (blocks.find(number, blocks.hashes(of_group)) == of_group).all()
        yield bool(same), f"rows of group {number} are not found by their hashes"
    by_number = manager.table.by_number
    for row, origin in zip(rows.tolist(), blocks.origin[rows].tolist(), strict=True):
        session = by_number.get(origin)
        known = not origin or (session is not None and session.has(row, int(blocks.depth[row])))
        yield known, f"row {row} says that session {origin} has it"


def _totals(manager: SessionManager) -> Findings:
    """Sums over rows, by tenant and altogether."""
    blocks = manager.blocks
    rows = blocks.rows()
    saved = rows[(blocks.status[rows] & SAVED) > 0]
    storing = rows[(blocks.status[rows] & STORING) > 0]
    nbytes, reserved = blocks.nbytes[rows].astype(int), blocks.reserved[rows].astype(int)
    taken = Counter[int]()
    for tenant, size in zip(blocks.tenant[rows].tolist(), (nbytes + reserved).tolist(), strict=True):
        taken[tenant] += size
    moved = [int(nbytes[(blocks.moved[rows] >> tier & 1) > 0].sum()) for tier in range(8)]
    counted = {
        "rows": (len(blocks), len(rows)),
        "bytes saved": (blocks.saved_nbytes, int(nbytes.sum())),
        "bytes reserved": (blocks.reserved_nbytes, int(reserved.sum())),
        "saved by group": (+Counter(blocks.saved_blocks), Counter(blocks.group[saved].tolist())),
        "being stored": (blocks.storing, len(storing)),
        "refined": (blocks._refined.tolist(), [int(((blocks.inner[saved] > 0).sum(1) == n).sum()) for n in range(5)]),
        "exact": (blocks.exact_blocks, int((blocks.exact[saved] > 0).sum())),
        "moved": (blocks.moved_nbytes, moved),
        "of tenants": (+Counter(dict(enumerate(blocks._tenant_nbytes.tolist()))), +taken),
        "index": (int((blocks._index >= 0).sum()), len(rows)),
        "states": (+manager.table.states, Counter(session.state for session in manager.table.by_id.values())),
    }
    for name, (kept, found) in counted.items():
        yield kept == found, f"{name} is kept as {kept}, but there are {found}"
    numbers = list(blocks._tenants.values())
    yield len(set(numbers)) == len(numbers), f"tenants have the same number: {blocks._tenants}"
    yield set(+taken) <= set(numbers), f"bytes are taken by tenants {+taken} of {blocks._tenants}"


# -- sessions ---------------------------------------------------------------------------------------------


def _sessions(manager: SessionManager) -> Findings:
    blocks, table, group = manager.blocks, manager.table, manager.shape.session_group
    for session_id, session in table.by_id.items():
        rows = session.rows
        same = session.session_id == session_id and table.by_number.get(session.number) is session
        yield same, f"{session_id} is {session.session_id}, and its number is another's"
        in_place = (blocks.depth[rows] == np.arange(len(rows))).all() and (blocks.group[rows] == group).all()
        yield bool(in_place), f"blocks of {session_id} are of depths {blocks.depth[rows].tolist()}"
        yield len(rows) > 0 or bool(session.requests), f"{session_id} has neither blocks nor requests"
        if session.is_cold:
            yield not session.requests, f"{session_id} is cold, and requests run: {session.requests}"
            yield bool(blocks.is_saved(rows).all()), f"{session_id} is cold, and not all of it is saved"
    yield len(table.by_number) == len(table.by_id), f"{len(table.by_number)} numbers of {len(table.by_id)} sessions"
    for session in manager.saving:
        yield table.by_id.get(session.session_id) is session, f"{session.session_id} is being saved and is gone"
        yield not session.requests and not session.is_cold, f"{session.session_id} is being saved, {session.state}"
    asked = {(request_id, session.session_id) for session in table.by_id.values() for request_id in session.requests}
    running = {(request_id, request.session.session_id) for request_id, request in manager.requests.items()}
    yield running == asked, f"requests run for {running}, and sessions say {asked}"


def _links(manager: SessionManager) -> Findings:
    """Ends, names, prompts and tips by which sessions are found."""
    table = manager.table
    sessions = list(table.by_id.values())
    ends = {(int(session.rows[-1]), session) for session in sessions if len(session.rows)}
    kept = {(row, session) for row in table._ending._found for session in table._ending[row]}
    yield ends == kept, f"{len(ends)} sessions have an end, and {len(kept)} ends are kept"
    names = {(qualified(one.name, one.tenant), one) for one in sessions if one.name is not None}
    named = {(name, session) for name in table._named._found for session in table._named[name]}
    yield names == named, f"{len(names)} names are in use, and {len(named)} are kept"
    counts = Counter(session.tenant for session in sessions)
    owned = {(tenant, session) for tenant, some in table._of_tenant.items() for session in some or [None]}
    yield owned == {(session.tenant, session) for session in sessions}, "tenants do not have their sessions"
    order_of = {tenant: order for (tenant, level), order in table.orders.items() if tenant is not None and not level}
    for name, by_tenant in (("orders", order_of), ("numbers", table._anonymous), ("branches", table._forks)):
        yield set(by_tenant) <= set(counts), f"{name} are kept of tenants {set(by_tenant)}, and there are {set(counts)}"
    families = {((session.tenant, session.family), session) for session in sessions if session.family is not None}
    kept = {(family, session) for family, some in table._families.items() for session in some or [None]}
    yield families == kept, f"{len(families)} sessions have a family, and {len(kept)} are kept"
    yield all(len(some) <= MOST_RELATIVES for some in table._families.values()), "a family is too large"
    yield set(manager._heirs) <= set(sessions), "a session that is gone is to enter the order"
    yield set(table._prompts.values()) <= set(sessions), "a prompt is of a session that is gone"
    last = {one.prompt_end: one for one in sessions if table._prompts.get(one.prompt_end) is one}
    yield table._prompts == last, "prompts by name are not those by session"
    for tip, session in table._remembered.items():
        yield session.tenant.encode() + session.tip == tip, f"{session.session_id} is remembered by another's tip"
    for session in sessions:
        if len(session.rows):
            longest = table._longest(session.rows, session.name, session.tenant)
            same = longest is not None and np.array_equal(longest.rows, session.rows)
            yield same, f"{session.session_id} is not found by its blocks"


def _points(manager: SessionManager) -> Findings:
    points, blocks = manager.points, manager.blocks
    found: dict[int, ResumePoint] = {}
    for session in manager.table.by_id.values():
        depths = [point.depth for point in session.points]
        yield depths == sorted(set(depths)), f"{session.session_id} has resume points at {depths}"
        for point in session.points:
            found[point.row] = point
            yield session.has(point.row, point.depth - 1), f"{session.session_id} does not reach its resume point"
            mutual = session in point.sessions and points.at.get(point.row) is point
            yield mutual, f"the resume point of {session.session_id} at {point.depth} does not know it"
        if points.is_needed and session.is_cold:
            last = depths[-1] if depths else 0
            yield last == len(session.rows), f"{session.session_id} is cold behind its last resume point, at {last}"
        stand = [point.depth for point in session.points if points.stands(point)]
        spare = [point.depth for point in points._spare.get(session, ())]
        stand = [depth for depth in stand if depth != session.prompt_depth and depth not in spare]
        yield len(stand) <= 2, f"{session.session_id} keeps resume points that a deeper one makes worthless, at {stand}"
        yield set(spare) <= set(depths), f"{session.session_id} has spare resume points at {spare}, of {depths}"
        yield len(spare) <= MOST_SPARE, f"{session.session_id} has {len(spare)} spare resume points"
    live = set(manager.table.by_id.values())
    yield points._spare.keys() == points._taken.keys() <= live, "spare resume points of sessions that are gone"
    taken, room = sum(points._taken.values()), SPARE_SHARE * manager.budget_nbytes
    yield taken <= room, f"spare resume points take {taken} bytes, of {room:.0f}"
    yield found == points.at, f"{len(points.at)} resume points are kept, and {len(found)} needed"
    stand_now = {row for row, point in found.items() if points.stands(point)}
    yield stand_now == points.standing, f"{len(points.standing)} resume points count as saved, not {len(stand_now)}"
    parts: dict[int, dict[int, ResumePoint]] = {}
    for row, point in found.items():
        yield set(point.sessions) <= set(manager.table.by_id.values()), "a resume point is of a session that is gone"
        for part in point.rows.tolist():
            parts.setdefault(part, {})[row] = point
    yield points._of == parts, "blocks of resume points do not know them"
    read = {row for loaded in manager._loading.values() for row in loaded.tolist()}
    for row in blocks.rows().tolist():
        if blocks.group[row] not in (manager.shape.session_group, NO_GROUP):
            needed = row in parts or row in read or blocks.status[row] & STORING
            yield bool(needed), f"row {row} of another group belongs to no resume point"


# -- orders, pins and deadlines ---------------------------------------------------------------------------


def _orders(manager: SessionManager) -> Findings:
    table, blocks = manager.table, manager.blocks
    listed = _listed(table.order)
    yield listed <= table.by_id.keys(), f"{listed - table.by_id.keys()} are in the order, and gone"
    yield set(table.order._level_of) == listed, "an order's levels are not those of its policies"
    for session_id in listed:
        session, level = table.by_id[session_id], table.order._level_of[session_id]
        yield not session.is_pinned, f"{session_id} is pinned and may be dropped"
        yield level == session.priority or bool(session.requests), f"{session_id} has priority {session.priority}"
    for (tenant, level), order in table.orders.items():
        if tenant is None or level:
            continue
        own = {session_id for session_id in listed if table.by_id[session_id].tenant == tenant}
        yield _listed(order) == own, f"the order of {tenant!r} has {_listed(order)}, and that of all {own}"
    for session in table.by_id.values():
        rows = session.rows
        gives = (blocks.users[rows] == 1) & blocks.is_droppable(rows) & (blocks.nbytes[rows] > 0)
        gives[: session.kept] = False
        if not session.is_cold:  # others may have stored what it had in common with them
            gives &= blocks.origin[rows] == session.number
        is_free = not gives.any() or session.is_pinned or session.session_id in listed or session in manager._heirs
        waits = session.session_id in manager.due or session in manager.saving  # it is listed again when it is saved
        is_free |= not session.is_cold and waits
        yield is_free, f"{session.session_id} has compressed blocks that nobody would drop"


def _listed(order: Order) -> set[str]:
    listed = list(order.victims())
    assert len(set(listed)) == len(listed), f"a session is twice in an order: {listed}"
    return set(listed)


def _budget(manager: SessionManager) -> Findings:
    blocks, shares, budget = manager.blocks, manager.shares, manager.budget_nbytes
    yield blocks.taken_nbytes <= max(budget, 0), f"{blocks.taken_nbytes} bytes are taken of {budget}"
    for tenant in blocks._tenants:
        share, taken = shares.of_tenant(tenant), blocks.taken_by(tenant)
        yield share >= 1 or taken <= share * budget, f"tenant {tenant!r} takes {taken} bytes, of {share:g} of {budget}"
    pinned = {session for session in manager.table.by_id.values() if session.is_pinned or session.kept}
    yield (
        set(manager.said.pinned) == pinned,
        f"{len(pinned)} sessions are pinned, and {len(manager.said.pinned)} are counted",
    )
    total, own = sum(manager.said.pinned.values()), Counter[str]()
    for session, nbytes in manager.said.pinned.items():
        own[session.tenant] += nbytes
    yield total <= shares.pinned * budget, f"pinned sessions take {total}, of {shares.pinned:g} of {budget}"
    for tenant, nbytes in own.items():
        most = shares.pinned * min(1.0, shares.of_tenant(tenant)) * budget
        yield nbytes <= most, f"pinned sessions of {tenant!r} take {nbytes}, of {most}"
    heads = [row for row in manager._heads if blocks.status[row] and blocks.exact[row] >= manager.shape.block_tokens]
    taken = sum(int(blocks.nbytes[row]) for row in heads)
    yield taken <= shares.heads * budget, f"shared heads take {taken} bytes, of {shares.heads:g} of {budget}"


def _deadlines(manager: SessionManager) -> Findings:
    table, said = manager.table, manager.said
    for name, deadlines in (("saving", manager.due), ("end of life", said.ttls), ("end of a pin", said.pins)):
        whens = _whens(deadlines)
        yield whens.keys() <= table.by_id.keys(), f"{name}: {whens.keys() - table.by_id.keys()} are gone"
        first = min(whens.values(), default=inf)
        yield deadlines.least == first, f"{name}: the first is kept as {deadlines.least}, and is {first}"
    pins = _whens(said.pins)
    for session in table.by_id.values():
        ends = [until for until, _ in session.keeps] + ([session.pinned_until] if session.pinned_until else [])
        until = min(ends, default=None)
        yield pins.get(session.session_id) == until, f"the pin of {session.session_id} ends at {until}"
    for session_id in _whens(manager.due):
        state = table.by_id[session_id].state
        yield not table.by_id[session_id].requests, f"{session_id} is {state} and is to be saved"


def _whens(deadlines: Ranking) -> dict[str, float]:
    return {session_id: deadlines._entries[session_id].rank for session_id in deadlines.in_order()}


# -- transfers --------------------------------------------------------------------------------------------


def _under_way(manager: SessionManager, driver: Driver) -> Findings:
    """The driver's requests, stores and loads."""
    blocks, pool = manager.blocks, driver._pool
    storing = [row for store in driver._stores.values() for row in store.rows.tolist()]
    kept = [row for row in blocks.rows().tolist() if blocks.status[row] & STORING]
    yield sorted(storing) == kept, f"rows {sorted(storing)} are being stored, and {kept} are marked"
    jobs = {job.job_id: request_id for request_id, load in driver._loading.items() for job in load.jobs}
    yield driver._load_of == jobs, "loads by job are not those by request"
    waiting = set(driver._waiting)
    yield waiting <= manager.requests.keys(), f"{waiting - manager.requests.keys()} wait for blocks and are gone"
    table = manager.table
    for name, ids in (
        ("to be prefetched", driver.prefetcher.to_load.keys()),
        ("expected", _whens(driver.prefetcher.expected).keys()),
        *(("in a front tier", used.keys()) for used in driver.fronts._used),
    ):
        yield ids <= table.by_id.keys(), f"{name}: {ids - table.by_id.keys()} are gone"
    loads = set(driver._loading) | ({_prefetch_id(driver)} if driver.prefetcher.load else set())
    yield set(manager._loading) <= loads, f"rows are read by {set(manager._loading)}, and loads are {loads}"
    held = Counter(block for store in driver._stores.values() for block in store.block_ids)
    if hasattr(pool, "users"):
        for block, times in held.items():
            yield pool.users(block) >= times, f"block {block} is to be read and is not referenced"


def _prefetch_id(driver: Driver) -> str:
    load = driver.prefetcher.load
    assert load is not None
    return f"prefetch of {load.session_id}"


def check_empty(manager: SessionManager) -> None:
    """Raise IntegrityError if anything is left of sessions that are all forgotten. Nothing may be under way."""
    _raise_for(_left(manager))


def _left(manager: SessionManager) -> Findings:
    table, blocks = manager.table, manager.blocks
    kept: dict[str, object] = {name: getattr(table, name) for name in _BY_SESSION}
    kept |= {"ends": table._ending._found, "names": table._named._found}
    kept["orders"] = [tenant for tenant, _ in table.orders if tenant is not None]
    kept |= {"points": manager.points.at, "parts": manager.points._of, "saving": manager.saving}
    kept |= {"pins": manager.said.pinned, "loads": manager._loading, "requests": manager.requests}
    for name, books in kept.items():
        yield not books, f"{name} are left: {books}"
    for deadlines in (manager.due, manager.said.ttls, manager.said.pins):
        yield not len(_whens(deadlines)) and deadlines.least == inf, "a deadline is left"
    yield not len(blocks), f"{len(blocks)} rows are left"
    totals = [blocks.saved_nbytes, blocks.reserved_nbytes, blocks.storing, blocks.exact_blocks, *blocks.moved_nbytes]
    yield not any(totals) and not blocks._tenant_nbytes.any(), f"totals are left: {totals}"
    yield not table.order._level_of, f"{table.order._level_of} are left in the order"


_BY_SESSION = ("by_id", "by_number", "_of_tenant", "_families", "_prompts")


# -- tiers ------------------------------------------------------------------------------------------------


def _holes(arena: Arena) -> Findings:
    holes = sorted(arena._size_at.items())
    for (start, size), (following, _) in pairwise(holes):
        yield start + size < following, f"the hole of {size} bytes at {start} reaches the one at {following}"
    whole = all(size > 0 and not (size % GRANULE or start % GRANULE) for start, size in holes)
    yield whole, f"a hole does not begin or end at a multiple of {GRANULE}"
    free = sum(size for _, size in holes)
    yield free == arena.available, f"{arena.available} bytes count as free, but the holes differ"
    by_size = sorted((start, size) for size, start in arena._holes)
    by_end = sorted((start, end - start) for end, start in arena._start_before.items())
    yield by_size == by_end == holes, "the holes by size, by start and by end are not the same"
    yield arena._holes == sorted(arena._holes), "the holes are not in order"


def _placed(store: ArenaTier) -> Findings:
    arena = store._arena
    yield from _holes(arena)
    extents = sorted(extent for placed in store._blocks.values() for extent in placed.extents)
    holes = arena._size_at.items()
    for (start, size), (following, _) in pairwise(sorted([*extents, *holes])):
        yield start + size <= following, f"what is at {start} reaches what is at {following}"
    taken = sum(extent.nbytes for extent in extents) + store._dropped_nbytes
    yield bool(store._writing) or taken == arena.used, f"{arena.used} bytes are taken, but blocks take {taken}"
    yield store.peak <= store.max_bytes, f"{store.peak} of {store.max_bytes} bytes were taken"
