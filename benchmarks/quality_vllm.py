"""Measure quality on vLLM. A prefix is sent, goes cold (all its full blocks are stored compressed), and is restored for
a prompt with a continuation, whose tokens are scored. Chats are answered, go cold, and are answered again.

An arm is plain vLLM, where nothing goes cold, or vLLM with one setting of Manthan. Each arm's process runs this file.
"""

import asyncio
import json
import math
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from manthan.benchmarks.arms import Arm
from manthan.benchmarks.engines import POLL_S, Answer, Engine, EngineOptions, Report, WrongPathError
from manthan.benchmarks.quality_pieces import Chat, Piece
from manthan.benchmarks.quality_scores import Top
from manthan.benchmarks.quality_settings import EXACT, PEERS, RECOMPUTED, QualityError, Setting, Shape, long_nbytes
from manthan.benchmarks.restore import MANTHAN, check

SCRIPT = Path(__file__)
POOL_PIECES = 2.5
IDLE_AFTER_S = 0.05
STORE_SHARE = 2.0
"""Size of the cold store, as a multiple of all requests' bf16 KV, so that nothing is dropped even if all is exact."""


# -- in the measuring process ---------------------------------------------------------------------------


@dataclass(frozen=True)
class ScoringOptions(EngineOptions):
    """Options of an engine that returns any requested number of log-probabilities."""

    def engine_args(self) -> dict[str, Any]:
        return super().engine_args() | {"max_logprobs": -1}


async def measure(
    engine: Engine,
    report: Report,
    *,
    pieces: list[dict[str, Any]],
    chats: list[dict[str, Any]],
    top: int,
    ours: bool,
    exact: dict[str, int],
    folder: str,
) -> dict[str, Any]:
    """Score the rest of each piece after its prefix, and answer each chat twice. Scores are files in `folder`.

    ours: True if Manthan restores the prefix; otherwise vLLM's prefix cache has it, and pieces of a text (not of tasks)
    are also scored without any cache. exact: with Manthan, expected number of blocks with exact tokens (kept without
    loss), by length of a prefix. The result then has the bytes of each prefix in the store as "stored".
    """
    cached, stored = [], []
    for number, piece in enumerate(pieces):
        report.step(f"piece {number + 1} of {len(pieces)}")
        prefix, rest, session = piece["prefix"], piece["rest"], f"piece-{number}"
        if ours:
            stored.append(await _go_cold(engine, prefix, session, number, exact[str(len(prefix))]))
        else:
            await engine.ask(prefix, session)
        answer = await _score(engine, prefix + rest, len(rest) - 1, top, session, Path(folder, f"{number}.npz"))
        check_origin(answer, len(prefix), ours, f"piece {number}")
        cached.append(answer.cached_tokens)
        if not ours and not piece["task"]:
            again = Path(folder, f"{RECOMPUTED}-{number}.npz")
            answer = await _score(engine, prefix + rest, len(rest) - 1, top, session, again, reuse=False)
            check(answer, engine.options.block_size, cached=False, external=False, what=f"piece {number}, recomputed")
    answers = []
    for number, chat in enumerate(chats):
        report.step(f"chat {number + 1} of {len(chats)}")
        answers.append(await _answer_twice(engine, chat, ours, number))
    return {"prefix_tokens_not_computed": cached, "answers": answers} | ({"stored": stored} if ours else {})


async def _go_cold(engine: Engine, prefix: list[int], session: str, number: int, exact: int) -> float:
    """Send a prefix, wait until its session is cold, and empty vLLM's prefix cache.

    number: count of earlier sessions, all cold. exact: expected number of blocks with exact tokens. Returns the
    prefix's bytes in the store. Raises WrongPathError if another number of blocks has exact tokens.
    """
    await engine.until_cold(number)
    before = [engine.metrics(name) for name in ("manthan_exact_blocks", "manthan_cold_bytes")]
    await engine.ask(prefix, session)
    await engine.until_cold(number + 1)
    found, nbytes = (
        engine.metrics(name) - was
        for name, was in zip(("manthan_exact_blocks", "manthan_cold_bytes"), before, strict=True)
    )
    await engine.forget_resident()
    if found != exact:
        raise WrongPathError(f"piece {number}: {found:.0f} blocks have exact tokens, wanted are {exact}")
    return nbytes


async def _answer_twice(engine: Engine, chat: dict[str, Any], ours: bool, number: int) -> dict[str, list[int]]:
    """Return token ids: {"hot": answer to the computed prompt, "later": answer to the prompt restored or cached}."""
    session, what = f"chat-{number}", f"chat {number}"
    if ours:
        await engine.until_cold()
    cold = engine.sessions("cold")  # an earlier chat has two cold sessions if its answers differ
    hot, first = await _answer(engine, chat, session, "hot")
    check(first, engine.options.block_size, cached=False, external=False, what=f"{what}, at first")
    if ours:
        await engine.until(lambda: engine.sessions("cold") > cold, f"{what} was not cold")
        await engine.until_cold()
        await engine.forget_resident()
    later, second = await _answer(engine, chat, session, "later")
    check_origin(second, chat["prefix"], ours, what)
    return {"hot": hot, "later": later}


async def _answer(engine: Engine, chat: dict[str, Any], session: str, when: str) -> tuple[list[int], Answer]:
    """Return the greedy answer, and the origin of the prompt's tokens. A cache salt keeps chats from sharing blocks."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=0,
        max_tokens=chat["tokens"],
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    external = engine.metrics("external_prefix_cache_hits_total")
    prompt = {"prompt_token_ids": chat["prompt"], "cache_salt": session}
    async for output in engine._llm.generate(prompt, params, f"{session}-{when}", session_id=session):
        found = output
    await asyncio.sleep(POLL_S)  # vLLM updates a step's metrics after it hands out the outputs
    external = engine.metrics("external_prefix_cache_hits_total") - external
    answer = Answer(0.0, len(chat["prompt"]), found.num_cached_tokens or 0, round(external))
    return list(found.outputs[0].token_ids), answer


def check_origin(answer: Answer, prefix: int, ours: bool, what: str) -> None:
    """Raise WrongPathError unless vLLM reused exactly `prefix` tokens: restored if `ours`, else from the pool."""
    wanted = (prefix, prefix if ours else 0)
    if (answer.cached_tokens, answer.external_tokens) != wanted:
        raise WrongPathError(
            f"{what}: {answer.cached_tokens} of {prefix} prefix tokens were not computed, "
            f"{answer.external_tokens} of these restored; wanted are {wanted[0]} and {wanted[1]}"
        )


async def _score(
    engine: Engine, tokens: list[int], scored: int, top: int, session: str, file: Path, reuse: bool = True
) -> Answer:
    """Write the `Top` of the last `scored` tokens into `file`. reuse: True to reuse cached KV; False to compute all."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=0,
        max_tokens=1,
        ignore_eos=True,
        detokenize=False,
        prompt_logprobs=top,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_reading_prefix_cache=not reuse,
    )
    external = engine.metrics("external_prefix_cache_hits_total")
    async for output in engine._llm.generate(
        {"prompt_token_ids": tokens}, params, f"{file.stem}-scored", session_id=session
    ):
        found = output
    await asyncio.sleep(POLL_S)  # vLLM updates a step's metrics after it hands out the outputs
    external = engine.metrics("external_prefix_cache_hits_total") - external
    flat = found.prompt_logprobs
    start = flat.start_indices[-scored]  # uncomputed tokens have no scores
    ids, logs = (
        np.array(part[start:], dtype).reshape(scored, -1)
        for part, dtype in ((flat.token_ids, np.int32), (flat.logprobs, np.float32))
    )
    rank = np.array([flat.ranks[at] for at in flat.start_indices[-scored:]], np.int32)
    top_of = Top(logs[:, 0], rank, ids[:, 1:], logs[:, 1:])  # each row begins with the actual token
    np.savez(file, **top_of._asdict())
    return Answer(0.0, len(tokens), found.num_cached_tokens or 0, round(external))


async def _run(job: dict[str, Any], report: Report) -> None:
    report.step("the engine starts")
    engine = Engine(ScoringOptions(**job["engine"]))
    try:
        report.tell(result=await measure(engine, report, **job["parameters"]) | {"manthan": engine.manthan_metrics()})
    finally:
        engine.stop()


def main(job_file: Path) -> None:
    """Do the job in `job_file`; see arms.run_arm."""
    job = json.loads(job_file.read_text())
    report = Report(Path(job["report"]))
    try:
        asyncio.run(_run(job, report))
    except BaseException as error:
        traceback.print_exc()
        report.tell(error=f"{type(error).__name__}: {error}")
        raise SystemExit(1) from None


# -- the arms -------------------------------------------------------------------------------------------


def check_settings(settings: list[Setting]) -> None:
    """Raise QualityError for a setting that vLLM cannot run: a codec of PEERS, or values that Manthan refuses."""
    from manthan.manager.config.resolve import ConfigError, resolve_config

    for setting in settings:
        if setting.codec in PEERS:
            raise QualityError(f"{setting.codec} cannot be measured on an engine: use --engine transformers.")
        try:
            resolve_config(None, flags={"codec": setting.config})
        except ConfigError as error:
            raise QualityError(
                f"{setting.name} cannot be measured on an engine: {error}. Use --engine transformers, or --exact 0."
            ) from None


@dataclass(frozen=True)
class Questions:
    """Pieces and chats that each arm is asked.

    top: number of likeliest tokens with probabilities; -1 for all. answer: most tokens of an answer.
    """

    pieces: list[Piece]
    chats: list[Chat]
    top: int
    answer: int

    @property
    def longest(self) -> int:
        """Tokens of the longest request, generated tokens included."""
        pieces = [len(piece.tokens) + 1 for piece in self.pieces]
        return max(pieces + [len(chat.prompt) + self.answer for chat in self.chats])

    @property
    def tokens(self) -> int:
        """Sum of tokens of all pieces and chats, generated tokens included."""
        pieces = sum(len(piece.tokens) + 1 for piece in self.pieces)
        return pieces + sum(len(chat.prompt) + self.answer for chat in self.chats)

    def parameters(self, block_size: int) -> dict[str, Any]:
        """Return the questions and `top` as keyword arguments of `measure`, in types of JSON."""
        pieces = [{"prefix": piece.prefix, "rest": piece.rest, "task": piece.task} for piece in self.pieces]
        chats = [
            {"prompt": chat.prompt, "prefix": chat.prefix(block_size), "tokens": self.answer} for chat in self.chats
        ]
        return {"pieces": pieces, "chats": chats, "top": self.top}


def arm(setting: Setting | None, model: str, shape: Shape, block_size: int, asked: Questions, folder: Path) -> Arm:
    """Return the arm of a setting; None is plain vLLM. folder: the arm's own folder, for scores."""
    name = setting.name if setting else EXACT
    manthan, exact = None, {}
    if setting:
        lengths = {len(piece.prefix) for piece in asked.pieces}
        counts = {length: setting.exact_tokens(length // block_size, block_size) for length in lengths}
        exact = {str(length): int(np.count_nonzero(tokens)) for length, tokens in counts.items()}  # for JSON
        store = {"kind": "host", "max_bytes": math.ceil(STORE_SHARE * asked.tokens * 2 * shape.token_numbers)}
        manthan = MANTHAN | {
            "idle": {"after_s": IDLE_AFTER_S, "min_tokens": 0},
            "codec": setting.config,
            "tiers": store,
        }
    engine = EngineOptions(
        model=model,
        block_size=block_size,
        blocks=math.ceil(POOL_PIECES * asked.longest / block_size) + 2,
        max_model_len=asked.longest,
        batched_tokens=max(8192, asked.longest),
        eager=True,
        manthan=manthan,
        made_up_weights=False,
    )
    parameters = {"ours": setting is not None, "exact": exact, "folder": str(folder)}
    return Arm(name, "quality", engine, asked.parameters(block_size) | parameters)


def read_scores(folder: Path, names: list[str], pieces: list[Piece], vocabulary: int) -> dict[str, Any]:
    """Return {name of an arm: {"pieces": figures of each piece}}, also for RECOMPUTED, which lacks tasks' pieces.

    folder: has a subfolder with scores for each arm. names: names of arms; the first is EXACT.
    """

    def top(name: str, file: str) -> Top:
        with np.load(folder / name / file) as found:
            return Top(**found)

    def figures(name: str, stem: str, pieces: list[Piece]) -> dict[str, Any]:
        found = []
        for number, piece in enumerate(pieces):
            exact, other = top(EXACT, f"{number}.npz"), top(name, f"{stem}{number}.npz")
            found.append(other.figures(exact, vocabulary, piece)._asdict())
        return {"pieces": found}

    exact, *others = names
    short = [piece for piece in pieces if not piece.task]
    found = {exact: figures(exact, "", pieces), RECOMPUTED: figures(exact, f"{RECOMPUTED}-", short)}
    return found | {name: figures(name, "", pieces) for name in others}


def told(
    result: dict[str, Any], setting: Setting | None, asked: Questions, block_size: int, shape: Shape
) -> dict[str, Any]:
    """Return an arm's results without the scores. answers: each cut after its end token. stored: for each piece, bytes
    of the prefix and estimated bytes of a session of LONG tokens.
    """
    answers = [
        {name: chat.answer(tokens) for name, tokens in answer.items()}
        for chat, answer in zip(asked.chats, result["answers"], strict=True)
    ]
    if setting is None:
        return result | {"answers": answers}
    pairs = [(nbytes, len(piece.prefix)) for nbytes, piece in zip(result["stored"], asked.pieces, strict=True)]
    stored = [[nbytes, long_nbytes(setting, nbytes, tokens, block_size, shape)] for nbytes, tokens in pairs]
    return result | {"answers": answers, "stored": stored}


if __name__ == "__main__":
    main(Path(sys.argv[sys.argv.index("--job") + 1]))
