"""The requests of the soak: what each kind sends, and whether it was answered rightly.

Most prompts are a table and a question for one of its entries, so that the answer can be checked by how it begins.
"""

import random
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple

from manthan.benchmarks.endpoint import Endpoint, Reply
from manthan.benchmarks.tables import DIGITS, ENTRIES, Table

LEGS = 4
CHATS = 4
"""Conversations that return in each leg."""
CHAT_TURNS = 12
"""Then a conversation says that it is over, and another begins in its place."""
LEAVE_AFTER = 16
EXPECTED_S = 3.0


class Kind(StrEnum):
    """How a request is sent."""

    short = "short"
    long = "long"
    chat = "multi-turn"
    tool = "tool call"
    streamed = "streamed"
    left = "left midway"


@dataclass(frozen=True)
class Mix:
    """How many of a kind are in each leg; tokens of the prompt and of the answer, in whole."""

    per_leg: tuple[int, int, int, int]
    prompt_tokens: int
    answer_tokens: int


MIX = {
    Kind.short: Mix((3, 3, 3, 3), 120, 24),
    Kind.long: Mix((3, 3, 2, 2), 1500, 350),
    Kind.chat: Mix((CHATS,) * LEGS, 900, DIGITS),
    Kind.tool: Mix((2, 2, 2, 2), 500, 150),
    Kind.streamed: Mix((3, 3, 3, 3), 400, 450),
    Kind.left: Mix((3, 2, 2, 2), 400, 450),
}
"""67 requests and 10,596 tokens; of those that are left, LEAVE_AFTER tokens count."""
LONGEST = 1500 + 350


@dataclass(frozen=True)
class Outcome:
    """What came of a request. right: None if the answer says nothing. error: empty if it was answered.

    misled: the answer is wrong, and right when the same prompt is computed anew. Small models err by themselves.
    """

    kind: Kind
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    right: bool | None = None
    misled: bool = False
    error: str = ""


class Job(NamedTuple):
    """A request that can be sent."""

    kind: Kind
    send: Callable[[], Outcome]


@dataclass
class Chat:
    """A conversation that grows from turn to turn. It belongs to one request at a time."""

    name: str
    table: Table
    messages: list[dict[str, Any]] = field(default_factory=list)
    turns: int = 0


@dataclass(frozen=True)
class Sender:
    """Makes requests for one server. hints: it is Manthan's. speaks_tools: its template takes messages of tools."""

    endpoint: Endpoint
    model: str
    scale: float
    hints: bool
    speaks_tools: bool

    def leg(self, rng: random.Random, leg: int, chats: list[Chat]) -> list[Job]:
        """All requests of a leg, mixed; those of one chat follow each other from leg to leg."""
        jobs = [Job(Kind.chat, partial(self._turn, chats, place)) for place in range(len(chats))]
        send = {
            Kind.short: self._short,
            Kind.long: self._long,
            Kind.tool: self._tool,
            Kind.streamed: partial(self._stream, Kind.streamed, 0),
            Kind.left: partial(self._stream, Kind.left, LEAVE_AFTER),
        }
        for kind, sender in send.items():
            made = [(self._table(kind, rng), rng.randrange(ENTRIES)) for _ in range(MIX[kind].per_leg[leg])]
            jobs += [Job(kind, partial(sender, table, entry)) for table, entry in made]
        rng.shuffle(jobs)
        return jobs

    def new_chat(self, rng: random.Random) -> Chat:
        return Chat(f"chat-{rng.getrandbits(32):08x}", self._table(Kind.chat, rng))

    def _table(self, kind: Kind, rng: random.Random) -> Table:
        return Table(self.model, MIX[kind].prompt_tokens, str(rng.getrandbits(64)))

    # -- the kinds ------------------------------------------------------------------------------------

    def _short(self, table: Table, entry: int) -> Outcome:
        """Not streamed. Its table is said once, too seldom for an answer that one could rely on."""
        line, _ = table.lookup(entry)
        return self._post(Kind.short, [{"role": "user", "content": table.lines + line}], None)

    def _long(self, table: Table, entry: int) -> Outcome:
        """Token ids to /v1/completions."""
        prompt, right = table.question(entry)
        reply = self.endpoint.complete(prompt, **self._options(Kind.long))
        return _outcome(Kind.long, reply, right, lambda: self.endpoint.complete(prompt, **_anew()))

    def _tool(self, table: Table, entry: int) -> Outcome:
        """The table is what a tool answered. Where the template knows no tools, the same as plain text."""
        line, right = table.lookup(entry)
        told = [{"role": "tool", "tool_call_id": "call-1", "content": table.lines}, {"role": "user", "content": line}]
        if self.speaks_tools:
            return self._post(Kind.tool, [*TOOL_CALL, *told], right, tools=TOOLS, tool_choice="none")
        return self._post(Kind.tool, [{"role": "user", "content": table.lines + line}], right)

    def _stream(self, kind: Kind, leave_after: int, table: Table, entry: int) -> Outcome:
        line, right = table.lookup(entry)
        messages = [{"role": "user", "content": table.lines + line}]
        reply = self.endpoint.chat(messages, leave_after=leave_after, **self._options(kind))
        return _outcome(kind, reply, right, lambda: self.endpoint.chat(messages, **_anew()))

    def _turn(self, chats: list[Chat], place: int) -> Outcome:
        """The chat's next question; the last one says that it is over, the others when it will be back."""
        chat = chats[place]
        line, right = chat.table.lookup(chat.turns)
        first = not chat.messages
        asked = [*chat.messages, {"role": "user", "content": chat.table.lines + line if first else f"\n{line}"}]
        chat.turns += 1
        is_last = chat.turns == CHAT_TURNS
        hint = {"release": True} if is_last else {"expect_return_s": EXPECTED_S}
        more = {"kv_transfer_params": {"manthan": hint}} if self.hints else {}
        reply = self.endpoint.chat(asked, session_id=chat.name, **more, **self._options(Kind.chat))
        chat.messages = [*asked, {"role": "assistant", "content": reply.text}]
        if is_last:
            chats[place] = self.new_chat(random.Random(chat.name))
        return _outcome(Kind.chat, reply, right, lambda: self.endpoint.chat(asked, **_anew()))

    def _post(self, kind: Kind, messages: Sequence[dict[str, Any]], right: str | None, **more: Any) -> Outcome:
        found = self.endpoint.post("/v1/chat/completions", messages=list(messages), **self._options(kind), **more)
        usage, text = found["usage"], found["choices"][0]["message"]["content"] or ""
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        reply = Reply(text, usage["prompt_tokens"], cached, 0.0, generated_tokens=usage["completion_tokens"])
        return _outcome(kind, reply, right, lambda: self.endpoint.chat(messages, **more, **_anew()))

    def _options(self, kind: Kind) -> dict[str, Any]:
        tokens = max(LEAVE_AFTER + DIGITS if kind is Kind.left else DIGITS, round(self.scale * MIX[kind].answer_tokens))
        return {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}


def _outcome(kind: Kind, reply: Reply, right: str | None, ask_anew: Callable[[], Reply]) -> Outcome:
    is_right = None if right is None else reply.text.startswith(right)
    misled = is_right is False and ask_anew().text.startswith(right or "")
    return Outcome(kind, reply.prompt_tokens, reply.cached_tokens, reply.generated_tokens, is_right, misled)


def _anew() -> dict[str, Any]:
    """Options of a request for which nothing is found in any cache."""
    return {"max_tokens": DIGITS, "temperature": 0, "ignore_eos": True, "cache_salt": secrets.token_hex()}


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "table",
            "description": "The table of this name.",
            "parameters": {"type": "object", "properties": {"name": {"type": "string"}}},
        },
    }
]
TOOL_CALL: list[dict[str, Any]] = [
    {"role": "user", "content": ""},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call-1", "type": "function", "function": {"name": "table", "arguments": "{}"}}],
    },
]
