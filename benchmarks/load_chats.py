"""Users of the load benchmark: the arrival, the words and the thinking time of each chat.

Made-up chats come within some seconds, and think after each answer. A trace's chats are the trace's requests, each on
time. All is settled before a server starts, so that each arm is asked the same.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol

import typer

from manthan.benchmarks.engines import random_tokens
from manthan.benchmarks.served import Served
from manthan.benchmarks.simulator.traces import Trace, TracedRequest, TraceError, read_trace
from manthan.benchmarks.tables import DIGITS, Table

FIXED, EXPONENTIAL = "fixed", "exponential"
TRACE_SEED = 1_000_000_007
"""Seed of the tokens in a trace's blocks, different from the chats'."""


class Said(NamedTuple):
    """User's addition to the conversation: token ids, and the begin of the right answer if any."""

    tokens: Sequence[int]
    right: str | None = None


@dataclass(frozen=True)
class Turn:
    """pause_s: from the end of the previous answer. known: number of tokens said before.

    is_whole: True if `said` is the whole prompt, without the earlier turns.
    """

    said: Said
    answer_tokens: int
    pause_s: float = 0.0
    known: int = 0
    is_whole: bool = False


@dataclass(frozen=True)
class Chat:
    """Conversation. name: for the server; empty for the server to find out. first: number of the first turn.

    then: conversation of the same user at the end of this one.
    """

    name: str
    starts_s: float
    turns: Sequence[Turn]
    first: int = 1
    then: "Chat | None" = None


@dataclass(frozen=True)
class Made:
    """Made-up chats. said: tokens added by a user in a later turn. arrive_s: seconds until all have come."""

    chats: int
    tokens: int
    turns: int
    said: int
    answer: int
    think_s: float
    thinking: str
    arrive_s: float
    seed: int

    @property
    def longest(self) -> int:
        """Tokens of the last prompt with the answer."""
        return self.tokens + self.turns * self.answer + (self.turns - 1) * self.said


class Writer(Protocol):
    """Returns words of about `tokens` tokens."""

    def __call__(self, chat: int, turn: int, tokens: int) -> Said: ...


def writer(served: Served | None, vocabulary: int, seed: int) -> Writer:
    """Tables to look things up in where the model can read, else random tokens."""
    if served is None or served.made_up or not (served.folder / "tokenizer.json").exists():
        return lambda chat, turn, tokens: Said(random_tokens(seed, 1000 * chat + turn, tokens, vocabulary))
    folder = str(served.folder)

    @cache
    def table(chat: int, tokens: int) -> Table:
        return Table(folder, tokens, f"{seed}-{chat}")

    first: dict[int, int] = {}

    def say(chat: int, turn: int, tokens: int) -> Said:
        if turn == 0:
            first[chat] = tokens
            return Said(*table(chat, tokens).question(0))
        return Said(*table(chat, first[chat]).later(turn, tokens))

    return say


def made_up(made: Made, say: Writer) -> list[Chat]:
    """Return chats in the order of their arrival, evenly over `made.arrive_s`."""
    rng = random.Random(made.seed)
    starts = sorted(rng.uniform(0, made.arrive_s) for _ in range(made.chats))
    return [
        Chat(f"chat-{chat}", starts_s, [_turn(made, say, rng, chat, turn) for turn in range(made.turns)])
        for chat, starts_s in enumerate(starts)
    ]


def _turn(made: Made, say: Writer, rng: random.Random, chat: int, turn: int) -> Turn:
    said = say(chat, turn, made.said if turn else made.tokens)
    pause = rng.expovariate(1 / made.think_s) if made.thinking == EXPONENTIAL and made.think_s else made.think_s
    answer = max(made.answer, DIGITS) if said.right else made.answer
    return Turn(said, answer, pause if turn else 0.0)


# -- a trace --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Replay:
    """Replay of a trace. speed: divisor of times. shrink: divisor of the lengths of prompts and answers.

    requests: number of first requests; 0 for all.
    """

    trace: Path
    speed: float
    shrink: float
    requests: int

    def read(self) -> Trace:
        """Raises BadParameter."""
        try:
            return read_trace(self.trace)
        except TraceError as error:
            raise typer.BadParameter(f"--trace {error}") from None


def replayed(replay: Replay, trace: Trace, longest: int, vocabulary: int) -> list[Chat]:
    """Return each request as a chat, on time. Requests with more tokens than `longest` are left out.

    The tokens of a block follow from the hash, so that prompts share the same blocks as in the trace.
    """
    chosen = trace.requests[: replay.requests or None]
    block = max(1, round(trace.block_tokens / replay.shrink))
    numbers: dict[bytes, int] = {}
    chats = []
    for index, (request, turn) in enumerate(zip(chosen, _turns(chosen), strict=True)):
        known_blocks = sum(name in numbers for name in request.hashes[: request.prompt_blocks])
        for name in request.hashes:
            numbers.setdefault(name, len(numbers))
        answer = max(1, round(request.output_tokens / replay.shrink))
        prompt = [
            token
            for name in request.hashes[: request.prompt_blocks]
            for token in random_tokens(TRACE_SEED, numbers[name], block, vocabulary)
        ]
        rest = max(1, round(request.input_tokens / replay.shrink) - len(prompt))
        prompt += random_tokens(TRACE_SEED + 1, index, rest, vocabulary)
        if len(prompt) + answer <= longest:
            at = (request.at - chosen[0].at) / replay.speed
            said = Turn(Said(prompt), answer, known=known_blocks * block)
            chats.append(Chat(request.session or "", at, [said], turn))
    return chats


def _turns(requests: Sequence[TracedRequest]) -> Iterator[int]:
    """Yield the number of each request in the conversation: one more than the last request whose prompt is continued.

    A prompt of one full block is no conversation: the block may be a common system prompt.
    """
    ends: dict[bytes, int] = {}
    for request in requests:
        prompt = request.hashes[: request.prompt_blocks]
        before = next((ends[name] for name in reversed(prompt) if name in ends), 0)
        yield before + 1
        if len(prompt) > 1:
            ends[prompt[-1]] = max(before + 1, ends.get(prompt[-1], 0))
