"""Hints on their way through vLLM: checked when a request comes in, and read when the request is scheduled.

A hint asks Manthan to treat a session (conversation) in some way, such as to keep its KV. A client's hints are in
`kv_transfer_params: {"manthan": {…}}`. They are checked when vLLM makes the engine's request; if they are wrong, the
request is refused. An orchestrator's hints are in vLLM's envelope `kv_hints`; wrong ones are ignored.
"""

import difflib
import hashlib
import reprlib
import secrets
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, TypeGuard

from pydantic import ValidationError
from vllm.exceptions import VLLMClientError
from vllm.logger import init_logger

from manthan.manager.config.resolve import must_be
from manthan.manager.session.hints import NO_HINTS, WHERE, HintError, Hints, check_session_id, parse_hints
from manthan.vllm_hooks.compat import PARAMS
from manthan.vllm_hooks.transfer_config import EXTRA_KEY, from_vllm_config, is_on

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_hints import KvHintsEnvelope
    from vllm.v1.request import Request

    from manthan.manager.session.manager import Outcome

logger = init_logger("vllm.manthan")

ANSWER = {"session_id", "pinned", "refused", "lossy_tokens"}
"""Keys of the answer to hints; see `answer_to`."""
ACTION, ACTION_VERSION = "manthan.hints", "1.0"
"""Type of the action in vLLM's `kv_hints` whose payload is a mapping of hints, and the version known here."""
CONTENT = "manthan-content-"
"""Begin of a cache salt with a digest of content; see `Salts`. The salt without the digest follows behind a slash."""

_incoming: ContextVar["Incoming"] = ContextVar("manthan_incoming")
_salt_key = secrets.token_bytes(16)


class RequestHintError(VLLMClientError, ValueError):
    """Hints cannot be used. The server answers with status 400, and `LLM` raises a ValueError."""


@dataclass(eq=False)
class Incoming:
    """HTTP request on the way through the server."""

    headers: Iterable[tuple[bytes, bytes]] = ()
    is_checked: bool = False  # True once `checked` was called for the request
    refusal: RequestHintError | None = None  # the error that `checked` raised
    then: Callable[[], object] = lambda: None  # called at the end of `checked`


def keep(headers: Iterable[tuple[bytes, bytes]]) -> Incoming:
    """Return an `Incoming` for a new HTTP request. `tenant_in` and `checked` find it in the request's tasks."""
    incoming = Incoming(headers)
    _incoming.set(incoming)
    return incoming


# -- where requests come in ---------------------------------------------------------------------------


def checked(vllm_config: "VllmConfig", params: object, session_id: str | None) -> object:
    """Return `checked_params` of the request, or `params` if Manthan is off. Raises RequestHintError."""
    incoming = _incoming.get(None) or Incoming()
    try:
        check_session_id(session_id)
        return checked_params(params, from_vllm_config(vllm_config).tenants.header) if is_on(vllm_config) else params
    except HintError as error:
        incoming.refusal = RequestHintError(str(error))
        raise incoming.refusal from None
    finally:
        incoming.is_checked = True
        incoming.then()


def checked_params(params: object, header: str) -> object:
    """Check the hints in a request's kv_transfer_params. Return `params`, with the header's tenant if `header` is set.

    header: name of the HTTP header that names the tenant; empty for none. Raises HintError for hints that cannot be
    used, or for a hint `tenant` that differs from the header's tenant.
    """
    hints = _hints_in(params)
    if not header:
        return params
    tenant = tenant_in(header)
    if hints.tenant not in ("", tenant):
        raise HintError(
            f"{WHERE}.tenant is {hints.tenant!r}, but here the header {header} alone says who the tenant is: "
            "leave the hint out"
        )
    others = params if isinstance(params, Mapping) else {}
    return {**others, EXTRA_KEY: {**(others.get(EXTRA_KEY) or {}), "tenant": tenant}}


def _hints_in(params: object) -> Hints:
    if params is None:
        return NO_HINTS
    if not isinstance(params, Mapping):
        raise HintError(f"{PARAMS} must be a mapping, not {reprlib.repr(params)}")
    for name in params:
        if name in Hints.model_fields:
            raise HintError(f"{PARAMS}.{name} is not read: write {WHERE}.{name}")
        if name != EXTRA_KEY and difflib.get_close_matches(str(name).lower(), [EXTRA_KEY], cutoff=0.8):
            raise HintError(f"{PARAMS}: unknown key {reprlib.repr(name)} (did you mean '{EXTRA_KEY}'?)")
    own = params.get(EXTRA_KEY)
    if _is_answer(own):
        own = {name: value for name, value in own.items() if name not in ANSWER} or None
    return parse_hints(own)


def _is_answer(own: Any) -> TypeGuard[Mapping[str, Any]]:
    """True if this is an answer to hints. A proxy hands the prefill engine's answer to the decode engine as params."""
    return isinstance(own, Mapping) and own.keys() >= ANSWER


def lossy_prefill_tokens(params: object) -> float:
    """Return how many of a prompt's first tokens may have had lossy KV in the cache of the engine that did the prefill.

    That engine's answer says how many tokens are lossy, but not which. If any are, return how many of the prompt's
    tokens were cached there, infinity if unknown. Return 0 if none are, or without an answer.
    """
    if not isinstance(params, Mapping) or not _is_answer(own := params.get(EXTRA_KEY)) or not own["lossy_tokens"]:
        return 0
    cached = params.get("remote_prefill_cached_tokens")
    return cached if isinstance(cached, int) else inf


def tenant_in(header: str) -> str:
    """Return the tenant in a header of the current HTTP request; empty without the header. Raises HintError."""
    headers = (_incoming.get(None) or Incoming()).headers
    values = {value for name, value in headers if name.lower() == header.lower().encode()}
    if len(values) > 1:  # if a gateway has added its header to the client's, nothing tells them apart
        raise HintError(f"the header {header} must be given once, not with {len(values)} different values")
    value = values.pop().decode("utf-8", "surrogateescape") if values else ""
    try:
        return Hints(tenant=value).tenant
    except ValidationError:
        right = Hints.model_fields["tenant"].description
        raise HintError(must_be(f"the header {header}", right, value, show=reprlib.repr)) from None


# -- where requests are scheduled ---------------------------------------------------------------------


def hints_of(request: "Request") -> Hints:
    """Return the hints of a request; see `merged_hints`."""
    return merged_hints(request.kv_transfer_params, request.kv_hints)


def merged_hints(params: object, envelope: "KvHintsEnvelope | None") -> Hints:
    """Return the client's hints, and those hints of an orchestrator that do not contradict the client's.

    A bad hint voids all hints of its client or action. Of several actions with the same hint, the last counts.
    """
    try:
        hints = _hints_in(params)
    except HintError:
        hints = NO_HINTS
    if envelope is None:
        return hints
    said = _said(params)
    for action in reversed(envelope.actions):
        if action.action_type != ACTION:
            continue  # an action for another component
        try:
            if action.action_version != ACTION_VERSION:
                raise HintError(f"{ACTION} has version {action.action_version!r}, and must have {ACTION_VERSION}")
            asked = parse_hints(action.payload)
        except HintError as error:
            logger.warning_once(
                "Manthan: an action of kv_hints is ignored: %s.", str(error).replace(WHERE, f"{ACTION}.payload")
            )
            continue
        for name in [each for each in asked.given if each not in said]:
            given = {each: getattr(hints, each) for each in hints.given}
            with suppress(HintError):  # leave out a hint that contradicts others
                hints = parse_hints(given | {name: getattr(asked, name)})
        said |= {name for name, value in action.payload.items() if value is not None}
    return hints


def _said(params: object) -> set[str]:
    """Names of the keys to which the client, or a gateway by its header, gave a value."""
    own = params.get(EXTRA_KEY) if isinstance(params, Mapping) else None
    return {name for name, value in own.items() if value is not None} if isinstance(own, Mapping) else set()


def tenant_of(request: "Request") -> str:
    """Return a request's tenant: the hint `tenant`, or else a digest of the client's cache salt; empty without both."""
    named = hints_of(request).tenant
    if named or "tenant" in _said(request.kv_transfer_params):  # "" is the value of an absent header
        return named
    own = request.cache_salt or ""
    if own.startswith(CONTENT):
        own = own.partition("/")[2]
    if not own:
        return ""
    return "salt-" + hashlib.blake2b(own.encode("utf-8", "surrogatepass"), digest_size=8, key=_salt_key).hexdigest()


def answer_to(hints: Hints, outcome: "Outcome | None") -> dict[str, Any] | None:
    """Return the response's kv_transfer_params: the outcome of the hints, and how many cached tokens were lossy.

    Lossy tokens have KV that was decoded, or computed behind decoded KV. Return None if there were neither lossy tokens
    nor hints except `tenant`.
    """
    if outcome is None or not (set(hints.given) - {"tenant"} or outcome.lossy_tokens):
        return None
    told = {"session_id": outcome.session_id, "pinned": outcome.is_pinned, "lossy_tokens": outcome.lossy_tokens}
    return {EXTRA_KEY: told | {"refused": outcome.refused or None}}
