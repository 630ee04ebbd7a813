"""Chats of the load benchmark: when each begins, what its user says, and how long the user thinks.

Made-up chats begin within a given time, and pause after each answer. Each request of a trace is a chat of one turn, at
the request's time. Chats depend on the settings alone, so that each measured system gets the same.
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
"""Seed of the tokens in a trace's blocks. Made-up chats have seeds from the command line."""


class Said(NamedTuple):
    """Token ids that a turn adds to the prompt. right: text that a right answer begins with; None if not checked."""

    tokens: Sequence[int]
    right: str | None = None


@dataclass(frozen=True)
class Turn:
    """Turn of a chat. pause_s: seconds from the end of the previous answer, or for a first turn from the chat's start.

    known: number of prompt tokens that earlier requests of a trace have too; 0 for a made-up chat. is_whole: True if
    `said` is the whole prompt, not an addition to the earlier turns.
    """

    said: Said
    answer_tokens: int
    pause_s: float = 0.0
    known: int = 0
    is_whole: bool = False


@dataclass(frozen=True)
class Chat:
    """Conversation. name: session id for the server; empty for none. first: number of the first turn.

    starts_s: seconds from the load's start, for a user's first chat. then: chat that the user begins after this one.
    """

    name: str
    starts_s: float
    turns: Sequence[Turn]
    first: int = 1
    then: "Chat | None" = None


@dataclass(frozen=True)
class Made:
    """Settings of made-up chats. tokens: length of a first prompt. said: tokens that a later turn adds.

    answer: tokens of an answer, at least DIGITS if checked. thinking: FIXED, or EXPONENTIAL with mean think_s.
    arrive_s: seconds within which all chats begin.
    """

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
        """Number of tokens of the last prompt with its answer."""
        return self.tokens + self.turns * self.answer + (self.turns - 1) * self.said


class Writer(Protocol):
    """Function that returns about `tokens` tokens for turn number `turn`, from 0, of a chat."""

    def __call__(self, chat: int, turn: int, tokens: int) -> Said: ...


def writer(served: Served | None, vocabulary: int, seed: int) -> Writer:
    """Return a writer of checkable questions if the model has weights and a tokenizer, else of random token ids."""
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
    """Return chats that begin at random times within `made.arrive_s`, the earliest first."""
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

    requests: number of the first requests to replay; 0 for all.
    """

    trace: Path
    speed: float
    shrink: float
    requests: int

    def read(self) -> Trace:
        """Return the trace. Raises BadParameter for an unreadable file."""
        try:
            return read_trace(self.trace)
        except TraceError as error:
            raise typer.BadParameter(f"--trace {error}") from None


def replayed(replay: Replay, trace: Trace, longest: int, vocabulary: int) -> list[Chat]:
    """Return each request as a chat of one turn. Leave out a request whose prompt with its answer exceeds `longest`.

    Blocks with equal hashes get equal tokens, so that prompts share the same blocks as in the trace.
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
    """Yield the turn number of each request: 1, or one more than that of the request whose prompt it continues.

    A prompt of one full block counts as not continued, because the block may be a common system prompt.
    """
    ends: dict[bytes, int] = {}
    for request in requests:
        prompt = request.hashes[: request.prompt_blocks]
        before = next((ends[name] for name in reversed(prompt) if name in ends), 0)
        yield before + 1
        if len(prompt) > 1:
            ends[prompt[-1]] = max(before + 1, ends.get(prompt[-1], 0))
