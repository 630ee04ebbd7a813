"""Which session a new request belongs to, and what is known of it from earlier ones."""

from collections.abc import Sequence

from manthan.manager.sessions.session import Session, common_prefix
from manthan.manager.sessions.table import SessionTable


def attribute(
    table: SessionTable,
    keys: Sequence[bytes],
    asked_id: str | None,
    tenant: str,
    now: float,
) -> Session:
    """The tenant's session that these prompt keys extend, one remembered whose KV is gone, one whose last answer comes
    back changed, or a new one.

    A new one that goes on from the middle of another has that one's history: somebody changed an earlier message.
    """
    found = find(table, keys, asked_id, tenant)
    known = len(found.chain) if found is not None else 0
    remembered = table.tips.recall(keys[known:], asked_id, tenant)
    if remembered is not None and not _has_users(table, remembered):  # another session with this KV gets the request
        if table.by_id.get(remembered.session_id) is not remembered:
            table.revive(remembered)
        return remembered
    if found is not None:
        return found
    if (continued := _with_changed_answer(table, keys, asked_id, tenant)) is not None:
        return continued
    session = table.create(asked_id, tenant, now)
    _inherit(table, session, keys)
    return session


def find(table: SessionTable, keys: Sequence[bytes], asked_id: str | None, tenant: str) -> Session | None:
    """Return the tenant's session with KV that these keys extend; None means a new one or a fork.

    That is one of this name which has all of them, for a prompt that is asked again. Otherwise it is the one with the
    longest chain that is a prefix of them.
    """
    if asked_id is None:
        found = table.tips.longest(keys[: table.blocks.known(keys)], None, tenant)
        return None if found is None or _is_common_start(table, found, keys) else found
    known, near = table.tips.nearest(keys[: table.blocks.known(keys)], asked_id, tenant)
    found = table.tips.longest(keys[:known], asked_id, tenant)
    is_again = near is not None and known == len(keys)
    return near if is_again and (found is None or len(found.chain) < known) else found


def _is_common_start(table: SessionTable, session: Session, keys: Sequence[bytes]) -> bool:
    """True if others go on from where this session ends, as from a system prompt: then a new request is another."""
    if session.asked_id is not None or len(session.chain) == len(keys):
        return False
    return table.tips.has_several(session.chain[-1], session.tenant)


def _has_users(table: SessionTable, remembered: Session) -> bool:
    """True if sessions have the KV of where this one, which lost it, ended. The request then belongs to one of them."""
    block = table.blocks.get(remembered.tip)
    return block is not None and table.tips.holder(block, remembered.tenant) is not None


def kept(session: Session, keys: Sequence[bytes], asked_id: str | None, tokens: int) -> int:
    """How many blocks of its chain a session keeps whose is a request with these keys, of a prompt of so many tokens:
    all, or as many as both begin with where its last answer came back changed. Then the prompt is longer than the last
    one, and not so long as that with its answer."""
    length = common_prefix(session.chain, keys)
    if length < min(len(session.chain), len(keys)):
        return length
    is_next = asked_id is not None and 0 < session.prompt_tokens < tokens and not session.requests
    return length if is_next else len(session.chain)


def begin(session: Session, prompt_tokens: int, known_tokens: int, now: float) -> None:
    """Write down what a request that begins says of its session; policies learn from it.

    known_tokens: of the prompt, which some session's KV covered already.
    """
    if session.uses and not session.requests:
        session.gap = max(0.0, now - session.last_used)
    before = session.tokens if session.tokens and not session.left_tokens else known_tokens
    session.added_tokens = max(0, prompt_tokens - before)
    session.tokens = session.prompt_tokens = prompt_tokens
    session.uses += 1
    session.expected = None


def _with_changed_answer(
    table: SessionTable, keys: Sequence[bytes], asked_id: str | None, tenant: str
) -> Session | None:
    """The session of this name whose whole last prompt these keys repeat, and not its answer: the template has left out
    what the model thought, or the client has changed it. Without a name, nobody knows that it is not somebody else.
    """
    if asked_id is None:
        return None
    known, origin = table.tips.nearest(keys[: table.blocks.known(keys)], asked_id, tenant)
    if origin is None or origin.requests or not 0 < known < min(len(origin.chain), len(keys)):
        return None
    prompt = origin.prompt_tokens
    return origin if prompt and known >= prompt // table.shape.block_tokens else None


def _inherit(table: SessionTable, session: Session, keys: Sequence[bytes]) -> None:
    """Take over the history of the only session that has the beginning of these keys, and goes on otherwise."""
    known = table.blocks.known(keys)
    block = table.blocks.get(keys[known - 1]) if known else None
    origin = None if block is None else table.tips.holder(block, session.tenant)
    if origin is None:  # only other tenants have all of it
        known, origin = table.tips.nearest(keys[:known], None, session.tenant)
    if origin is None or known == len(origin.chain) or origin.requests:
        return
    if table.tips.has_several(origin.chain[known - 1], session.tenant):
        return
    session.created, session.uses, session.last_used = origin.created, origin.uses, origin.last_used
    session.left_tokens = (len(origin.chain) - known) * table.shape.block_tokens
    table.superseded(origin)
