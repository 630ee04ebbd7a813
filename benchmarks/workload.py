"""Make up requests of chats, agents, readers and single questions, as a trace for `manthan simulate`.

python benchmarks/workload.py --sessions 3000 --seed 1 --hours 2 > workload.jsonl
"""

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, NamedTuple

import typer

from manthan.benchmarks.simulator.traces import MOONCAKE_BLOCK_TOKENS

CONTEXT_TOKENS = 120_000
"""Most tokens of a prompt. A session ends before a longer prompt."""
FIRST_TOKEN_S = 0.3
ANSWER_S_PER_TOKEN = 0.02
"""Seconds for each token of an answer. The pause until the next request begins after the answer."""
SHARED_DOCUMENTS = 200


class Spread(NamedTuple):
    """A lognormal distribution: half of the draws are below `median`, a sixth are above median * e**sigma."""

    median: float
    sigma: float

    def draw(self, rng: random.Random) -> float:
        return rng.lognormvariate(math.log(self.median), self.sigma)


@dataclass(frozen=True)
class Kind:
    """Kind of sessions. Lengths in tokens, times in seconds.

    turns: mean number of a session's requests. The number is geometrically distributed; CONTEXT_TOKENS may cut it.
    pause, away, away_share: pause between an answer and the next request; a share of the pauses are `away` instead.
    systems, system: count and length of common system prompts. The n-th is chosen 1/n as often as the first.
    document_share, document: share of the sessions with a document behind the system prompt, and its length. Half of
    the documents are one of 200 common documents, which are chosen as system prompts are.
    said: length of the text that a request adds.
    answer: length of an answer.
    edit_share: share of the requests after the first that replace the session's previous request and answer.
    """

    turns: float
    pause: Spread
    away: Spread
    away_share: float
    systems: int
    system: Spread
    document_share: float
    document: Spread
    said: Spread
    answer: Spread
    edit_share: float


CHAT = Kind(
    turns=4,
    pause=Spread(40, 1.1),
    away=Spread(1200, 1.0),
    away_share=0.1,
    systems=4,
    system=Spread(600, 0.5),
    document_share=0.2,
    document=Spread(6000, 0.9),
    said=Spread(80, 1.2),
    answer=Spread(250, 0.9),
    edit_share=0.05,
)
"""People who read, think and write, and at times come back after a while."""
AGENT = Kind(
    turns=12,
    pause=Spread(4, 1.3),
    away=Spread(150, 1.2),
    away_share=0.1,
    systems=6,
    system=Spread(3500, 0.5),
    document_share=0.3,
    document=Spread(4000, 1.0),
    said=Spread(700, 1.3),
    answer=Spread(130, 0.8),
    edit_share=0.0,
)
"""Programs that call tools for a few seconds, and now and then wait for a person."""
SINGLE = Kind(
    turns=1,
    pause=Spread(1, 1.0),
    away=Spread(1, 1.0),
    away_share=0.0,
    systems=12,
    system=Spread(400, 0.6),
    document_share=0.5,
    document=Spread(3000, 1.1),
    said=Spread(150, 1.0),
    answer=Spread(300, 1.0),
    edit_share=0.0,
)
"""Lone requests: classification, extraction, summaries."""
READER = Kind(
    turns=4,
    pause=Spread(20, 1.4),
    away=Spread(200, 1.0),
    away_share=0.3,
    systems=1,
    system=Spread(60, 0.1),
    document_share=1.0,
    document=Spread(12_000, 0.9),
    said=Spread(60, 1.0),
    answer=Spread(120, 1.0),
    edit_share=0.0,
)
"""People who ask a few questions about a long document, which others may read too."""
TOLD_SIGMA = 0.3
"""Sigma of the lognormal factor between a pause and the pause that an honest client announces."""
LIE_S = 1.0
"""Seconds until the next request that a dishonest client announces."""
TOOLS = {
    "search": (5, Spread(2, 0.4)),
    "shell": (4, Spread(5, 0.6)),
    "browser": (3, Spread(15, 0.5)),
    "tests": (2, Spread(60, 0.5)),
    "person": (1, Spread(300, 1.0)),
}
"""Tools of agents that name their tools: relative frequency, and seconds of a call."""


class WorkloadLine(NamedTuple):
    """Line of the trace in Mooncake's format, and hints.

    timestamp: milliseconds. Lengths are in tokens. hash_ids: ids of the prompt's blocks of 512 tokens.
    """

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: list[int]
    expect_return_s: float | None = None
    tool: str = ""


MOONCAKE = WorkloadLine._fields[:-2]


class _Part(NamedTuple):
    """Part of a prompt. Parts of equal names have equal texts."""

    name: str
    tokens: int


def make_workload(
    sessions: int,
    seed: int,
    hours: float = 1.0,
    chat: float = 55,
    agent: float = 15,
    single: float = 30,
    reader: float = 0,
    told: float = 0,
    lies: float = 0,
    tools: float = 0,
) -> list[WorkloadLine]:
    """Return requests of `sessions` sessions, in the order of their arrival.

    Equal arguments give equal workloads. If only `sessions` differs, the sessions of the smaller workload are among the
    larger workload's, though with different block ids.

    Args:
        hours: sessions begin at random times within these hours.
        chat, agent, single, reader: relative frequencies of the kinds of sessions.
        told: share of the agents that announce when they return.
        lies: share of the other kinds' sessions that announce an immediate return with each request.
        tools: share of the agents that name the tool they wait for, and pause for the tool's time.
    """
    kinds = (("chat", CHAT), ("agent", AGENT), ("single", SINGLE), ("reader", READER))
    requests: list[tuple[float, list[_Part], int, float | None, str]] = []
    for number in range(sessions):
        rng = random.Random(f"{seed} {number}")
        begin = rng.uniform(0, hours * 3600)
        ((name, kind),) = rng.choices(kinds, weights=(chat, agent, single, reader))
        asked = list(_session(kind, name, f"{seed} {number}", begin, rng))
        saying = random.Random(f"{seed} {number} says")
        says, lying = saying.random() < told and name == "agent", saying.random() < lies and name != "agent"
        names = [""] * len(asked)
        if name == "agent" and random.Random(f"{seed} {number} names").random() < tools:
            asked, names = _with_tools(asked, random.Random(f"{seed} {number} tools"))
        pauses = [_pause(before, after) for before, after in pairwise(asked)]
        said: list[float | None] = [None] * len(asked)
        if says:
            said[:-1] = [pause * Spread(1.0, TOLD_SIGMA).draw(saying) for pause in pauses]
        elif lying:
            said = [LIE_S] * len(asked)
        requests += [(*request, hint, tool) for request, hint, tool in zip(asked, said, names, strict=True)]
    requests.sort(key=lambda request: request[0])
    blocks = _Blocks()
    return [
        WorkloadLine(round(1000 * at), sum(part.tokens for part in parts), answer, blocks.ids(parts), hint, tool)
        for at, parts, answer, hint, tool in requests
    ]


def _pause(before: tuple[float, list[_Part], int], after: tuple[float, list[_Part], int]) -> float:
    """Seconds from the end of an answer to the next request."""
    return after[0] - before[0] - FIRST_TOKEN_S - ANSWER_S_PER_TOKEN * before[2]


def _with_tools(
    asked: list[tuple[float, list[_Part], int]], rng: random.Random
) -> tuple[list[tuple[float, list[_Part], int]], list[str]]:
    """Return the requests with pauses for tools, and the tool awaited after each request but the last."""
    (now, *_), weights = asked[0], [often for often, _ in TOOLS.values()]
    names = [*rng.choices([*TOOLS], weights, k=len(asked) - 1), ""]
    later = []
    for (_, parts, answer), name in zip(asked, names, strict=True):
        later.append((now, parts, answer))
        now += FIRST_TOKEN_S + ANSWER_S_PER_TOKEN * answer + (TOOLS[name][1].draw(rng) if name else 0)
    return later, names


def _session(
    kind: Kind, kind_name: str, name: str, begin: float, rng: random.Random
) -> Iterator[tuple[float, list[_Part], int]]:
    """Yield time, prompt parts and answer length of each request of a session."""
    parts = [_shared(f"{kind_name} system", kind.systems, kind.system, rng)]
    if rng.random() < kind.document_share:
        shared = rng.random() < 0.5
        own = _Part(f"document of {name}", _tokens(kind.document, rng))
        parts.append(_shared("document", SHARED_DOCUMENTS, kind.document, rng) if shared else own)
    before = len(parts)
    now = begin
    for turn in range(_geometric(kind.turns, rng)):
        if turn and rng.random() < kind.edit_share:
            del parts[before:]
        before = len(parts)
        parts.append(_Part(f"request {turn} of {name}", _tokens(kind.said, rng)))
        if sum(part.tokens for part in parts) > CONTEXT_TOKENS:
            return
        answer = _tokens(kind.answer, rng)
        yield now, list(parts), answer
        parts.append(_Part(f"answer {turn} of {name}", answer))
        pause = kind.away if rng.random() < kind.away_share else kind.pause
        now += FIRST_TOKEN_S + ANSWER_S_PER_TOKEN * answer + pause.draw(rng)


def _shared(what: str, count: int, tokens: Spread, rng: random.Random) -> _Part:
    """Return one of `count` texts common to many sessions; the length depends only on the text."""
    number = rng.choices(range(count), weights=[1 / (rank + 1) for rank in range(count)])[0]
    return _Part(f"{what} {number}", _tokens(tokens, random.Random(f"{what} {number}")))


def _tokens(spread: Spread, rng: random.Random) -> int:
    return min(CONTEXT_TOKENS, max(1, round(spread.draw(rng))))


def _geometric(mean: float, rng: random.Random) -> int:
    return 1 if mean <= 1 else 1 + int(math.log(1 - rng.random()) / math.log(1 - 1 / mean))


class _Blocks:
    """Ids of blocks; equal ids mean equal texts up to the block's end."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, tuple[tuple[str, int, int], ...]], int] = {}

    def ids(self, parts: list[_Part]) -> list[int]:
        ids: list[int] = []
        block: list[tuple[str, int, int]] = []  # parts of the block: name, first token, end
        room = MOONCAKE_BLOCK_TOKENS
        for name, tokens in parts:
            done = 0
            while done < tokens:
                size = min(room, tokens - done)
                block.append((name, done, done + size))
                done, room = done + size, room - size
                if not room:
                    ids.append(self._id(ids, block))
                    block, room = [], MOONCAKE_BLOCK_TOKENS
        if block:
            ids.append(self._id(ids, block))
        return ids

    def _id(self, before: list[int], block: list[tuple[str, int, int]]) -> int:
        return self._ids.setdefault((before[-1] if before else -1, tuple(block)), len(self._ids))


def workload(
    sessions: Annotated[int, typer.Option(min=1, help="Number of sessions that begin.")] = 1000,
    seed: Annotated[int, typer.Option(help="Seed of the workload.")] = 0,
    hours: Annotated[float, typer.Option(min=0.01, help="Hours within which sessions begin.")] = 1.0,
    chat: Annotated[float, typer.Option(min=0, help="Relative number of chats.")] = 55,
    agent: Annotated[float, typer.Option(min=0, help="Relative number of agents.")] = 15,
    single: Annotated[float, typer.Option(min=0, help="Relative number of single requests.")] = 30,
    reader: Annotated[float, typer.Option(min=0, help="Relative number of readers of documents.")] = 0,
    told: Annotated[float, typer.Option(min=0, max=1, help="Share of the agents that announce their return.")] = 0,
    lies: Annotated[float, typer.Option(min=0, max=1, help="Share of the rest that announce an immediate return.")] = 0,
    tools: Annotated[float, typer.Option(min=0, max=1, help="Share of the agents that name their tools.")] = 0,
) -> None:
    """Print a made-up request trace for `simulate`, one JSON object a line."""
    if not chat + agent + single + reader:
        typer.echo("--chat, --agent, --single and --reader must not all be 0", err=True)
        raise typer.Exit(1)
    for line in make_workload(sessions, seed, hours, chat, agent, single, reader, told, lies, tools):
        said: dict[str, object] = {"tool": line.tool} if line.tool else {}
        if line.expect_return_s is not None:
            said["expect_return_s"] = round(line.expect_return_s, 3)
        typer.echo(json.dumps({name: getattr(line, name) for name in MOONCAKE} | said))


if __name__ == "__main__":
    typer.run(workload)
