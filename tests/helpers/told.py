"""What a manager's sessions are told as, in tests without a server."""

from manthan.manager.sessions.listing import Listing
from manthan.manager.sessions.manager import SessionMemoryManager
from manthan.manager.sessions.session import SessionInfo


def listing_of(manager: SessionMemoryManager) -> Listing:
    """Return a listing whose tiers are called by their numbers."""
    return Listing(manager.table, [str(tier) for tier in range(len(manager.table.fronts) + 1)])


def told(manager: SessionMemoryManager, session_id: str) -> SessionInfo:
    """Return what is told of the session of that id."""
    return listing_of(manager).info(manager.table.by_id[session_id])


def all_told(manager: SessionMemoryManager) -> list[SessionInfo]:
    """Return what is told of all sessions that have KV, or a request."""
    return list(map(listing_of(manager).info, manager.table.by_id.values()))
