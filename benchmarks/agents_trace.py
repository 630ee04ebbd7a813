"""Agents made of a trace: each goes through sessions, waits for each answer, and pauses like the trace.

All prompts and pauses are chosen before a server starts, so that each measured system gets the same requests.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, overload

import typer

from manthan.benchmarks.engines import random_tokens
from manthan.benchmarks.load_chats import TRACE_SEED, Chat, Said, Turn
from manthan.benchmarks.simulator.traces import MOONCAKE_BLOCK_TOKENS, Trace, TracedRequest, TraceError, read_trace

MADE_UP = "made-up"
"""Name of the made-up trace."""
MADE_UP_SESSIONS = 120
TURNS_MEAN = 40
FIRST_TOKENS, FIRST_SIGMA = 24_000, 0.6
ADDED_TOKENS, ADDED_SIGMA = 1000, 1.3
ANSWER_TOKENS, ANSWER_SIGMA = 250, 1.0
PAUSE_S, PAUSE_SIGMA = 10.0, 1.5
"""Of each pair above, median and sigma of a lognormal distribution. The figures resemble coding agents'."""
LEAST_TURNS = 2


@dataclass(frozen=True)
class Scale:
    """Scale from a trace's requests to the benchmark's.

    Args:
        shrink: divisor of the tokens of prompts and answers.
        faster: divisor of the pauses.
        longest: most tokens of a scaled prompt with the answer; a session ends before its first longer request.
        vocabulary: upper bound of token ids.
    """

    shrink: float
    faster: float
    longest: int
    vocabulary: int


@dataclass(frozen=True)
class Prompt(Sequence[int]):
    """Prompt whose random token ids are made on demand.

    blocks: a number for each block, the seed of its tokens. rest: count of further tokens, with seed rest_seed.
    """

    blocks: tuple[int, ...]
    block_tokens: int
    rest: int
    rest_seed: int
    vocabulary: int

    def __len__(self) -> int:
        return len(self.blocks) * self.block_tokens + self.rest

    def __iter__(self) -> Iterator[int]:
        for number in self.blocks:
            yield from random_tokens(TRACE_SEED, number, self.block_tokens, self.vocabulary)
        yield from random_tokens(TRACE_SEED + 1, self.rest_seed, self.rest, self.vocabulary)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[int]: ...
    def __getitem__(self, at: int | slice) -> int | Sequence[int]:
        return list(self)[at]


def read_agents(path: str) -> Trace:
    """Read a trace, or make a trace up if `path` is MADE_UP. Raises BadParameter."""
    if path == MADE_UP:
        return made_up_trace(MADE_UP_SESSIONS)
    try:
        return read_trace(Path(path))
    except TraceError as error:
        raise typer.BadParameter(f"TRACE {error}") from None


def made_up_trace(sessions: int, seed: int = 0) -> Trace:
    """Return a trace of sessions whose prompts grow. Numbers of tokens and pauses are lognormal."""
    rng, requests, names = random.Random(seed), list[TracedRequest](), 0

    def some(median: float, sigma: float) -> float:
        return median * rng.lognormvariate(0.0, sigma)

    for session in range(sessions):
        at, tokens, hashes = 0.0, some(FIRST_TOKENS, FIRST_SIGMA), list[bytes]()
        for _ in range(max(LEAST_TURNS, round(rng.expovariate(1 / TURNS_MEAN)))):
            full, answer = int(tokens) // MOONCAKE_BLOCK_TOKENS, round(some(ANSWER_TOKENS, ANSWER_SIGMA)) + 1
            hashes += [(names + n).to_bytes(8, "big") for n in range(full - len(hashes))]
            names += full
            requests.append(
                TracedRequest(at, None, hashes[:full], full, int(tokens), answer, agent=f"session-{session}")
            )
            at += some(PAUSE_S, PAUSE_SIGMA)
            tokens += answer + some(ADDED_TOKENS, ADDED_SIGMA)
    return Trace(MADE_UP, MOONCAKE_BLOCK_TOKENS, requests, names)


def sessions_of(trace: Trace, scale: Scale, half: int | None = None, copies: int = 1) -> list[Chat]:
    """Return a trace's sessions of two turns and more, in the order of their beginnings.

    Args:
        half: 0 or 1 for every second session, from the first or the second on; None for all.
        copies: number of chats made of each session. They have equal lengths and pauses, and no block in common.
    """
    found: dict[str, list[TracedRequest]] = {}
    for request, name in zip(trace.requests, _names(trace.requests), strict=True):
        found.setdefault(name, []).append(request)
    numbers: dict[tuple[int, bytes], int] = {}
    chats = [
        [Chat(f"{name}-{n}" if n else name, 0.0, _turns(trace, requests, scale, numbers, n)) for n in range(copies)]
        for name, requests in found.items()
    ]
    long = [alike for alike in chats if len(alike[0].turns) >= LEAST_TURNS]
    return [chat for alike in long[half :: 1 if half is None else 2] for chat in alike]


def _names(requests: Sequence[TracedRequest]) -> Iterator[str]:
    """Yield the name of each request's session.

    A request without a name in the trace belongs to the session whose prompt it continues, or else to a new session. A
    nameless prompt of one full block counts as not continued, because the block may be a common system prompt.
    """
    ends: dict[bytes, str] = {}
    for number, request in enumerate(requests):
        prompt = request.hashes[: request.prompt_blocks]
        before = next((ends[name] for name in reversed(prompt) if name in ends), "")
        name = request.agent or before or f"session-{number}"
        if len(prompt) > 1 or request.agent:
            ends |= dict.fromkeys(prompt[-1:], name)
        yield name


def _turns(
    trace: Trace, requests: Sequence[TracedRequest], scale: Scale, numbers: dict[tuple[int, bytes], int], copy: int
) -> tuple[Turn, ...]:
    block = max(1, round(trace.block_tokens / scale.shrink))
    turns, before = list[Turn](), requests[0].at
    for request in requests:
        names = request.hashes[: request.prompt_blocks]
        blocks = tuple(numbers.setdefault((copy, name), len(numbers)) for name in names)
        rest = max(1, round(request.input_tokens / scale.shrink) - len(blocks) * block)
        prompt = Prompt(blocks, block, rest, len(numbers) * len(requests) + len(turns), scale.vocabulary)
        answer = max(1, round(request.output_tokens / scale.shrink))
        if len(prompt) + answer > scale.longest:
            break
        turns.append(Turn(Said(prompt), answer, (request.at - before) / scale.faster, is_whole=True))
        before = request.at
    return tuple(turns)


def agents_of(sessions: Sequence[Chat], agents: int, seconds: float, ramp_s: float, seed: int) -> list[Chat]:
    """Return each agent's first session, linked by `then` to the later ones.

    An agent begins at a random turn after which its first session's pauses add up to `seconds` or more, or else at the
    first turn. Agents begin evenly within `ramp_s`. Raises BadParameter for more agents than sessions.
    """
    if agents > len(sessions):
        raise typer.BadParameter(
            f"--agents {agents} is too many: the trace has {len(sessions)} sessions of two turns; --copies makes more"
        )
    rng = random.Random(seed)
    dealt = rng.sample(sessions, len(sessions))
    found = []
    for agent in range(agents):
        chat = None
        for session in reversed(dealt[agent::agents]):
            chat = replace(session, turns=_known(session.turns), then=chat)
        assert chat is not None
        left = [*accumulate(turn.pause_s for turn in reversed(chat.turns))][::-1]
        long = [at for at, pauses in enumerate(left[1:]) if pauses >= seconds]
        start = rng.choice(long) if long else 0
        turns = _known(chat.turns[start:])
        found.append(replace(chat, starts_s=ramp_s * agent / agents, turns=turns))
    return found


def as_weka(chat: Chat, model: str) -> dict[str, Any]:
    """Return a session in AIPerf's `weka_trace` format: each request's time is the sum of the pauses before it."""
    requests = []
    for turn, at in zip(chat.turns, accumulate(turn.pause_s for turn in chat.turns), strict=True):
        prompt = turn.said.tokens
        assert isinstance(prompt, Prompt)
        sizes = {"in": len(prompt), "out": turn.answer_tokens, "hash_ids": [*prompt.blocks]}
        requests.append({"t": at, "type": "s", "model": model, **sizes})
    about = {"id": chat.name, "models": [model], "block_size": prompt.block_tokens, "hash_id_scope": "local"}
    return about | {"requests": requests}


def _known(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """Return turns with `known`: the number of prompt tokens in blocks of earlier `turns`. The first has no pause."""
    seen, found = set[int](), list[Turn]()
    for turn in turns:
        prompt = turn.said.tokens
        assert isinstance(prompt, Prompt)
        known = sum(number in seen for number in prompt.blocks) * prompt.block_tokens
        seen |= {*prompt.blocks}
        found.append(replace(turn, known=known, pause_s=turn.pause_s if found else 0.0))
    return tuple(found)
