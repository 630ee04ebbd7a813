"""Requests and answers of the HTTP API. Times are Unix seconds. Bytes are of all ranks together.

The description of a parameter or field that clients send completes the sentence "NAME must be …".
"""

from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, computed_field, model_validator

from manthan.codec.profile import LEVELS
from manthan.manager.histories import HistoryEvent
from manthan.manager.listing import SessionInfo, Sort
from manthan.manager.session.hints import LONGEST_S, TOOL_NAME, PrintableName
from manthan.manager.session.table import SessionState

MOST_ROWS = 500
FARTHEST = 1_000_000
"""Largest `limit` and `offset` of a `SessionQuery`."""
STATES = "|".join(SessionState)
RISING = (Sort.ID, Sort.STATE, Sort.EXPECTED)
"""Values of `sort` whose lists begin with the smallest value by default. Lists of all others begin with the largest."""


class SessionQuery(BaseModel):
    """Filter, order and page of a list of sessions."""

    state: str | None = Field(
        default=None,
        pattern=rf"^ *({STATES}) *(, *({STATES}) *)*$",
        description=f"some of {', '.join(SessionState)}, with commas between them",
    )
    tenant: str | None = Field(default=None, description="a tenant's name")
    tier: str | None = Field(default=None, description="a tier's name, such as host")
    pinned: bool | None = Field(default=None, description="true or false")
    prefix: str = Field(default="", description="a prefix of session ids")
    sort: Sort = Field(default=Sort.LAST_USED, description=f"one of {', '.join(Sort)}")
    order: Literal["asc", "desc"] | None = Field(default=None, description="asc or desc")
    limit: int = Field(default=100, ge=1, le=MOST_ROWS, description=f"a whole number from 1 to {MOST_ROWS}")
    offset: int = Field(default=0, ge=0, le=FARTHEST, description=f"a whole number from 0 to {FARTHEST}")

    def query(self, bound: str | None) -> dict[str, Any]:
        """Return the fields of a `manthan.manager.listing.Query`. bound: tenant that asks; None for access to all."""
        order = self.order or ("asc" if self.sort in RISING else "desc")
        states = [name.strip() for name in self.state.split(",")] if self.state else None
        given = {"bound": bound, "states": states, "descending": order == "desc"}
        return self.model_dump(mode="json", exclude={"state", "order"}) | given


@dataclass(frozen=True)
class SessionWithHistory(SessionInfo):
    """Session with its last 64 events in `life`, the newest last."""

    life: tuple[HistoryEvent, ...] = ()


class Sessions(BaseModel):
    """Page of a list of sessions. total: number of sessions on all pages. now: time of the answer."""

    total: int
    now: float
    sessions: list[SessionInfo]


class Policy(BaseModel):
    """Eviction policy. order: ids of the first 50 sessions that lose compressed blocks if the tiers need room."""

    name: str
    options: dict[str, Any]
    order: list[str]


class TierState(BaseModel):
    name: str
    used_bytes: int
    budget_bytes: int


class Measuring(BaseModel):
    """Progress of the guard before its verdict: the codec's loss was measured on `blocks` of the `of` needed blocks."""

    codec: str
    blocks: int
    of: int


class StoreState(BaseModel):
    """Cold store, with all compressed blocks. up: True if the store answers. codec: codec of new blocks.

    The guard measures the configured codec's loss and speed on the model's KV, and may choose another. verdict: what it
    found: "faithful", "slow", "unfaithful", or "none" before that. measuring: None without measurements under way.
    """

    kind: str
    up: bool
    codec: str
    verdict: str
    measuring: Measuring | None = None
    tiers: list[TierState]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def refinements(self) -> int:
        """Number of refinements of a new block. A refinement is a part of a block that adds precision."""
        return LEVELS.get(self.codec, 0)


class PoolState(BaseModel):
    """vLLM's KV pool. session_bytes: of blocks of sessions and running requests that have no compressed copy."""

    block_tokens: int
    blocks: int
    free_blocks: int
    bytes: int
    session_bytes: int


class CoreState(BaseModel):
    """State of an engine core. sessions: number by state. token_s: seconds to compute a token of a prompt, if known.

    totals: sums since the start. Of prompt_tokens, computed_tokens were neither in the prefix cache nor restored, and
    lossy_tokens had KV decoded by a lossy codec, or computed from such KV. restore_ms: milliseconds of restores.
    returns: requests that continue a session. Of their prompts, return_resident_tokens were in the prefix cache,
    return_restored_tokens were restored, and return_recomputed_tokens were known to the session and computed again.
    """

    now: float
    policy: Policy
    store: StoreState
    pool: PoolState
    sessions: dict[SessionState, int]
    token_s: float | None
    totals: dict[str, int]


class EngineState(CoreState):
    version: str
    model: str


class Setting(BaseModel):
    """Value of a setting, and its source: command-line flag, file, environment, argument in Python, or default."""

    model_config = ConfigDict(populate_by_name=True)

    value: Any
    source: str = Field(alias="from")


class Error(BaseModel):
    """Field `error` of an answer, with the same fields as in errors of vLLM's server."""

    message: str
    type: str
    param: str | None = None
    code: int


SECONDS = f"a number of seconds above 0 and at most {LONGEST_S}, or null"


class Nothing(BaseModel):
    """An empty object."""

    model_config = ConfigDict(extra="forbid")


class Pin(Nothing):
    """Body of a request to pin a session. seconds: null to pin it until it is unpinned or released."""

    seconds: float | None = Field(default=None, gt=0, le=LONGEST_S, allow_inf_nan=False, description=SECONDS)


class Expect(Pin):
    """Body of a request that announces a session's return: `seconds` until then, the tool that it waits for, or both.

    With a tool alone, the seconds are learned from the tenant's earlier sessions that waited for the tool.
    """

    tool: PrintableName = Field(default="", description=TOOL_NAME)

    @model_validator(mode="after")
    def _say_something(self) -> Self:
        if self.seconds is None and not self.tool:
            raise ValueError("The body must say seconds, or a tool.")
        return self


RIGHTS = {
    name: str(field.description) for model in (SessionQuery, Expect) for name, field in model.model_fields.items()
}
"""Description of each parameter or field that clients send, for the sentence "NAME must be …"."""
