"""Hints on their way through vLLM: looked at where a request comes in, and read where it is scheduled.

A request carries them as `kv_transfer_params: {"manthan": {…}}`. They are checked where vLLM makes the engine's
request of what a client sent. A streamed answer would have begun by then: the server's middleware holds it back. An
orchestrator's hints are in vLLM's own envelope, `kv_hints`: those are advice, and nobody's request is refused for them.
"""

import difflib
import hashlib
import reprlib
import secrets
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import ValidationError
from vllm.exceptions import VLLMClientError
from vllm.logger import init_logger

from manthan.manager.config.sentences import must_be
from manthan.manager.session.hints import NO_HINTS, WHERE, HintError, Hints, check_session_id, parse_hints
from manthan.vllm_hooks.compat import before_engine
from manthan.vllm_hooks.transfer_config import EXTRA_KEY, from_vllm_config, is_on

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_hints import KvHintsEnvelope
    from vllm.v1.request import Request

    from manthan.manager.session.manager import Outcome

logger = init_logger("vllm.manthan")

PARAMS = "kv_transfer_params"
ANSWER = {"session_id", "pinned", "refused", "lossy_tokens"}
"""What a client is told of its hints."""
ACTION, ACTION_VERSION = "manthan.hints", "1.0"
"""An action of vLLM's `kv_hints` whose payload are hints."""
CONTENT = "manthan-content-"
"""Beginning of a cache salt that holds the content of an adapter; the request's other salt follows a slash."""

_incoming: ContextVar["Incoming"] = ContextVar("manthan_incoming")
_salt_key = secrets.token_bytes(16)


class RequestHintError(VLLMClientError, ValueError):
    """Hints that cannot be used: status 400 from the server, a ValueError from `LLM`."""


class Asked(NamedTuple):
    """What of a request says whose it is, before vLLM has made it."""

    kv_transfer_params: Any
    kv_hints: "KvHintsEnvelope | None"
    cache_salt: str | None


class Incoming:
    """A request on its way through the server.

    Args:
        headers: as ASGI has them.
    """

    def __init__(self, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        self.headers = headers
        self.is_checked = False
        self.refusal: RequestHintError | None = None
        self.then: Callable[[], object] = lambda: None
        """Called once the request is checked."""


def keep(headers: Iterable[tuple[bytes, bytes]]) -> Incoming:
    """Begin a request: from now on its headers are at hand in its tasks."""
    incoming = Incoming(headers)
    _incoming.set(incoming)
    return incoming


# -- where requests come in ---------------------------------------------------------------------------


def check_requests() -> None:
    """Let no request with unusable hints enter an engine with Manthan in this process from now on."""
    before_engine(_checked, PARAMS)


def _checked(vllm_config: "VllmConfig", params: object, session_id: str | None) -> object:
    """Return the request's parameters, with its tenant. Raises RequestHintError."""
    incoming = _incoming.get(None) or Incoming()
    try:
        try:
            check_session_id(session_id)
        except HintError as error:
            raise RequestHintError(str(error)) from None
        return checked_params(params, tenant_header(vllm_config)) if is_on(vllm_config) else params
    except RequestHintError as error:
        incoming.refusal = error
        raise
    finally:
        incoming.is_checked = True
        incoming.then()


def tenant_header(config: "VllmConfig | Namespace") -> str:
    """`tenants.header` of an engine with Manthan."""
    return from_vllm_config(config).tenants.header


def checked_params(params: object, header: str) -> object:
    """A request's kv_transfer_params, with the tenant that the header names, where one is configured.

    Raises RequestHintError.
    """
    try:
        hints = _hints_in(params)
        if not header:
            return params
        tenant = tenant_in(header)
        if hints.tenant not in ("", tenant):
            raise HintError(
                f"{WHERE}.tenant is {hints.tenant!r}, but here the header {header} alone says who the tenant is: "
                "leave the hint out"
            )
    except HintError as error:
        raise RequestHintError(str(error)) from None
    others = params if isinstance(params, Mapping) else {}
    return {**others, EXTRA_KEY: {**(_own(others) or {}), "tenant": tenant}}


def _hints_in(params: object) -> Hints:
    if params is None:
        return NO_HINTS
    if not isinstance(params, Mapping):
        raise HintError(f"{PARAMS} must be a mapping, not {reprlib.repr(params)}")
    for name in params:
        if name in Hints.model_fields:
            raise HintError(f"{PARAMS}.{name} is in the wrong place: write {WHERE}.{name}")
        if name != EXTRA_KEY and difflib.get_close_matches(str(name).lower(), [EXTRA_KEY], cutoff=0.8):
            raise HintError(f"{PARAMS}: unknown key {reprlib.repr(name)} (did you mean '{EXTRA_KEY}'?)")
    return parse_hints(_own(params))


def _own(params: Mapping[str, Any]) -> Any:
    """What there is for Manthan. An answer is nothing: proxies hand it on to the engine that decodes."""
    own = params.get(EXTRA_KEY)
    return None if isinstance(own, Mapping) and own.keys() == ANSWER else own


def tenant_in(header: str) -> str:
    """What the header of the request at hand says; empty where it has none."""
    headers = (_incoming.get(None) or Incoming()).headers
    values = {value for name, value in headers if name.lower() == header.lower().encode()}
    if len(values) > 1:  # a gateway that adds its own to the client's: which is which?
        raise HintError(f"the header {header} must be given once, not with {len(values)} different values")
    value = values.pop().decode("utf-8", "surrogateescape") if values else ""
    try:
        return Hints(tenant=value).tenant
    except ValidationError:
        right = Hints.model_fields["tenant"].description
        raise HintError(must_be(f"the header {header}", right, value, show=reprlib.repr)) from None


# -- where requests are scheduled ---------------------------------------------------------------------


def hints_of(request: "Request | Asked") -> Hints:
    """A request's hints: the client's, and of what an orchestrator says in vLLM's envelope whatever is left open by
    them. What cannot be used was refused before; if it is here all the same, it says nothing."""
    try:
        own = _hints_in(request.kv_transfer_params)
    except HintError:
        own = NO_HINTS
    return own if request.kv_hints is None else _completed(own, request)


def _completed(own: Hints, request: "Request | Asked") -> Hints:
    """Own hints, and those of the envelope that do not contradict them; of its actions, the last one that says it."""
    hints, said = own, dict.fromkeys(_own_names(request))
    assert request.kv_hints is not None
    for action in reversed(request.kv_hints.actions):
        if action.action_type != ACTION:
            continue  # other components'
        try:
            if action.action_version != ACTION_VERSION:
                raise HintError(f"{ACTION} has version {action.action_version!r}, and must have {ACTION_VERSION}")
            asked = parse_hints(action.payload)
        except HintError as error:
            logger.warning_once(
                "Manthan: an action of kv_hints is ignored: %s.", str(error).replace(WHERE, f"{ACTION}.payload")
            )
            continue
        for name in asked.given:
            if name not in said:
                hints = _with(hints, name, getattr(asked, name))
        said |= dict.fromkeys(name for name, value in action.payload.items() if value is not None)
    return hints


def _own_names(request: "Request | Asked") -> Iterable[str]:
    """The hints that the client, or the gateway's header, says something of."""
    params = request.kv_transfer_params
    own = params.get(EXTRA_KEY) if isinstance(params, Mapping) else None
    return [name for name, value in own.items() if value is not None] if isinstance(own, Mapping) else []


def _with(hints: Hints, name: str, value: object) -> Hints:
    """With one more, unless that contradicts what is there."""
    given = {each: getattr(hints, each) for each in hints.given}
    try:
        return parse_hints(given | {name: value})
    except HintError:
        return hints


def tenant_of(request: "Request") -> str:
    """Who pays for a request: whom its hints name, else whoever shares its cache salt; empty for nobody.

    A cache salt is a secret: a name is made of it that tells nothing, and that only this process knows to make.
    """
    named = hints_of(request).tenant
    if named or "tenant" in _own_names(request):  # "" is what a header says that is not there
        return named
    own = request.cache_salt or ""
    if own.startswith(CONTENT):
        own = own.partition("/")[2]
    if not own:
        return ""
    salt = own.encode("utf-8", "surrogatepass")
    return "salt-" + hashlib.blake2b(salt, digest_size=8, key=_salt_key).hexdigest()


def answer_to(hints: Hints, outcome: "Outcome | None") -> dict[str, Any] | None:
    """The kv_transfer_params of the response, which tell a client what came of its hints, and how many of its prompt's
    cached tokens were lossy; None if it gave no hints, and none were."""
    if outcome is None or not (set(hints.given) - {"tenant"} or outcome.lossy_tokens):
        return None
    told = {
        "session_id": outcome.session_id,
        "pinned": outcome.is_pinned,
        "refused": outcome.refused or None,
        "lossy_tokens": outcome.lossy_tokens,
    }
    return {EXTRA_KEY: told}
