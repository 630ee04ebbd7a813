"""Hints: what a client says of its session with a request, and the one sentence for each mistake in them.

A field's description completes the sentence "HINT must be …".
"""

import reprlib
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    StringConstraints,
    ValidationError,
    model_validator,
)

from manthan.manager.config.sentences import first_mistake, must_be, nearest

WHERE = "kv_transfer_params.manthan"
"""Where a request carries its hints."""
LONGEST_NAME = 256
"""Characters of a session's id or a tenant's name."""
MOST_PREFETCHES = 64
HIGHEST_PRIORITY = 10


class HintError(ValueError):
    """Hints that cannot be used, in one sentence for the client who gave them."""


def _printable(name: str) -> str:
    if not name.isprintable():  # it is shown in logs and metrics
        raise ValueError("not printable")
    return name


def check_session_id(session_id: str | None) -> None:
    """Raise HintError for a session's id that is too long or not printable: it is shown in logs and on a page."""
    if session_id and (len(session_id) > LONGEST_NAME or not session_id.isprintable()):
        shown = reprlib.repr(session_id)
        raise HintError(f"session_id must have at most {LONGEST_NAME} printable characters, not {shown}")


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


LONGEST_S = 30 * 86_400
"""Seconds that a client may speak of: 30 days."""
Seconds = Annotated[float, Strict(), Field(gt=0, le=LONGEST_S, allow_inf_nan=False)]
SessionId = Annotated[
    str, Strict(), StringConstraints(min_length=1, max_length=LONGEST_NAME), AfterValidator(_printable)
]
SessionIds = Annotated[tuple[SessionId, ...], BeforeValidator(_listed), Field(max_length=MOST_PREFETCHES)]
ToolName = Annotated[str, Strict(), StringConstraints(max_length=LONGEST_NAME), AfterValidator(_printable)]
SECONDS = f"a number of seconds above 0, and at most {LONGEST_S} (30 days)"
TOOL_NAME = f"a tool's name, of at most {LONGEST_NAME} printable characters"


Quality = Literal["exact", "any"]
QUALITY = "exact or any"


class Hints(BaseModel):
    """What a request says of its session. None, false or empty: nothing is said, and what was said before holds.

    pin: keep its codes in the cold store whatever comes, or no longer. ttl_s: forget it so long after its last use.
    priority: sessions of lower priority go before any of higher priority, under every policy; 0 where nobody said.
    release: drop it when this request ends. expect_return_s: the client will be back in about so many seconds. tool:
    when the tool of that name is done, of which is known how long it takes when sessions have waited for it.
    prefetch: ids of sessions that are about to be used. tenant: who pays for the session. quality: "exact" if this
    request takes only KV that was computed exactly, "any" if decoded KV will do.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    pin: bool | None = Field(default=None, strict=True, description="true or false")
    ttl_s: Seconds | None = Field(default=None, description=SECONDS)
    priority: int | None = Field(
        default=None,
        strict=True,
        ge=-HIGHEST_PRIORITY,
        le=HIGHEST_PRIORITY,
        description=f"a whole number from -{HIGHEST_PRIORITY} to {HIGHEST_PRIORITY}",
    )
    release: bool = Field(default=False, strict=True, description="true or false")
    expect_return_s: Seconds | None = Field(default=None, description=SECONDS)
    tool: ToolName = Field(default="", description=TOOL_NAME)
    prefetch: SessionIds = Field(
        default=(),
        description=f"a session id or a list of up to {MOST_PREFETCHES}, each of 1 to {LONGEST_NAME} printable "
        "characters",
    )
    tenant: Annotated[str, AfterValidator(_printable)] = Field(
        default="",
        strict=True,
        max_length=LONGEST_NAME,
        description=f"a name of at most {LONGEST_NAME} printable characters",
    )

    quality: Quality | None = Field(default=None, description=QUALITY)

    @model_validator(mode="after")
    def _check_release(self) -> Self:
        for hint, given in (
            ("pin", self.pin),
            ("expect_return_s", self.expect_return_s),
            ("tool", self.tool),
        ):
            if self.release and given:
                raise ValueError(
                    f"{WHERE}: release drops the session when this request ends, but {hint} keeps it: give one of them"
                )
        return self

    @property
    def given(self) -> tuple[str, ...]:
        """The names of the hints that say something."""
        return tuple(name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default)


NO_HINTS = Hints()


def parse_hints(value: object) -> Hints:
    """The hints that a request carries under `WHERE`; a hint that is null is one that was not given.

    Raises HintError for unknown hints, with the nearest valid name, for values that do not fit, and for hints that
    contradict each other.
    """
    if value is None:
        return NO_HINTS
    if not isinstance(value, Mapping):
        raise HintError(f"{WHERE} must be a mapping of hints to values, not {reprlib.repr(value)}")
    for name in value:
        if name not in Hints.model_fields:
            hint = nearest(str(name)[:LONGEST_NAME], Hints.model_fields)
            raise HintError(f"{WHERE}: unknown hint {reprlib.repr(str(name))}{hint}")
    try:
        return Hints.model_validate({name: given for name, given in value.items() if given is not None})
    except ValidationError as error:
        raise HintError(_sentence(error, value)) from None


def _sentence(error: ValidationError, value: Mapping[str, object]) -> str:
    first = first_mistake(error)
    if not first.key:
        return first.said
    hint = first.field
    return must_be(f"{WHERE}.{hint}", Hints.model_fields[hint].description, value[hint], show=reprlib.repr)
