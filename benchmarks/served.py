"""Model served by the benchmarks over HTTP, the flags of `vllm serve`, and the prompts."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Self

import typer

from manthan.benchmarks.engines import random_tokens
from manthan.benchmarks.shapes import Shape, write_model
from manthan.benchmarks.tables import DIGITS, MODEL, Table

CPU_BLOCK_TOKENS, GPU_BLOCK_TOKENS = 32, 16
SAFE_VOCABULARY = 1000
"""Upper bound of token ids for a server with an unknown model folder."""
WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")


@dataclass(frozen=True)
class Session:
    """Token ids of a session's two prompts, `first` and `again`, and the right answers to both if known.

    Both prompts are equal, or, if answers are known, differ only in the question at the end.
    """

    first: list[int]
    again: list[int]
    answers: tuple[str, str] | None = None

    def is_right(self, text: str, turn: int) -> bool | None:
        return None if self.answers is None else text == self.answers[turn]

    @property
    def max_tokens(self) -> int:
        return DIGITS if self.answers else 1

    def full_tokens(self, block_size: int) -> int:
        """Return the number of tokens in full blocks that both prompts share, without the last token of `again`."""
        pairs = zip(self.first, self.again, strict=False)
        shared = next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(self.first), len(self.again)))
        return min(shared, len(self.again) - 1) // block_size * block_size


@dataclass(frozen=True)
class Served:
    """Model to serve. made_up: True if `folder` has no weights, so that answers mean nothing."""

    folder: Path
    block_size: int
    made_up: bool
    on_gpu: bool
    shape: Shape

    @classmethod
    def choose(cls, model: Path | None, block_size: int, made_up_in: Path, on_gpu: bool) -> Self:
        """Return the given model; else a model of Qwen3-8B's shape on a GPU, and the tests' tiny model on a CPU.

        made_up_in: folder for a written model. Raises BadParameter if the model is not there.
        """
        if model is not None and not (model / "config.json").exists():
            raise typer.BadParameter(f"--model {model} has no config.json: name the folder of a model")
        if model is None and on_gpu:
            model = write_model(made_up_in)
        elif model is None and not MODEL.exists():
            raise typer.BadParameter(f"there is no {MODEL} here: run this in Manthan's repository, or name a --model")
        folder = model or MODEL
        made_up = not any(found for pattern in WEIGHTS for found in folder.glob(pattern))
        block_size = block_size or (GPU_BLOCK_TOKENS if on_gpu else CPU_BLOCK_TOKENS)
        return cls(folder, block_size, made_up, on_gpu, Shape.of(folder))

    @property
    def name(self) -> str:
        return f"{self.folder.name}{' (made-up weights)' if self.made_up else ''}"

    @property
    def block_nbytes(self) -> int:
        return self.block_size * self.shape.token_nbytes

    def flags(self, blocks: int, longest: int, *, eager: bool = True) -> list[str]:
        """Return flags of `vllm serve`. blocks: size of the pool. longest: most tokens of a prompt with its answer.

        eager: True for no CUDA graphs, as always on a CPU. The server then starts sooner, and answers slower.
        """
        made_up = ["--load-format", "dummy", "--skip-tokenizer-init"] if self.made_up else []
        graphs = ["--compilation-config", '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}']
        return [
            *("--dtype", "bfloat16", "--block-size", str(self.block_size), "--num-gpu-blocks-override", str(blocks)),
            *("--max-model-len", str(longest), "--enable-prompt-tokens-details", *made_up),
            *(["--enforce-eager"] if eager or not self.on_gpu else graphs),
        ]


def make_session(served: Served, tokens: int, seed: int, index: int) -> Session:
    """Return a session of about `tokens` tokens. Sessions of different indices have no full block in common."""
    if served.made_up or not (served.folder / "tokenizer.json").exists():
        return random_session(seed, index, tokens, served.shape.vocabulary)
    return _lookup(str(served.folder), tokens, f"{seed}-{index}")


def random_session(seed: int, index: int, tokens: int, vocabulary: int) -> Session:
    ids = random_tokens(seed, index, tokens, vocabulary)
    return Session(ids, ids)


@lru_cache(maxsize=4096)  # all arms ask the same sessions
def _lookup(model: str, tokens: int, seed: str) -> Session:
    table = Table(model, tokens, seed)
    (first, right_first), (again, right_again) = table.question(0), table.question(1)
    return Session(first, again, (right_first, right_again))
