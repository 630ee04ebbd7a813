"""Quality on a real engine: a prefix is sent, goes cold, and comes back with its continuation, whose tokens are scored.

An arm is an engine. The process that measures runs this file; `arms.run_arm` starts it.
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
from manthan.benchmarks.quality_pieces import Piece
from manthan.benchmarks.quality_scores import Top
from manthan.benchmarks.quality_settings import EXACT, RECOMPUTED, QualityError, Setting, Shape
from manthan.benchmarks.restore import MANTHAN, check

SCRIPT = Path(__file__)
POOL_PIECES = 2.5
IDLE_AFTER_S = 0.05
STORE_SHARE = 2.0
"""Bytes of the cold store in bf16 sizes of all pieces: nothing is dropped, exact tokens included."""


# -- in the measuring process ---------------------------------------------------------------------------


@dataclass(frozen=True)
class ScoringOptions(EngineOptions):
    """An engine that tells as many log-probabilities as it is asked for."""

    def engine_args(self) -> dict[str, Any]:
        return super().engine_args() | {"max_logprobs": -1}


async def measure(
    engine: Engine, report: Report, *, pieces: list[dict[str, Any]], top: int, ours: bool, exact: int, folder: str
) -> dict[str, Any]:
    """Score each piece after its prefix: restored with Manthan (`ours`), hot without. Scores go into files.

    exact: blocks of each prefix of which tokens must be kept exact.
    """
    answers = []
    for number, piece in enumerate(pieces):
        report.step(f"piece {number + 1} of {len(pieces)}")
        prefix, rest, session = piece["prefix"], piece["rest"], f"piece-{number}"
        if ours:
            await _go_cold(engine, prefix, session, number, exact)
        else:
            await engine.ask(prefix, session)
        answer = await _score(engine, prefix + rest, len(rest) - 1, top, session, Path(folder, f"{number}.npz"))
        check_origin(answer, len(prefix), ours, number)
        answers.append(answer.cached_tokens)
        if not ours:
            again = Path(folder, f"{RECOMPUTED}-{number}.npz")
            answer = await _score(engine, prefix + rest, len(rest) - 1, top, session, again, reuse=False)
            check(answer, engine.options.block_size, cached=False, external=False, what=f"piece {number}, recomputed")
    return {"prefix_tokens_not_computed": answers}


async def _go_cold(engine: Engine, prefix: list[int], session: str, number: int, exact: int) -> None:
    """Send a prefix after `number` others, and wait until it is cold with its exact tokens. Raises WrongPathError."""
    await engine.until_cold(number)
    before = engine.metrics("manthan_exact_blocks")
    await engine.ask(prefix, session)
    await engine.until_cold(number + 1)
    if (found := engine.metrics("manthan_exact_blocks") - before) != exact:
        raise WrongPathError(f"piece {number}: {found:.0f} blocks have exact tokens, wanted are {exact}")


def check_origin(answer: Answer, prefix: int, ours: bool, number: int) -> None:
    """All of the prefix, and nothing else, came from where it should. Raises WrongPathError."""
    wanted = (prefix, prefix if ours else 0)
    if (answer.cached_tokens, answer.external_tokens) != wanted:
        raise WrongPathError(
            f"piece {number}: {answer.cached_tokens} of {prefix} prefix tokens were not computed, "
            f"{answer.external_tokens} of these restored; wanted are {wanted[0]} and {wanted[1]}"
        )


async def _score(
    engine: Engine, tokens: list[int], scored: int, top: int, session: str, file: Path, reuse: bool = True
) -> Answer:
    """Write the Top of the last `scored` tokens into file. reuse: cached KV is read, which vLLM otherwise avoids."""
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
    await asyncio.sleep(POLL_S)  # the step's metrics come with its outputs
    external = engine.metrics("external_prefix_cache_hits_total") - external
    flat = found.prompt_logprobs
    start = flat.start_indices[-scored]  # what was not computed has no scores
    ids, logs = (
        np.array(part[start:], dtype).reshape(scored, -1)
        for part, dtype in ((flat.token_ids, np.int32), (flat.logprobs, np.float32))
    )
    rank = np.array([flat.ranks[at] for at in flat.start_indices[-scored:]], np.int32)
    top_of = Top(logs[:, 0], rank, ids[:, 1:], logs[:, 1:])  # each row begins with the token that stands there
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
    """Do the one job in this file; see arms.run_arm."""
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
    """Refuse what Manthan's configuration does not take. Raises QualityError."""
    from manthan.manager.config.resolve import ConfigError, resolve_config

    for setting in settings:
        try:
            resolve_config(None, flags={"codec": setting.config})
        except ConfigError as error:
            raise QualityError(
                f"{setting.name} cannot be measured on an engine: {error}. Use --engine transformers, or --exact 0+0."
            ) from None


def arm(
    setting: Setting | None, model: str, shape: Shape, block_size: int, pieces: list[Piece], top: int, folder: Path
) -> Arm:
    """An engine for this setting, or a plain one for None. folder: of its own, scores go there."""
    name = setting.name if setting else EXACT
    longest = max(len(piece.tokens) for piece in pieces) + 1
    manthan, exact = None, 0
    if setting:
        exact = int(np.count_nonzero(setting.exact_tokens(len(pieces[0].prefix) // block_size, block_size)))
        nbytes = math.ceil(STORE_SHARE * len(pieces) * longest * 2 * shape.token_numbers)
        store = {"kind": "host", "max_bytes": nbytes}
        manthan = MANTHAN | {
            "idle_after_s": IDLE_AFTER_S,
            "min_tokens": 0,
            "codec": setting.config,
            "cold_store": store,
        }
    engine = EngineOptions(
        model=model,
        block_size=block_size,
        blocks=math.ceil(POOL_PIECES * longest / block_size) + 2,
        max_model_len=longest,
        batched_tokens=max(8192, longest),
        eager=True,
        manthan=manthan,
        made_up_weights=False,
    )
    parts = [{"prefix": piece.prefix, "rest": piece.rest} for piece in pieces]
    parameters = {
        "pieces": parts,
        "top": top,
        "ours": setting is not None,
        "exact": exact,
        "folder": str(folder),
    }
    return Arm(name, "quality", engine, parameters)


def read_scores(folder: Path, names: list[str], pieces: list[Piece], vocabulary: int) -> dict[str, Any]:
    """{name: {"pieces": figures of each}} of these arms; folder has one for each, with its scores."""

    def top(name: str, file: str) -> Top:
        with np.load(folder / name / file) as found:
            return Top(**found)

    def figures(name: str, stem: str) -> dict[str, Any]:
        found = []
        for number, piece in enumerate(pieces):
            exact, other = top(EXACT, f"{number}.npz"), top(name, f"{stem}{number}.npz")
            found.append(other.figures(exact, vocabulary, piece.values)._asdict())
        return {"pieces": found}

    exact, *others = names
    found = {exact: figures(exact, ""), RECOMPUTED: figures(exact, f"{RECOMPUTED}-")}
    return found | {name: figures(name, "") for name in others}


if __name__ == "__main__":
    main(Path(sys.argv[sys.argv.index("--job") + 1]))
