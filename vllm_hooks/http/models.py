"""What the HTTP API takes and gives. Times are Unix seconds, bytes of all ranks together.

Descriptions of parameters and fields that are given complete the sentence "NAME must be …".
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from manthan.manager.lives import EventKind
from manthan.manager.sessions.hints import LONGEST_S, TOOL_NAME, ToolName
from manthan.manager.sessions.session import SessionState


class Part(BaseModel):
    """What a tier has of a session's codes. tokens, blocks: of its chain. bytes: of windows and states, too."""

    tokens: int
    blocks: int
    bytes: int


class Session(BaseModel):
    """tokens, blocks: of its chain. hot_blocks: believed to be in the KV pool. cold_blocks: with codes. tiers: those
    that have some of the codes, by name, the fastest first. expected_return: as its client said, or as long as
    its tool takes. tool: what it waits for, if that was said. engine: which data-parallel engine has it.
    lossy_tokens: cached tokens of its last request that were decoded, or computed behind decoded ones."""

    id: str
    tenant: str
    state: SessionState
    tokens: int
    blocks: int
    hot_blocks: int
    cold_blocks: int
    hot_bytes: int
    cold_bytes: int
    tiers: dict[str, Part]
    created: float
    last_used: float
    requests: int
    pinned: bool
    priority: int
    expected_return: float | None
    tool: str
    lossy_tokens: int
    engine: int = 0


class Event(BaseModel):
    """What happened to a session. saved_tokens: that were not computed."""

    at: float
    kind: EventKind
    tokens: int | None
    blocks: int | None
    bytes: int | None
    seconds: float | None
    saved_tokens: int | None
    text: str


class SessionWithLife(Session):
    """life: the newest event last; no more than 64."""

    life: list[Event]


class Sessions(BaseModel):
    """total: how many there are in all pages."""

    total: int
    now: float
    sessions: list[Session]


class Policy(BaseModel):
    """order: ids of idle sessions, the one that leaves the KV pool first first; no more than 50."""

    name: str
    options: dict[str, Any]
    order: list[str]


class Tier(BaseModel):
    name: str
    used_bytes: int
    budget_bytes: int


class Store(BaseModel):
    """up: whether it answers. codec: that new codes are made in. verdict: of the guard on the configured codec."""

    kind: str
    up: bool
    codec: str
    verdict: Literal["none", "faithful", "slow", "unfaithful"]
    tiers: list[Tier]


class Pool(BaseModel):
    """vLLM's KV pool. session_bytes: what sessions that are hot or idle have of it."""

    block_tokens: int
    blocks: int
    free_blocks: int
    bytes: int
    session_bytes: int


class Totals(BaseModel):
    """Since the start. computed_tokens: of prompts, that were neither hot nor restored."""

    evictions: int
    restores: int
    prefetches: int
    failures: int
    restored_tokens: int
    computed_tokens: int


class EngineState(BaseModel):
    """sessions: how many by state."""

    now: float
    version: str
    model: str
    policy: Policy
    store: Store
    pool: Pool
    sessions: dict[SessionState, int]
    totals: Totals


class Setting(BaseModel):
    """A value of the configuration and where it is from: flag, file, environment, argument or default."""

    model_config = ConfigDict(populate_by_name=True)

    value: Any
    source: str = Field(alias="from")


class ErrorInfo(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: int


class Error(BaseModel):
    """As vLLM's own."""

    error: ErrorInfo


Seconds = Annotated[
    float | None,
    Field(
        gt=0,
        le=LONGEST_S,
        allow_inf_nan=False,
        description=f"a number of seconds above 0 and at most {LONGEST_S}, or null",
    ),
]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Nothing(_Body):
    """An empty object."""


class Pin(_Body):
    """seconds: for so long; null for good."""

    seconds: Seconds = None


class Expect(_Body):
    """One of them, or both. seconds: until its client is back. tool: what it waits for, which takes as long as it took
    other sessions of the tenant, as soon as that is known."""

    seconds: Seconds = None
    tool: ToolName = Field(default="", description=TOOL_NAME)

    @model_validator(mode="after")
    def _say_something(self) -> Self:
        if self.seconds is None and not self.tool:
            raise ValueError("The body must say seconds, or a tool.")
        return self
